"""What fusion brings a planned step: kernels and bytes moved, before and after, and what stays bound by bandwidth.

Before: the same plan run by the engine ``graph``, where each op of the schedule is a kernel of its own. After: what the
generated code calls. On both sides a kernel moves what it reads and what it writes, at best: each tensor
once, and once more where it is known only after a pass over all of it what is to be done with it. FLOPs are those that
`torch.utils.flop_counter` counts: products and convolutions, but no pointwise arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from memplan._bytes import format_bytes
from memplan._torch import inductor
from memplan.devices import Device
from memplan.planning import forms
from memplan.planning.fused import Fused, Part
from memplan.planning.graph import GraphOp, JointGraph, Phase
from memplan.planning.roofline import CPU, Rates, Work, coding_of, rates_of, work_of
from memplan.planning.schedule import Action, Schedule
from memplan.trace.model import HOST

Bound = Literal["bandwidth", "compute"]

UNTOLD = "this version of Inductor does not say what its kernels move: what fusion brings is not known"
COPY = "aten.copy_.default"
"""The kernel of what the engine copies itself: into buffers, after the forward pass."""
_TWICE = {
    "aten._native_batch_norm_legit_functional.default": ("input",),
    "aten._native_batch_norm_legit.default": ("input",),
    "aten._native_batch_norm_legit.no_stats": ("input",),
    "aten.native_batch_norm.default": ("input",),
    "aten.native_batch_norm_backward.default": ("grad_out", "input"),
}
"""Operands that a kernel goes over twice in training: no result is known before the statistics of the whole batch are.
Source: aten/src/ATen/native/Normalization.cpp (`batch_norm_cpu_update_stats_template` and then
`batch_norm_cpu_transform_input_template`; `batch_norm_backward_cpu_template`)."""


@dataclass(frozen=True, slots=True)
class Group:
    """What one kernel computes, once."""

    kernel: str
    """Its name in the generated code; of torch's own kernels, the op."""
    fused: bool
    """Whether Inductor wrote it."""
    phase: Phase
    ops: tuple[str, ...]
    """Of the planned step, all or a part of each, in order."""
    layers: tuple[str, ...]
    where: str | None
    """``file:line`` of the first of them in the user's code."""
    bytes: int
    flops: int
    intensity: float
    """FLOPs per byte."""
    bound: Bound
    """What takes longer on the device: moving the bytes, or computing."""


@dataclass(frozen=True)
class Fusion:
    """Forward and backward pass of a step as fused kernels."""

    device: str
    """Whose rates say what a group is bound by."""
    kernels_before: int
    kernels_after: int
    bytes_before: int
    """Read and written in a step."""
    bytes_after: int
    groups: tuple[Group, ...]
    """All kernels, in the order in which they run."""

    @property
    def bound_bytes(self) -> int:
        """Moved by the groups that are bound by bandwidth."""
        return sum(group.bytes for group in self.groups if group.bound == "bandwidth")

    @property
    def summary(self) -> str:
        """What it comes to, in a line."""
        before, after = format_bytes(self.bytes_before), format_bytes(self.bytes_after)
        text = f"kernels {self.kernels_before} -> {self.kernels_after}, bytes moved {before} -> {after} a step"
        if not self.bytes_after:
            return text
        return f"{text}; {100 * self.bound_bytes / self.bytes_after:.0f} % of what is left is bound by bandwidth"


def fusion_of(of: Fused, codes: Mapping[str, inductor.Code], device: Device | None = None) -> Fusion | None:
    """What fusion brings a step.

    Args:
        of: what runs.
        codes: by name of a part, what Inductor wrote for it.
        device: whose rates count; None: those of a CPU.

    Returns:
        None where Inductor did not say what its kernels are.
    """
    called = list[tuple[Part, inductor.Kernel]]()
    for part in of.parts:
        kernels = codes[part.name].kernels
        if kernels is None:
            return None
        called += [(part, kernel) for kernel in kernels]
    moved = bytes_by_action(of.schedule)
    groups = _Grouping(of, rates_of(device) if device else CPU).groups(called)
    return Fusion(
        HOST if device is None else device.name, len(moved), len(groups), sum(moved.values()),
        sum(group.bytes for group in groups), groups,
    )  # fmt: skip


def bytes_by_action(of: Schedule) -> dict[int, int]:
    """What the engine ``graph`` moves: by the place of each action that calls a kernel, in both passes one after the
    other, the bytes that it reads and writes."""
    graph = of.graph
    encodings = {one.value: one for one in graph.encodings}
    found = dict[int, int]()
    for at, action in enumerate((*of.forward, *of.backward)):
        if action.op is not None:
            op = action.called(graph)
            found[at] = work_of(graph, op).bytes + _read_again(graph, op)
            if action.direct is not None:
                encoded = graph.values[encodings[action.direct].encoded]
                found[at] += encoded.bytes - graph.values[action.direct].bytes
        elif action.kind in ("encode", "decode"):
            assert action.value is not None
            found[at] = coding_of(graph, encodings[action.value])[0].bytes
        elif action.kind == "write" or action.copies:
            assert action.value is not None
            found[at] = 2 * graph.values[action.value].own_bytes
    return found


def _read_again(graph: JointGraph, op: GraphOp) -> int:
    """Bytes of what an op's kernel goes over a second time."""
    again = _TWICE.get(op.target, ())
    given = forms.arguments_of(op.target, op.args, op.kwargs) if again else {}
    if not given.get("train", given.get("training", True)):  # the statistics are known
        return 0
    return sum(graph.values[given[name].value].own_bytes for name in again)


class _Grouping:
    """Kernels as groups, each traced back to what was planned."""

    def __init__(self, of: Fused, rates: Rates) -> None:
        self.of, self.graph, self.rates = of, of.schedule.graph, rates

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """What a mark is the place of."""
        return (*self.of.schedule.forward, *self.of.schedule.backward)

    def groups(self, called: Sequence[tuple[Part, inductor.Kernel]]) -> tuple[Group, ...]:
        """All kernels of a step; what the engine copies itself, after those of the forward pass."""
        work = self.work(called)
        groups = [self.group(part, kernel, work[at]) for at, (part, kernel) in enumerate(called)]
        after = sum(not part.lowerable.backward for part, _ in called)
        return (*groups[:after], *self.copies(), *groups[after:])

    def work(self, called: Sequence[tuple[Part, inductor.Kernel]]) -> dict[int, list[Work]]:
        """By kernel, what it computes. Of an op that was taken apart into what counts as no FLOPs, as a product with a
        single column is, those of the op, where most of its bytes are moved."""
        found, counted, seen = defaultdict[int, list[Work]](list), set[int | None](), set[tuple[str, str]]()
        kernels_of = defaultdict[int, list[int]](list)
        for at, (part, kernel) in enumerate(called):
            for origin in kernel.origins:
                if origin.mark is not None:
                    kernels_of[origin.mark].append(at)
                if origin.flops and (part.name, origin.name) not in seen:
                    seen.add((part.name, origin.name))
                    counted.add(origin.mark)
                    found[at].append(Work(origin.flops, 0, self.rate(origin.mark)))
        for mark, places in kernels_of.items():
            op = self.op(mark)
            if mark in counted or op is None:
                continue
            work = work_of(self.graph, op)
            if work.flops:
                found[max(places, key=lambda at: called[at][1].bytes)].append(Work(work.flops, 0, work.rate))
        return found

    def group(self, part: Part, kernel: inductor.Kernel, work: Sequence[Work]) -> Group:
        """One kernel."""
        marks = dict.fromkeys(origin.mark for origin in kernel.origins if origin.mark is not None)
        ops = [op for mark in sorted(marks) if (op := self.op(mark)) is not None]
        flops = sum(one.flops for one in work)
        return Group(
            kernel.name,
            kernel.fused,
            "backward" if part.lowerable.backward else "forward",
            tuple(op.target for op in ops),
            tuple(dict.fromkeys(op.layer for op in ops if op.layer)),
            next((op.where for op in ops if op.where), None),
            kernel.bytes,
            flops,
            flops / kernel.bytes if kernel.bytes else 0.0,
            self.bound(kernel.bytes, work),
        )

    def copies(self) -> Iterator[Group]:
        """What the forward pass changes of what it is handed is copied there."""
        for action in self.of.schedule.forward:
            if action.kind == "write":
                assert action.value is not None
                made = self.about(action)
                layers, where = ((), None) if made is None else ((made.layer,) * bool(made.layer), made.where)
                size = 2 * self.graph.values[action.value].own_bytes
                yield Group(COPY, False, "forward", (COPY,), layers, where, size, 0, 0.0, "bandwidth")

    def op(self, mark: int) -> GraphOp | None:
        """The op that an action runs, or is about."""
        action = self.actions[mark]
        return self.about(action) if action.op is None else action.called(self.graph)

    def about(self, action: Action) -> GraphOp | None:
        """The op that makes what is encoded, decoded, written or given."""
        value = action.value if action.source is None else action.source
        return None if value is None else self.graph.maker.get(self.graph.base(value))

    def rate(self, mark: int | None) -> str:
        """Whose FLOP/s count for an op."""
        op = None if mark is None else self.op(mark)
        return "float32" if op is None else work_of(self.graph, op).rate

    def bound(self, size: int, work: Sequence[Work]) -> Bound:
        """What takes longer."""
        computing = sum(self.rates.seconds(one) - self.rates.call for one in work)
        return "compute" if computing > size / self.rates.bandwidth else "bandwidth"
