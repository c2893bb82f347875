"""The steps of docs/smaller-input.md as torch runs them; importable by name, for an emulated card."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[], None]


def _step(layer: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype) -> Step:
    layer = layer.to(dtype).cuda()
    data = torch.zeros(sizes, dtype=dtype, device="cuda")

    def step() -> None:
        with torch.no_grad():
            layer(data)

    return step


def size_127() -> Step:
    """Of the sweep over sizes."""
    return _step(nn.Conv3d(64, 64, 3, padding=1), (1, 64, 127, 127, 127), torch.float32)


def size_128() -> Step:
    """The same, a voxel larger."""
    return _step(nn.Conv3d(64, 64, 3, padding=1), (1, 64, 128, 128, 128), torch.float32)


def batch_6() -> Step:
    """Of the sweep over batches."""
    return _step(nn.Conv3d(16, 32, 3, padding=1), (6, 16, 32, 32, 32), torch.float16)


def batch_7() -> Step:
    """The same, a sample more."""
    return _step(nn.Conv3d(16, 32, 3, padding=1), (7, 16, 32, 32, 32), torch.float16)


def kernel_3() -> Step:
    """Of the sweep over kernels."""
    return _step(nn.Conv3d(128, 128, 3), (1, 128, 64, 64, 64), torch.float16)


def kernel_4() -> Step:
    """The same, with a larger kernel."""
    return _step(nn.Conv3d(128, 128, 4), (1, 128, 64, 64, 64), torch.float16)


def size_361x370x251() -> Step:
    """Of pytorch#95024."""
    return _step(nn.Conv3d(64, 32, 3, padding=1), (1, 64, 361, 370, 251), torch.float16)


def size_362x370x251() -> Step:
    """The one that needed 108.21 GiB."""
    return _step(nn.Conv3d(64, 32, 3, padding=1), (1, 64, 362, 370, 251), torch.float16)


def size_4x1090x1922() -> Step:
    """Of pytorch#128947."""
    return _step(nn.Conv3d(256, 64, 3), (1, 256, 4, 1090, 1922), torch.float32)


def size_5x1090x1922() -> Step:
    """The one that needed 161.37 GiB."""
    return _step(nn.Conv3d(256, 64, 3), (1, 256, 5, 1090, 1922), torch.float32)


STEPS: dict[str, Callable[[], Step]] = {
    step.__name__: step
    for step in (
        size_127, size_128, batch_6, batch_7, kernel_3, kernel_4, size_361x370x251, size_362x370x251,
        size_4x1090x1922, size_5x1090x1922,
    )
}  # fmt: skip
