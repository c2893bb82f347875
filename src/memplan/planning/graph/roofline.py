"""Roofline model of an op's time: max(FLOPs / rate, bytes / bandwidth) + the cost of a call.

Kernels reach neither rate, but the planner only compares ops with each other. The same graph gets the same seconds on
every machine, to the last bit. FLOPs are from torch's own formulas (`torch.utils.flop_counter`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.devices import Device
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value, map_refs, refs

LAUNCH = 5e-6
"""Seconds of a torch call and the launch of its kernel on a CUDA card."""

LINK_SHARE = 0.76
"""Share of the link's standard rate that copies between pinned host memory and a card reach: the smallest of published
readings of copies in one direction. RTX 4090, eight cards, PCIe 4.0 x16: 0.76 to 0.86 (NVIDIA/nvbandwidth#15); Tesla
P100, 3.0 x16: 0.77 and 0.82 (mpicbg-scicomp/gearshifft#82); A100, 4.0 x16: 0.80 (NVIDIA/nvbandwidth#42); H100, 5.0 x16,
to the host: 0.84 (NVIDIA/nvbandwidth#24)."""

OWN = ("aten", "prims")
"""Namespaces of torch's own ops."""
FOREIGN = 10
"""Factor on the cost of another library's op. Its cost is unknown, so the planner should rather save its results."""

_UNKNOWN_BANDWIDTH = 500_000_000_000
_UNKNOWN_RATE = 20_000_000_000_000
"""Rates of a card without figures: those of a medium card. Only their ratio matters."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of an op."""

    flops: int
    bytes: int
    """Bytes read and written, each tensor counted once."""
    rate_dtype: str
    """Dtype whose FLOP/s apply: a name of `memplan.devices.model.DTYPES`."""
    foreign: bool = False
    """Whether it is the op of another library."""


WORKS: dict[str, Callable[[tuple[Any, ...]], Work]] = {}
"""Work of ops that consist of others, from their arguments, with a Value in place of tensors, by target. Whoever
registers the op adds it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a machine: FLOP/s and bytes per second."""

    flops_per_second: tuple[tuple[str, float], ...]
    """FLOP/s by dtype."""
    bandwidth: float
    """Bytes a second."""
    call_seconds: float
    """Seconds of a call without work."""

    def seconds(self, work: Work) -> float:
        """Return the seconds of an op on this machine."""
        rates = dict(self.flops_per_second)
        rate = rates.get(work.rate_dtype, rates["float32"])
        factor = FOREIGN if work.foreign else 1
        return max(work.flops / rate, work.bytes * factor / self.bandwidth) + self.call_seconds


CPU = Rates(
    (("float32", 150e9), ("float64", 60e9), ("bfloat16", 300e9), ("float16", 60e9)), bandwidth=8e9, call_seconds=2e-6
)
"""A CPU of two cores: the rates for plans for "the CPU" without measurements. Measured on two cores of a
cloud machine with AVX-512: float32 products of 1024 x 1024 matrices reached 75 GFLOP/s a core, 3 x 3 convolutions 113
to 236; adding tensors of 16 to 64 MiB, with a result in memory that is new to the process, moved 3 to 8 GB/s, which is
what matters for values that are large enough to be worth a decision; an op on 4 numbers took 1.5 us."""


def rates_of(device: Device) -> Rates:
    """Return the rates of a CUDA card of the catalogue. With torch's defaults, float32 matrix products run as float32,
    and float32 convolutions as TF32 if the card has it."""
    rates = {name: float(rate) for name, rate in device.flops.items()}
    rates.setdefault("float32", float(_UNKNOWN_RATE))
    return Rates(tuple(sorted(rates.items())), float(device.bandwidth or _UNKNOWN_BANDWIDTH), LAUNCH)


def work_of(graph: JointGraph, op: GraphOp) -> Work:
    """Return the FLOPs and bytes of an op."""
    if op.target in WORKS:
        return WORKS[op.target](map_refs(op.args, graph.values.__getitem__))
    is_chunked = op.target == op_schema.CHUNKED  # a convolution with a further argument, the number of pieces
    formula = _torch.flop_formula("aten.convolution.default" if is_chunked else op.target)
    flops = 0
    if formula is not None:
        args = map_refs(op.args[:-1] if is_chunked else op.args, lambda value: _meta_tensor(graph.values[value]))
        kwargs = map_refs(op.kwargs, lambda value: _meta_tensor(graph.values[value]))
        results = tuple(None if value is None else _meta_tensor(graph.values[value]) for value in op.outputs)
        flops = int(formula(*args, **kwargs, out_val=results if op.returns_tuple else results[0]))
    bytes_moved = op.discarded + sum(graph.values[v].bytes for v in op.makes)
    operands = [graph.values[v] for v in dict.fromkeys(refs((op.args, op.kwargs))) if graph.base(v) in op.reads]
    for value in operands:
        element_bytes = math.prod(value.shape) * op_schema.itemsize(value.dtype)
        # A view reads its own elements only, an expanded tensor each element of its base once.
        bytes_moved += min(element_bytes, graph.values[value.base].bytes)
    dtype = next((graph.values[v].dtype for v in (*refs(op.args), *op.makes)), "float32")
    # by default torch lets float32 convolutions run as TF32 (torch.backends.cudnn.allow_tf32)
    rate = "tf32" if dtype == "float32" and "conv" in op.target else dtype
    is_own = op.target.partition(".")[0] in OWN or op.target in op_schema.OWN
    return Work(flops, bytes_moved, rate, foreign=not is_own)


def _meta_tensor(value: Value) -> Any:
    """Return a contiguous tensor without data, of the value's shape and dtype."""
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
