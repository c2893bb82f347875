"""Which torch a dry run takes is read from its files, and what is missing is said in one line."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch

from memplan.dry.cuda_torch import find_torch
from memplan.errors import DeviceError


def environment(folder: Path, version: str, cuda: str | None) -> Path:
    """Make what an environment with a build of torch looks like."""
    packages = folder / "lib" / "python3.12" / "site-packages"
    (packages / "torch" / "lib").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text("#!/bin/sh\n")
    (folder / "bin" / "python").chmod(0o755)
    text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\ngit_version = 'abc'\n"
    (packages / "torch" / "version.py").write_text(text)
    if cuda is not None:
        (packages / "torch" / "lib" / "libtorch_cuda.so").write_bytes(b"")
    return folder


def test_a_cuda_build_is_found(tmp_path: Path) -> None:
    found = find_torch(environment(tmp_path, "2.11.0+cu130", "13.0"))
    assert (found.version, found.cuda, found.commit, found.is_tested) == ("2.11.0+cu130", "13.0", "abc", True)
    assert found.python == tmp_path / "bin" / "python"
    assert find_torch(tmp_path / "bin" / "python") == found


@pytest.mark.parametrize(
    ("version", "seen"), [("2.10.1+cu128", False), ("2.15.0+cu132", True), ("2.16.0+cu132", False)]
)
def test_a_release_that_was_never_compared_is_told_apart(tmp_path: Path, version: str, seen: bool) -> None:
    assert find_torch(environment(tmp_path, version, "13.0")).is_tested == seen


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "is no environment of Python"),
        ("empty", "has no torch"),
        ("cpu", r"torch 2.13.0\+cpu in .* is built without CUDA. Expected a CUDA build of torch. Install torch"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path: Path, made: str | None, said: str) -> None:
    if made == "cpu":
        environment(tmp_path, "2.13.0+cpu", None)
    elif made == "empty":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(DeviceError, match=said) as caught:
        find_torch(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(DeviceError, match=r"a dry run on Linux aarch64. Expected Linux on x86-64"):
        find_torch(None)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_this_torch_without_cuda_is_refused() -> None:
    with pytest.raises(DeviceError, match="is built without CUDA"):
        find_torch(None)
