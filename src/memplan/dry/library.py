"""The emulated driver: built once with the compiler of the machine, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memplan.dry.cuda_torch import CudaTorch
from memplan.errors import DeviceError

SOURCES = Path(__file__).parent / "sources"
_NVML = "nvml.c"
_LINKED = ("torch", "torch_cuda", "torch_cuda_linalg", "torch_python", "torch_nvshmem", "c10_cuda", "caffe2_nvrtc")
_OURS = re.compile(r"(cuda|__cuda|cu[A-Z]|cublas|cudnn)\w*$")
_FLAGS = ("-O1", "-g", "-w", "-fPIC", "-fvisibility=hidden")
_SUMS = "sums"
_GCC = "Install gcc (with Debian or Ubuntu: apt install gcc binutils)"


@dataclass(frozen=True)
class Library:
    """The files that are loaded before everything else in a process that is to see the card."""

    driver: Path
    nvml: Path
    triton: Path
    """A folder in which Triton finds the driver under the name that it looks for."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process that sees the card.

        Inductor and Triton get caches of their own: the kernels that win where every time is 0 are not for a real card.
        """
        caches = cache_folder() / "compiled"
        return {
            "LD_PRELOAD": f"{self.driver}:{self.nvml}",
            "TRITON_LIBCUDA_PATH": str(self.triton),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }


def cache_folder() -> Path:
    """Return the cache folder of built libraries: below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    variable = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(variable) if os.path.isabs(variable) else Path.home() / ".cache"
    return base / "memplan" / "dry"


def library_for(torch: CudaTorch) -> Library:
    """Return the emulated driver for a build of torch; it is built unless the cache has an intact build of it.

    Raises:
        DeviceError: no compiler, headers of CUDA that are missing, or a source that does not compile.
    """
    compiler = _compiler()
    if shutil.which("nm") is None:
        raise DeviceError("there is no nm here, which lists symbols", expected="binutils", do=_GCC)
    folder = cache_folder() / _key(torch, compiler)
    library = Library(folder / "libdry.so", folder / "libdryml.so", folder / "triton")
    if _is_intact(folder):
        return library
    with _build_folder(folder.parent) as temporary:
        built = Path(temporary) / "built"
        built.mkdir()
        _Build(torch, compiler, Path(temporary)).write(built)
        if folder.exists():  # damaged
            shutil.rmtree(folder, ignore_errors=True)
        try:
            built.rename(folder)
        except OSError:
            if not _is_intact(folder):  # else another process was first
                raise
    return library


def shared_library_of(source: Path, soname: str) -> Path:
    """Return a C source that needs no headers as a shared library; it is built unless the cache has it.

    ``soname``: name by which programs that are linked with it load it.

    Raises:
        DeviceError: no compiler, or it does not compile.
    """
    compiler, version = _compiler()
    digest = hashlib.sha256("\0".join((compiler, version, soname)).encode() + source.read_bytes()).hexdigest()[:20]
    library = cache_folder() / f"{source.stem}-{digest}.so"
    checksum = library.with_suffix(".sum")
    if not library.is_file() or not checksum.is_file() or checksum.read_text(encoding="utf-8") != _sum(library):
        with _build_folder(library.parent) as folder:
            built = Path(folder) / library.name
            _run(compiler, source.name, "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", built, source)
            checksum.write_text(_sum(built), encoding="utf-8")
            built.replace(library)
    return library


@contextmanager
def _build_folder(folder: Path) -> Iterator[str]:
    """Create a folder of the cache, and within it a temporary one for a build, which is removed at the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        within = tempfile.TemporaryDirectory(dir=folder, prefix=".building-")
    except OSError as error:
        raise DeviceError(
            f"the cache folder {folder} cannot be made ({error.strerror})",
            expected="a folder that can be written, for what memplan builds",
            do="Set XDG_CACHE_HOME to one",
        ) from None
    with within as name:
        yield name


def _compiler() -> tuple[str, str]:
    """Return (path of the machine's C compiler, first line of its ``--version``)."""
    names = (*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang")
    path = next((path for path in map(shutil.which, names) if path is not None), None)
    if path is None:
        raise DeviceError("there is no C compiler here (cc, gcc or clang)", expected="one, for the dry card", do=_GCC)
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return path, version.split("\n")[0]


def _key(torch: CudaTorch, compiler: tuple[str, str]) -> str:
    """Return a hash of everything that the emulated driver is built from: the compiler, torch, and memplan's sources.

    ``compiler``: (path, version).
    """
    size = torch.library.stat().st_size
    parts = [*compiler, *_FLAGS, torch.version, torch.cuda, torch.commit, str(torch.packages), str(size)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in [Path(__file__), *sorted(SOURCES.iterdir())]:
        if source.is_file():
            digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _is_intact(folder: Path) -> bool:
    """Return whether a folder of the cache has both libraries with the checksums that they were built with."""
    try:
        sums = (folder / _SUMS).read_text(encoding="utf-8").split()
        return sums == [_sum(folder / "libdry.so"), _sum(folder / "libdryml.so")]
    except (OSError, ValueError):
        return False


def _sum(path: Path) -> str:
    """Return the checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Build:
    """One build of the library, in a folder that is thrown away."""

    def __init__(self, torch: CudaTorch, compiler: tuple[str, str], folder: Path) -> None:
        """Find CUDA's headers. ``compiler``: (path, version); ``folder``: temporary, for object files."""
        self._torch, self._compiler, self._folder = torch, compiler[0], folder
        nvidia = torch.packages / "nvidia"
        places = ("cu13", "cuda_runtime", "cudnn")
        self._headers = [nvidia / name / "include" for name in places if (nvidia / name / "include").is_dir()]
        """Folders of CUDA's headers."""

    def write(self, folder: Path) -> None:
        """Compile the driver and the NVML library into a folder, with Triton's links and the checksums."""
        header = next((place / "cuda.h" for place in self._headers if (place / "cuda.h").is_file()), None)
        if header is None or not any((place / "cudnn.h").is_file() for place in self._headers):
            raise DeviceError(
                f"the headers of CUDA and cuDNN are not beside torch {self._torch.version}",
                expected="cuda.h and cudnn.h below nvidia/ in the same site-packages, as pip installs them",
                do="Install torch by pip in that environment",
            )
        if not (header.parent / "crt").is_dir():  # the wheel of CUDA 12 may lack it
            self._headers.append(self._crt_headers())
        objects = [self._compile(source) for source in sorted(SOURCES.glob("*.c")) if source.name != _NVML]
        stubs = self._folder / "stubs.c"
        defined = set(self._symbols("--defined-only", *objects))
        stubs.write_text(
            stubs_of(self._undefined_symbols(), header.read_text(encoding="utf-8"), defined), encoding="utf-8"
        )
        objects.append(self._compile(stubs))
        self._run("-shared", "-Wl,-soname,libcuda.so.1", "-o", folder / "libdry.so", *objects, "-ldl", "-lpthread")
        self._run("-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libdryml.so",
                  SOURCES / _NVML)  # fmt: skip
        links = folder / "triton"
        links.mkdir()
        for name in ("libcuda.so", "libcuda.so.1"):
            (links / name).symlink_to(Path("..", "libdry.so"))
        sums = f"{_sum(folder / 'libdry.so')} {_sum(folder / 'libdryml.so')}\n"
        (folder / _SUMS).write_text(sums, encoding="utf-8")

    def _crt_headers(self) -> Path:
        """Return a folder with CUDA's compiler headers, crt/*.h, which may lie outside of the other headers' folder."""
        places = [self._torch.packages / "nvidia" / "cuda_nvcc" / "include", Path("/usr/local/cuda/include")]
        crt = next((place / "crt" for place in places if (place / "crt").is_dir()), None)
        if crt is None:
            raise DeviceError(
                "CUDA's headers crt/*.h are neither beside torch nor in /usr/local/cuda",
                expected="them, for the dry card",
                do=f"Install nvidia-cuda-nvcc-cu12 in the environment of {self._torch.python}",
            )
        folder = self._folder / "headers"
        folder.mkdir()
        (folder / "crt").symlink_to(crt)
        return folder

    def _compile(self, source: Path) -> Path:
        """Compile a C source, and return the object file."""
        built = self._folder / f"{source.stem}.o"
        headers = [f"-I{place}" for place in (SOURCES, *self._headers)]
        self._run(*_FLAGS, *headers, "-c", source, "-o", built)
        return built

    def _undefined_symbols(self) -> set[str]:
        """Return the names of NVIDIA's functions that torch's libraries need."""
        files = [self._torch.library.parent / f"lib{name}.so" for name in _LINKED]
        symbols = self._symbols("-D", "--undefined-only", *(file for file in files if file.is_file()))
        return {name for name in symbols if _OURS.match(name)}

    def _symbols(self, *arguments: str | Path) -> list[str]:
        """Return the functions that nm lists with these arguments, in object files or libraries: defined (T) and
        undefined (U)."""
        result = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=False)
        lines = [line.split() for line in result.stdout.splitlines()]
        return [words[-1].partition("@")[0] for words in lines if len(words) >= 2 and words[-2] in "TU"]

    def _run(self, *arguments: str | Path) -> None:
        _run(self._compiler, f"the dry card for torch {self._torch.version}", *arguments)


def _run(compiler: str, what: str, *arguments: str | Path) -> None:
    """Run a compiler with these arguments, to build ``what``. Raises DeviceError if it fails."""
    result = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
        raise DeviceError(
            f"{compiler} cannot build {what}: {lines[0].strip()[:200]}",
            expected="a C compiler that takes CUDA's headers",
            do="Name another one by the variable CC, such as gcc",
        )


_DRIVER = re.compile(r"^CUresult CUDAAPI\s+(\w+)\(", re.MULTILINE)
_RENAMED = re.compile(r"^\s*#\s*define (cu[A-Z]\w*)\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w*)\)?\s*$", re.MULTILINE)


def stubs_of(undefined: set[str], header: str, defined: set[str]) -> str:
    """Return C source that defines all functions of the CUDA driver and NVIDIA's libraries that memplan's own sources
    lack.

    cuBLAS's functions succeed: a product has no result here. Others report that they are not supported, and are noted.
    Those of cuDNN are left to the real library.

    Args:
        undefined: the functions that torch's libraries need.
        header: text of cuda.h, whose functions are defined, too.
        defined: the functions that memplan's sources define.
    """
    driver = set(_DRIVER.findall(header))
    for pair in _RENAMED.findall(header):
        driver |= set(pair)
    text = '#include "dry.h"\n#define EXPORT __attribute__((visibility("default")))\n'
    for name in sorted((undefined | driver) - defined):
        if not name.startswith("cudnn"):
            not_supported = 801  # CUDA_ERROR_NOT_SUPPORTED
            missing = f'return dry_missing("{name}", {not_supported});'
            body = "return 0;" if name.startswith("cublas") else missing
            text += f"EXPORT int {name}(void) {{ {body} }}\n"
    return text
