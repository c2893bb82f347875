"""Which cuDNN is found: of an environment that is named, of this one, else the default of this torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch

from memplan.cudnn import cudnn_library
from memplan.cudnn.cudnn_library import VERSION_OF_TORCH, Cudnn, find_cudnn
from memplan.errors import DeviceError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cuDNN is asked on Linux")


def installed(folder: Path, version: tuple[int, int, int] = (9, 19, 0)) -> Path:
    """Files of an environment with cuDNN, as pip installs it; returns its packages."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.symlink_to(sys.executable)
    packages = folder / "lib" / "python3.12" / "site-packages"
    for kind, name in (("lib", "libcudnn.so.9"), ("include", "cudnn_version.h")):
        (packages / "nvidia" / "cudnn" / kind).mkdir(parents=True)
        (packages / "nvidia" / "cudnn" / kind / name).touch()
    names = ("MAJOR", "MINOR", "PATCHLEVEL")
    text = "".join(f"#define CUDNN_{name} {number}\n" for name, number in zip(names, version, strict=True))
    text += "#define CUDNN_VERSION (CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100 + CUDNN_PATCHLEVEL)\n"
    (packages / "nvidia" / "cudnn" / "include" / "cudnn_version.h").write_text(text)
    (packages / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    for name in ("libcublas.so.13", "libcublasLt.so.13", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (packages / "nvidia" / "cu13" / "lib" / name).touch()
    return packages


def test_an_environment_that_is_named(tmp_path: Path) -> None:
    packages = installed(tmp_path)
    found = find_cudnn(tmp_path)
    assert found == Cudnn(packages, 91900) == find_cudnn(str(tmp_path / "bin" / "python"))
    assert found is not None
    assert found.title == "cuDNN 9.19.0"
    assert found.file.is_file()
    assert [path.name for path in found.needed] == [
        "libnvrtc-builtins.so.13.0", "libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13",
    ]  # fmt: skip


def test_what_is_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_cudnn(None) == default()
    assert find_cudnn(True) is None
    packages = installed(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(packages)])
    assert find_cudnn(True) == Cudnn(packages, 91900)
    found = find_cudnn(None)
    assert found is not None
    assert found == Cudnn(packages, 91900, is_default=True)
    assert found.for_card((7, 5)) == found
    assert found.for_card((7, 0)) == Cudnn(None, 91002, is_default=True)  # of this one nothing can run there
    assert find_cudnn(False) is None


def default() -> Cudnn:
    """What stands for the cuDNN of the CUDA build of this torch: a version that is not installed."""
    major, minor = map(int, torch.__version__.split(".")[:2])
    return Cudnn(None, VERSION_OF_TORCH[major, minor], is_default=True)


def test_older_cards_run_with_the_last_version_that_has_kernels_for_them(tmp_path: Path) -> None:
    """Builds of torch with CUDA 12.6 have cuDNN 9.10.2.21 and kernels for cards older than the T4."""
    assert default().for_card((7, 5)) == default()
    assert default().for_card((7, 0)) == default().for_card((6, 1)) == Cudnn(None, 91002, is_default=True)
    named = find_cudnn("9.19")
    assert named is not None
    assert named.for_card((7, 0)) == named
    found = Cudnn(installed(tmp_path), 91900)
    assert found.for_card((6, 1)) == found


@pytest.mark.parametrize(("version", "title"), [("2.13.0+cpu", "9.20.0"), ("2.15.1", "9.26.0"), ("2.99.0", "9.26.0")])
def test_the_default_is_what_the_cuda_build_of_this_torch_comes_with(
    monkeypatch: pytest.MonkeyPatch, version: str, title: str
) -> None:
    """By the dependencies of PyPI's wheels; a torch that is not known yet has the newest."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(torch, "__version__", version)
    found = find_cudnn(None)
    assert found is not None
    assert (found.title, found.packages, found.is_default) == (f"cuDNN {title}", None, True)


def test_one_that_cannot_describe_a_card_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = installed(tmp_path, (9, 7, 1))
    monkeypatch.setattr(sys, "path", [str(packages)])
    assert find_cudnn(None) == default()
    with pytest.raises(DeviceError, match=r"has cuDNN 9\.7\.1\. Expected cuDNN 9\.8 or later"):
        find_cudnn(tmp_path)


def test_an_environment_without_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="is no environment of Python"):
        find_cudnn(tmp_path / "nowhere")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(DeviceError, match=r"has no cuDNN as pip installs it.*memplan\[cudnn\]"):
        find_cudnn(tmp_path)


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = installed(tmp_path)
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setattr(cudnn_library.sys, "platform", "darwin")
    assert find_cudnn(None) == default()
    with pytest.raises(DeviceError, match="Linux on x86-64"):
        find_cudnn(tmp_path)


@needs_cuda_torch
def test_the_real_one_is_of_the_version_that_its_file_has() -> None:
    found = find_cudnn(ENVIRONMENT)
    assert found is not None
    import ctypes

    library = ctypes.CDLL(os.fspath(found.file))
    library.cudnnGetVersion.restype = ctypes.c_size_t
    assert found.version == library.cudnnGetVersion()
