"""Max pools as torch's own kernels, in a step of fused ones, where these are faster.

Inductor writes a pool as a loop over every window, in which what it fuses runs once for each element of a window, and a
pool's derivative as a scatter into a copy in order. torch's kernels are several times as fast in channels last, and
copy nothing that is laid out alike. In the order of dimensions, where neither goes through a window by vectors,
Inductor's loop is the faster one on the way forward. Under names of ours, torch's are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memplan.planning.ops import define

_WINDOW = "int[{0}] kernel_size, int[{0}] stride=[], int[{0}] padding=0, int[{0}] dilation=1, bool ceil_mode=False"
_GIVEN = "int[{0}] kernel_size, int[{0}] stride, int[{0}] padding, int[{0}] dilation, bool ceil_mode"


def _schemas() -> Iterator[tuple[str, str]]:
    """Names and schemas: those of torch's ops."""
    for dims in (2, 3):
        name = f"max_pool{dims}d_with_indices"
        yield name, f"{name}(Tensor self, {_WINDOW.format(dims)}) -> (Tensor, Tensor)"
        backward = f"{name}_backward"
        yield backward, f"{backward}(Tensor grad_output, Tensor self, {_GIVEN.format(dims)}, Tensor indices) -> Tensor"


def _registered(name: str, schema: str) -> tuple[Any, Any]:
    torchs = getattr(torch.ops.aten, name).default
    define(schema, torchs)(torchs)
    return torchs, getattr(torch.ops.memplan, name).default


def _by_layout(ours: Any) -> Callable[..., Any]:
    """A pool as our op, or left for Inductor to write."""
    return lambda x, *rest, **named: NotImplemented if x.is_contiguous() else ours(x, *rest, **named)


POOLS: Mapping[Any, Any] = dict(_registered(*one) for one in _schemas())
"""By torch's pool and its derivative, ours of the same arguments."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By torch's op, what stands for it when a step is traced."""
    return {torchs: ours if "backward" in str(torchs) else _by_layout(ours) for torchs, ours in POOLS.items()}
