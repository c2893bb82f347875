"""Max pools as torch's own kernels, in a step of fused ones, where these are faster.

Inductor writes a pool as a loop over every window, in which what it fuses runs once for each element of a window, and a
pool's derivative as a scatter into a copy in order. torch's kernels are several times as fast in channels last, and
copy nothing that is laid out alike. In the order of dimensions, where neither goes through a window by vectors,
Inductor's loop over a small window is the faster one on the way forward. Under names of ours, torch's are called as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from memplan._torch import inductor
from memplan.planning.ops.custom_ops import define

_WINDOW = "int[{0}] kernel_size, int[{0}] stride=[], int[{0}] padding=0, int[{0}] dilation=1, bool ceil_mode=False"
_GIVEN = "int[{0}] kernel_size, int[{0}] stride, int[{0}] padding, int[{0}] dilation, bool ceil_mode"


def _schemas() -> Iterator[tuple[str, str]]:
    """Yield the names and schemas: those of torch's ops."""
    for dims in (2, 3):
        name = f"max_pool{dims}d_with_indices"
        yield name, f"{name}(Tensor self, {_WINDOW.format(dims)}) -> (Tensor, Tensor)"
        backward = f"{name}_backward"
        yield backward, f"{backward}(Tensor grad_output, Tensor self, {_GIVEN.format(dims)}, Tensor indices) -> Tensor"


def _registered(name: str, schema: str) -> tuple[Any, Any]:
    torchs = getattr(torch.ops.aten, name).default
    define(schema, torchs)(torchs)
    return torchs, getattr(torch.ops.memplan, name).default


SMALL = 9
"""Elements of a window that Inductor's loop goes through faster than torch's. Measured on a CPU: 2x2 and 3x3 in 0.7 of
the time, 5x5 in 1.4 times as long."""


def _forward(torchs: Any, dims: int) -> Callable[..., Any]:
    """Return a pool as our op, or as Inductor traces it: its kernel for the op itself takes up to ten times as long."""
    ours, inductors = POOLS[torchs], inductor.decomposition(torchs)

    def pool(x: Tensor, kernel: Sequence[int], *rest: Any, **named: Any) -> Any:
        window = prod(kernel) if len(kernel) == dims else kernel[0] ** dims
        if inductors is None or window > SMALL or not x.is_contiguous():
            return ours(x, kernel, *rest, **named)
        return inductors(x, kernel, *rest, **named)

    return pool


POOLS: Mapping[Any, Any] = dict(_registered(*one) for one in _schemas())
"""memplan's op of the same arguments, for each of torch's pools and their derivatives."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return the functions that replace torch's pools, by op, when a step is traced."""
    aten = torch.ops.aten
    forward = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
    return {**POOLS, **{torchs: _forward(torchs, dims) for torchs, dims in forward.items()}}
