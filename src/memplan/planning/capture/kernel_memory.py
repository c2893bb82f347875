"""Workspaces of the ops of `memplan.kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from memplan import _torch
from memplan.planning.capture.allocation_probe import Allocations
from memplan.planning.graph.op_schema import KERNELS, overload
from memplan.planning.graph.tensor_like import Like


def kernel_scratch(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the bytes that an op of `memplan.kernels` allocates and frees again, in addition to its results; None for
    other ops.

    Args:
        target: the op.
        args, kwargs: its arguments, with tensors without data.
    """
    if target not in KERNELS:
        return None
    with Allocations(real=False) as allocations:
        arguments, keywords = _torch.tree_map(
            lambda leaf: Like.of(leaf).empty() if isinstance(leaf, Tensor) else leaf, (tuple(args), dict(kwargs))
        )
        with allocations.span("op"):
            results = overload(target)(*arguments, **keywords)
        del results
    return allocations.most("op") - allocations.left("op")
