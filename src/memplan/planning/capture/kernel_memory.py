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
from memplan.planning.graph.joint_graph import peak_of
from memplan.planning.graph.op_schema import KERNELS, NUMBER_TENSOR_BYTES, short
from memplan.planning.graph.tensor_like import Like
from memplan.trace.records import HOST


def kernel_scratch(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, tuple[int, ...]] | None:
    """Return the workspace of an op of `memplan.kernels` in bytes, in addition to its results, and on a card the
    requests that it consists of (see `GraphOp.requests`); None for other ops. Tensors among the arguments are fake, on
    the step's device."""
    if target not in KERNELS:
        return None
    device = next(leaf.device for leaf in _torch.tree_leaves(tuple(args)) if isinstance(leaf, Tensor))
    host = torch.device(HOST)

    def on_host(leaf: Any) -> Any:
        return replace(Like.of(leaf), device=host).empty() if isinstance(leaf, Tensor) else leaf

    # The kernel's Python code runs on host tensors without data, as it would with the device's number of programs.
    with Allocations(real=False) as allocations, without_data(device.type, programs=programs(device)):
        host_args, host_kwargs = _torch.tree_map(on_host, (tuple(args), dict(kwargs)))
        with allocations.span("op"):
            results = _torch.run_kernel_of_ours(short(target), host_args, host_kwargs)
        del results
    if device.type == HOST:
        return allocations.peak_bytes("op") - allocations.remaining_bytes("op") + NUMBER_TENSOR_BYTES, ()
    requests = tuple(size if size < 0 else round_to_blocks(size) for size in allocations.temporaries("op"))
    return peak_of(requests), requests
