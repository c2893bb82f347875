"""Steps of one convolution each, of every kind that torch gives to cuDNN in another way; importable by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Build = Callable[[], Callable[[], Any]]


def _step(model: nn.Module, data: torch.Tensor) -> Callable[[], Any]:
    return lambda: model(data).sum().backward()


def _data(*sizes: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    data = torch.randn(*sizes, device="cuda", dtype=dtype)
    if last:
        data = data.contiguous(memory_format=torch.channels_last if len(sizes) == 4 else torch.channels_last_3d)
    return data.requires_grad_()


def plain() -> Callable[[], Any]:
    """In float32, products in TF32."""
    return _step(nn.Conv2d(64, 128, 3, padding=1).cuda(), _data(16, 64, 56, 56))


def strided() -> Callable[[], Any]:
    """The first layer: no gradient of its input."""
    return _step(nn.Conv2d(3, 64, 7, 2, 3).cuda(), _data(16, 3, 224, 224).detach())


def half() -> Callable[[], Any]:
    """In half precision."""
    return _step(nn.Conv2d(64, 128, 3, padding=1).cuda().half(), _data(16, 64, 56, 56, dtype=torch.half))


def double() -> Callable[[], Any]:
    """In float64."""
    return _step(nn.Conv2d(64, 128, 3, padding=1).cuda().double(), _data(16, 64, 56, 56, dtype=torch.float64))


def channels_last() -> Callable[[], Any]:
    """Both operands in channels last."""
    model = nn.Conv2d(64, 128, 3, padding=1).cuda().bfloat16().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # as torch documents it
    return _step(model, _data(16, 64, 56, 56, dtype=torch.bfloat16, last=True))


def mixed_formats() -> Callable[[], Any]:
    """Only the weight in channels last: the data is copied."""
    model = nn.Conv2d(64, 128, 3, padding=1).cuda().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # as torch documents it
    return _step(model, _data(16, 64, 56, 56))


def grouped() -> Callable[[], Any]:
    """Eight groups."""
    return _step(nn.Conv2d(64, 128, 3, padding=1, groups=8).cuda(), _data(16, 64, 56, 56))


def dilated() -> Callable[[], Any]:
    """A dilation of 4."""
    return _step(nn.Conv2d(64, 64, 3, padding=4, dilation=4).cuda(), _data(16, 64, 56, 56))


def depthwise_half() -> Callable[[], Any]:
    """Where torch prefers cuDNN to its own kernel: an engine that is compiled."""
    return _step(nn.Conv2d(64, 64, 3, padding=1, groups=64).cuda().half(), _data(16, 64, 56, 56, dtype=torch.half))


def transposed() -> Callable[[], Any]:
    """ConvTranspose2d."""
    return _step(nn.ConvTranspose2d(64, 32, 4, 2, 1).cuda(), _data(16, 64, 56, 56))


def conv1d() -> Callable[[], Any]:
    """Computed in two dimensions."""
    return _step(nn.Conv1d(64, 128, 7, padding=3).cuda(), _data(16, 64, 4096))


def conv1d_transposed() -> Callable[[], Any]:
    """ConvTranspose1d."""
    return _step(nn.ConvTranspose1d(64, 128, 8, stride=4, padding=2).cuda(), _data(16, 64, 1024))


def conv3d() -> Callable[[], Any]:
    """Three dimensions."""
    return _step(nn.Conv3d(16, 32, 3, padding=1).cuda(), _data(2, 16, 64, 64, 64))


def conv3d_half() -> Callable[[], Any]:
    """Three dimensions in half precision, channels last."""
    model = nn.Conv3d(16, 32, 3, padding=1).cuda().half().to(memory_format=torch.channels_last_3d)  # pyright: ignore[reportCallIssue]  # as torch documents it
    return _step(model, _data(2, 16, 64, 64, 64, dtype=torch.half, last=True))


def one_channel() -> Callable[[], Any]:
    """Sizes of 1, whose strides are as cuDNN wants them."""
    return _step(nn.Conv2d(1, 8, 3).cuda(), _data(4, 1, 28, 28))


def pointwise() -> Callable[[], Any]:
    """A kernel of 1 x 1, without bias."""
    return _step(nn.Conv2d(64, 256, 1, bias=False).cuda(), _data(8, 64, 56, 56))


def misaligned() -> Callable[[], Any]:
    """Data that begins four bytes into its block."""
    data = torch.randn(1 + 8 * 64 * 30 * 30, device="cuda")
    return _step(nn.Conv2d(64, 64, 3, padding=1).cuda(), data[1:].view(8, 64, 30, 30))


def without_tf32() -> Callable[[], Any]:
    """No tensor cores."""
    torch.backends.cudnn.allow_tf32 = False
    return plain()


def deterministic() -> Callable[[], Any]:
    """No engine whose sums have another order each time."""
    torch.backends.cudnn.deterministic = True
    return plain()


def benchmark() -> Callable[[], Any]:
    """All engines are tried in the first step."""
    torch.backends.cudnn.benchmark = True
    return plain()


STEPS: dict[str, Build] = {
    step.__name__: step
    for step in (
        plain, strided, half, double, channels_last, mixed_formats, grouped, dilated, depthwise_half, transposed,
        conv1d, conv1d_transposed, conv3d, conv3d_half, one_channel, pointwise, misaligned, without_tf32,
        deterministic, benchmark,
    )
}  # fmt: skip
