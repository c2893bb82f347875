"""The emulated driver is built once for a torch and a compiler, and a damaged one is built again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memplan import cudnn
from memplan.dry import library
from memplan.dry.cuda_torch import CudaTorch
from memplan.dry.library import SOURCES, cache_folder, library_for, shared_library_of, stubs_of
from memplan.errors import DeviceError

SINGLE = Path(cudnn.__file__).with_name("no_driver.c")
KEPT = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("nm") is None, reason="there is no C compiler here, or no nm"
)
HEADER = """
#define cuMemAlloc cuMemAlloc_v2
CUresult CUDAAPI cuMemAlloc(size_t *p, size_t n);
CUresult CUDAAPI cuInit(unsigned flags);
"""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaTorch:
    """Return a build of torch whose headers are as small as a source that is compiled against them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "dry.h").write_text("int dry_missing(const char *, int);\n")
    (sources / "cudart.c").write_text('#include "cuda.h"\nint cuInit(unsigned f) { return 100; }\n'
                                      "int dry_missing(const char *n, int c) { return c; }\n")  # fmt: skip
    (sources / "nvml.c").write_text("int nvmlInit_v2(void) { return 0; }\n")
    monkeypatch.setattr(library, "SOURCES", sources)
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    headers = packages / "nvidia" / "cu13" / "include"
    (headers / "crt").mkdir(parents=True)
    (headers / "cuda.h").write_text("")
    (headers / "cudnn.h").write_text("")
    (packages / "torch" / "lib").mkdir(parents=True)
    made = packages / "torch" / "lib" / "libtorch_cuda.so"
    code = "int cudaMalloc(void); int cublasGemm(void); int f(void) { return cudaMalloc() + cublasGemm(); }"
    if shutil.which("cc") is not None:
        subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(made)], input=code, text=True, check=True)
    return CudaTorch(tmp_path / "env" / "bin" / "python", packages, "2.11.0+cu130", "13.0", "abc")


@needs_compiler
def test_it_is_built_once(torch: CudaTorch) -> None:
    first = library_for(torch)
    built = first.driver.stat().st_mtime_ns
    assert library_for(torch) == first
    assert first.driver.stat().st_mtime_ns == built
    assert first.driver.is_relative_to(cache_folder())
    assert first.variables["LD_PRELOAD"] == f"{first.driver}:{first.nvml}"
    found = Path(first.variables["TRITON_LIBCUDA_PATH"], "libcuda.so.1")
    assert found.resolve() == first.driver.resolve()
    assert all(Path(first.variables[name]).is_relative_to(cache_folder()) for name in KEPT)
    names = subprocess.run(["nm", "-D", first.driver], capture_output=True, text=True, check=True).stdout
    assert {"cudaMalloc", "cublasGemm"} <= {line.split()[-1] for line in names.splitlines()}


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_one_is_built_again(torch: CudaTorch, damage: str) -> None:
    first = library_for(torch)
    whole = first.driver.read_bytes()
    if damage == "cut":
        first.driver.write_bytes(whole[:100])
    else:
        first.driver.unlink()
    library_for(torch)
    assert len(first.driver.read_bytes()) == len(whole)


@needs_compiler
def test_other_sources_and_another_torch_have_libraries_of_their_own(torch: CudaTorch) -> None:
    first = library_for(torch)
    changed = library.SOURCES / "cudart.c"
    changed.write_text(changed.read_text() + "int more(void) { return 1; }\n")
    second = library_for(torch)
    other = CudaTorch(torch.python, torch.packages, "2.13.0+cu130", torch.cuda, torch.commit)
    assert len({first, second, library_for(other)}) == 3


@needs_compiler
def test_a_source_that_does_not_compile_is_one_line(torch: CudaTorch) -> None:
    (library.SOURCES / "cudart.c").write_text("int cuInit(unsigned f) { return nothing; }\n")
    with pytest.raises(DeviceError, match=r"cannot build the dry card for torch 2.11.0") as caught:
        library_for(torch)
    assert "\n" not in str(caught.value)
    assert not any(path for path in cache_folder().iterdir()), "nothing half made is left"


def test_no_compiler_is_one_line(torch: CudaTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError, match=r"there is no C compiler here.*Install gcc"):
        library_for(torch)


@needs_compiler
def test_missing_headers_are_one_line(torch: CudaTorch) -> None:
    (torch.packages / "nvidia" / "cu13" / "include" / "cudnn.h").unlink()
    with pytest.raises(DeviceError, match=r"the headers of CUDA and cuDNN are not beside torch 2.11.0"):
        library_for(torch)


def test_what_no_source_has_is_noted_when_it_is_called() -> None:
    text = stubs_of({"cublasSgemm_v2", "cufftPlan1d", "cudnnAnything"}, HEADER, {"cuInit"})
    assert "int cublasSgemm_v2(void) { return 0; }" in text
    assert 'int cufftPlan1d(void) { return dry_missing("cufftPlan1d", 801); }' in text
    assert 'int cuMemAlloc_v2(void) { return dry_missing("cuMemAlloc_v2", 801); }' in text
    assert "cudnn" not in text, "the real library answers"
    assert "cuInit(void)" not in text


def test_the_sources_are_in_the_package() -> None:
    assert {"cudart.c", "driver.c", "cublas.c", "cudnn.c", "cudnn_run.c", "nvml.c", "dry.h"} <= {
        path.name for path in SOURCES.iterdir()
    }


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "unsummed"])
def test_a_damaged_single_source_is_built_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = shared_library_of(SINGLE, "libcuda.so.1")
    whole = first.read_bytes()
    if damage == "cut":
        first.write_bytes(whole[:100])
    else:
        first.with_suffix(".sum").unlink()
    assert shared_library_of(SINGLE, "libcuda.so.1") == first
    assert len(first.read_bytes()) == len(whole)


@needs_compiler
def test_a_cache_that_is_no_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="Set XDG_CACHE_HOME"):
        shared_library_of(SINGLE, "libcuda.so.1")
