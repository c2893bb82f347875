"""Ops whose gradient comes from a bare sum: expanded, so that a kernel makes it contiguous, which takes a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import thinned
from torch import Tensor
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan

IMAGE, LINE, VOLUME = (2, 8, 12, 12), (2, 8, 12), (2, 4, 6, 6, 6)


def grid(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], *x.shape[2:], x.dim() - 2)


OPS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "pixel shuffle": (IMAGE, lambda x: F.pixel_shuffle(x, 2)),
    "pixel unshuffle": (IMAGE, lambda x: F.pixel_unshuffle(x, 2)),
    "channel shuffle": (IMAGE, lambda x: F.channel_shuffle(x, 2)),
    **{
        f"{mode} pad of {len(shape) - 2}": (
            shape,
            lambda x, mode=mode: F.pad(x, [1, 2] * (x.dim() - 2), mode=mode),
        )
        for mode in ("reflect", "replicate", "circular", "constant")
        for shape in (LINE, IMAGE, VOLUME)
    },
    **{
        f"grid sample of {len(shape) - 2}": (shape, lambda x: F.grid_sample(x, grid(x), align_corners=False))
        for shape in (IMAGE, VOLUME)
    },
    **{
        f"{mode} interpolation": (shape, lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode))
        for mode, shape in (
            ("nearest", LINE), ("linear", LINE), ("nearest", IMAGE), ("bilinear", IMAGE), ("bicubic", IMAGE),
            ("nearest-exact", IMAGE), ("trilinear", VOLUME), ("area", IMAGE),
        )
    },
    "nearest interpolation of volumes": (VOLUME, lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    "max pool of 1": (LINE, lambda x: F.max_pool1d(x, 2)),
    "max pool of 2": (IMAGE, lambda x: F.max_pool2d(x, 2)),
    "max pool of 3": (VOLUME, lambda x: F.max_pool3d(x, 2)),
    "avg pool of 1": (LINE, lambda x: F.avg_pool1d(x, 2)),
    "avg pool of 2": (IMAGE, lambda x: F.avg_pool2d(x, 2)),
    "avg pool of 3": (VOLUME, lambda x: F.avg_pool3d(x, 2)),
    "adaptive avg pool of 1": (LINE, lambda x: F.adaptive_avg_pool1d(x, 5)),
    "adaptive avg pool of 2": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 5)),
    "adaptive avg pool of 3": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, 3)),
    "adaptive max pool of 1": (LINE, lambda x: F.adaptive_max_pool1d(x, 5)),
    "adaptive max pool of 2": (IMAGE, lambda x: F.adaptive_max_pool2d(x, 5)),
    "adaptive max pool of 3": (VOLUME, lambda x: F.adaptive_max_pool3d(x, 3)),
    "lp pool": (IMAGE, lambda x: F.lp_pool2d(x, 2, 2)),
    "unfold": (IMAGE, lambda x: F.unfold(x, 3)),
    "fold": ((2, 72, 100), lambda x: F.fold(x, (12, 12), 3)),
    "group norm": (IMAGE, lambda x: F.group_norm(x, 4)),
    "group norm, channels last": (IMAGE, lambda x: F.group_norm(x.to(memory_format=torch.channels_last), 4)),
    "instance norm": (IMAGE, lambda x: F.instance_norm(x)),
    "layer norm": (IMAGE, lambda x: F.layer_norm(x, [12])),
    "batch norm": (IMAGE, lambda x: F.batch_norm(x, None, None, training=True)),
    "batch norm of lines": (LINE, lambda x: F.batch_norm(x, None, None, training=True)),
    "batch norm, channels last": (
        IMAGE, lambda x: F.batch_norm(x.to(memory_format=torch.channels_last), None, None, training=True),
    ),
    "softmax": (IMAGE, lambda x: x.softmax(-1)),
    "log softmax": (IMAGE, lambda x: x.log_softmax(1)),
    "gelu": (IMAGE, F.gelu),
    "gelu by tanh": (IMAGE, lambda x: F.gelu(x, approximate="tanh")),
    "batch norm and its update": (
        IMAGE,
        lambda x: torch.ops.aten._batch_norm_with_update(x, *torch.rand(4, 8), 0.1, 1e-5)[0],
    ),
    "silu": (IMAGE, F.silu),
    "elu": (IMAGE, F.elu),
    "prelu": (IMAGE, lambda x: F.prelu(x, torch.ones(8))),
    "glu": (IMAGE, lambda x: F.glu(x, 1)),
    "log sigmoid": (IMAGE, F.logsigmoid),
    "softplus": (IMAGE, F.softplus),
    "roll": (IMAGE, lambda x: x.roll(1, 2)),
    "flip": (IMAGE, lambda x: x.flip(2)),
    "cumulative sum": (IMAGE, lambda x: x.cumsum(1)),
    "a matrix product": ((12, 12), lambda x: x @ x),
    "sorted": (IMAGE, lambda x: x.sort(-1)[0]),
    "the largest": (IMAGE, lambda x: x.topk(3)[0]),
    "gathered": ((8, 12), lambda x: x.gather(1, torch.zeros(8, 3, dtype=torch.int64))),
    "an index": ((8, 12), lambda x: x[torch.tensor([0, 3, 3])]),
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(OPS, 6))
def test_the_copy_of_an_expanded_gradient_is_predicted(name: str) -> None:
    shape, op = OPS[name]

    def build() -> Any:
        x = torch.randn(shape, requires_grad=True)

        def step() -> None:
            x.grad = None
            op(x).sum().backward()

        return step

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
