"""The seconds of an op by its work alone: max(FLOPs / rate, bytes / bandwidth) + what a call costs.

No kernel reaches either rate, but the planner only weighs ops against each other. The same graph gives the same
seconds everywhere, to the last bit. FLOPs by torch's own formulas (`torch.utils.flop_counter`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.devices import Device
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value, map_refs, refs

LAUNCH = 5e-6
"""Seconds that a call of torch and the launch of its kernel cost on a card."""

LINK_SHARE = 0.76
"""Share of the link's standard rate that copies between pinned host memory and a card reach: the smallest of published
readings of copies in one direction. RTX 4090, eight cards, PCIe 4.0 x16: 0.76 to 0.86 (NVIDIA/nvbandwidth#15); Tesla
P100, 3.0 x16: 0.77 and 0.82 (mpicbg-scicomp/gearshifft#82); A100, 4.0 x16: 0.80 (NVIDIA/nvbandwidth#42); H100, 5.0 x16,
to the host: 0.84 (NVIDIA/nvbandwidth#24)."""

OWN = ("aten", "prims")
"""Namespaces of the ops that torch itself brings."""
FOREIGN = 10
"""Factor on the cost of another library's op: nothing is known of it, so it is kept rather than run again."""

_UNKNOWN_BANDWIDTH = 500_000_000_000
_UNKNOWN_RATE = 20_000_000_000_000
"""Rates of a card whose figures are unknown: a middling card. Only their ratio matters."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of an op."""

    flops: int
    bytes: int
    """Read and written, each tensor once."""
    rate: str
    """Whose FLOP/s count: a name of `memplan.devices.model.DTYPES`."""
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a machine: FLOP/s and bytes per second."""

    flops: tuple[tuple[str, float], ...]
    """FLOP/s by dtype."""
    bandwidth: float
    """Bytes a second."""
    call: float
    """Seconds of a call that does nothing."""

    def seconds(self, work: Work) -> float:
        """Return the seconds of an op on this machine."""
        rates = dict(self.flops)
        rate = rates.get(work.rate, rates["float32"])
        return max(work.flops / rate, work.bytes * (FOREIGN if work.foreign else 1) / self.bandwidth) + self.call


CPU = Rates((("float32", 150e9), ("float64", 60e9), ("bfloat16", 300e9), ("float16", 60e9)), 8e9, 2e-6)
"""A CPU of two cores, by which plans for "the CPU" are made where measuring is not wanted. Measured on two cores of a
cloud machine with AVX-512: float32 products of 1024 x 1024 matrices reached 75 GFLOP/s a core, 3 x 3 convolutions 113
to 236; adding tensors of 16 to 64 MiB, with a result in memory that is new to the process, moved 3 to 8 GB/s, which is
what matters for values that are large enough to be worth a decision; an op on 4 numbers took 1.5 us."""


def rates_of(device: Device) -> Rates:
    """Return the rates of a card of the catalogue. A float32 product runs as float32, a float32 convolution as TF32
    where the card has it: torch's defaults."""
    rates = {name: float(rate) for name, rate in device.flops.items()}
    rates.setdefault("float32", float(_UNKNOWN_RATE))
    return Rates(tuple(sorted(rates.items())), float(device.bandwidth or _UNKNOWN_BANDWIDTH), LAUNCH)


def work_of(graph: JointGraph, op: GraphOp) -> Work:
    """Return the work of an op."""
    chunked = op.target == op_schema.CHUNKED
    formula = _torch.flop_formula("aten.convolution.default" if chunked else op.target)
    flops = 0
    if formula is not None:
        args = map_refs(op.args[:-1] if chunked else op.args, lambda value: _shaped(graph.values[value]))
        kwargs = map_refs(op.kwargs, lambda value: _shaped(graph.values[value]))
        made = tuple(None if value is None else _shaped(graph.values[value]) for value in op.outputs)
        flops = int(formula(*args, **kwargs, out_val=made if op.multiple else made[0]))
    return Work(flops, _moved(graph, op), _rate(graph, op), not _is_known(op.target))


def _is_known(target: str) -> bool:
    """Return whether an op is torch's, or one that memplan made of torch's ops."""
    return target.partition(".")[0] in OWN or target in op_schema.OWN


def _moved(graph: JointGraph, op: GraphOp) -> int:
    """Return the bytes of what it reads and writes; of a view, the part that it looks at."""
    wanted = dict.fromkeys(v for v in refs((op.args, op.kwargs)) if graph.base(v) in op.reads)
    read = sum(min(_bytes(graph.values[v]), graph.values[graph.base(v)].bytes) for v in wanted)
    return read + sum(graph.values[v].bytes for v in op.makes) + op.discarded


def _rate(graph: JointGraph, op: GraphOp) -> str:
    found = next((graph.values[v].dtype for v in (*refs(op.args), *op.makes)), "float32")
    return "tf32" if found == "float32" and "conv" in op.target else found


def _bytes(value: Value) -> int:
    return math.prod(value.shape) * op_schema.itemsize(value.dtype)


def _shaped(value: Value) -> Any:
    """Return a tensor without memory, for the formulas to look at."""
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
