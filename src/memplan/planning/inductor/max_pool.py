"""Call torch's own max pool kernels in a step of fused kernels, where they are faster than generated code.

Inductor generates a loop over every window, so that a fused producer runs once for each element of a window, and a
scatter into a contiguous copy as the derivative. torch's kernels are several times as fast in channels last, and need
no copy if layouts match. For contiguous inputs neither vectorizes over a window, and Inductor's forward loop is faster
for small windows. Registered under memplan's names, torch's kernels are not decomposed.
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
_BACKWARD_WINDOW = "int[{0}] kernel_size, int[{0}] stride, int[{0}] padding, int[{0}] dilation, bool ceil_mode"


def _register_pools() -> Iterator[tuple[Any, Any]]:
    """Register torch's max pool kernels under memplan's names, so that Inductor calls them instead of generating code.

    Yields:
        (torch's op, memplan's op), for each max pool and each derivative.
    """
    for dims in (2, 3):
        name, backward = f"max_pool{dims}d_with_indices", f"max_pool{dims}d_with_indices_backward"
        window = _BACKWARD_WINDOW.format(dims)
        schemas = {
            name: f"{name}(Tensor self, {_WINDOW.format(dims)}) -> (Tensor, Tensor)",
            backward: f"{backward}(Tensor grad_output, Tensor self, {window}, Tensor indices) -> Tensor",
        }
        for op, schema in schemas.items():
            aten_op = getattr(torch.ops.aten, op).default
            define(schema, aten_op)(aten_op)
            yield aten_op, getattr(torch.ops.memplan, op).default


SMALL = 9
"""Largest number of elements of a window for which Inductor's loop is faster than torch's. Measured on a CPU: 0.7 times
the time for 2x2 and 3x3, 1.4 times for 5x5."""


def _faster_pool(aten_op: Any, dims: int) -> Callable[..., Any]:
    """Return a replacement of a max pool over ``dims`` dimensions that calls the faster of torch's kernel and
    Inductor's decomposition.

    The decomposition is up to ten times as fast as Inductor's lowering of the op itself.
    """
    memplan_op, decomposition = POOLS[aten_op], inductor.decomposition(aten_op)

    def pool(x: Tensor, kernel: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Pool x. ``kernel``: size of the window; in torch, one number is for all dimensions."""
        window_elements = prod(kernel) if len(kernel) == dims else kernel[0] ** dims
        if decomposition is None or window_elements > SMALL or not x.is_contiguous():
            return memplan_op(x, kernel, *args, **kwargs)
        return decomposition(x, kernel, *args, **kwargs)

    return pool


POOLS: Mapping[Any, Any] = dict(_register_pools())
"""memplan's op with the same arguments, by torch's max pool or derivative."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return the functions that replace torch's pools, by op, when a step is traced."""
    aten = torch.ops.aten
    forward = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
    return {**POOLS, **{aten_op: _faster_pool(aten_op, dims) for aten_op, dims in forward.items()}}
