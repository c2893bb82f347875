"""Workspaces of the ops of `memplan.kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.kernels.launch import programs, without_data
from memplan.planning.capture.allocation_probe import Allocations
from memplan.planning.graph.op_schema import KERNELS, NUMBERS, short
from memplan.planning.graph.tensor_like import Like
from memplan.trace.records import HOST


def kernel_scratch(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the bytes that an op of `memplan.kernels` allocates and frees again, in addition to its results; None for
    other ops.

    Args:
        target: the op.
        args, kwargs: its arguments, with tensors without data on the step's device.
    """
    if target not in KERNELS:
        return None
    place = next(leaf.device for leaf in _torch.tree_leaves(tuple(args)) if isinstance(leaf, Tensor))
    host = torch.device(HOST)

    def on_host(leaf: Any) -> Any:
        return replace(Like.of(leaf), device=host).empty() if isinstance(leaf, Tensor) else leaf

    with Allocations(real=False) as allocations, without_data(place.type, programs=programs(place)):
        arguments, keywords = _torch.tree_map(on_host, (tuple(args), dict(kwargs)))
        with allocations.span("op"):
            results = _torch.run_kernel_of_ours(short(target), arguments, keywords)
        del results
    scratch = allocations.most("op") - allocations.left("op")
    return scratch + NUMBERS if place.type == HOST else round_to_blocks(scratch)
