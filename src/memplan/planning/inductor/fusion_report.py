"""Compare a planned step before and after fusion: kernels, bytes moved, and what stays bound by bandwidth.

Before: the same plan run by the engine ``graph``, where each op of the schedule is a kernel of its own. After: what the
generated code calls. On both sides a kernel moves what it reads and what it writes, at best: each tensor
once, and once more where it is known only after a pass over all of it what is to be done with it. FLOPs are those that
`torch.utils.flop_counter` counts: products and convolutions, but no pointwise arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from memplan import _torch
from memplan._torch import inductor
from memplan.devices import Device
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.roofline import CPU, Rates, Work, rates_of, work_of
from memplan.planning.inductor.partition import Fused, Part
from memplan.planning.levers import registry
from memplan.planning.plan.fusion import Bound, Fusion, Group
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule
from memplan.trace.records import HOST

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


def fusion_of(of: Fused, codes: Mapping[str, inductor.Code], device: Device | None = None) -> Fusion | None:
    """Compare a fused step with the same plan run op by op.

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
    """Return the bytes that each action of the engine ``graph`` reads and writes, by place in both passes."""
    graph = of.graph
    found = dict[int, int]()
    for at, action in enumerate((*of.forward, *of.backward)):
        if action.op is not None:
            op = action.called(graph)
            found[at] = work_of(graph, op).bytes + _read_again(graph, op)
            if action.form is not None:
                form = graph.form[action.form]
                found[at] += graph.values[form.kept].bytes - graph.values[form.value].bytes
        elif action.form is not None and action.kind in ("store", "fetch"):
            form = graph.form[action.form]
            stored, fetched, _ = registry.find(form.lever).works(graph, form)
            found[at] = (stored if action.kind == "store" else fetched).bytes
        elif action.kind == "write" or action.copies:
            assert action.value is not None
            found[at] = 2 * graph.values[action.value].own_bytes
    return found


def _read_again(graph: JointGraph, op: GraphOp) -> int:
    """Return the bytes of what an op's kernel goes over a second time."""
    again = _TWICE.get(op.target, ())
    given = op_schema.arguments_of(op.target, op.args, op.kwargs) if again else {}
    if not given.get("train", given.get("training", True)):  # the statistics are known
        return 0
    return sum(graph.values[given[name].value].own_bytes for name in again)


class _Grouping:
    """Kernels as groups, each traced back to what was planned."""

    def __init__(self, of: Fused, rates: Rates) -> None:
        self.of, self.graph, self.rates = of, of.schedule.graph, rates

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Actions of both passes, in the order of the marks."""
        return (*self.of.schedule.forward, *self.of.schedule.backward)

    def groups(self, called: Sequence[tuple[Part, inductor.Kernel]]) -> tuple[Group, ...]:
        """Return all kernels of a step; what the engine copies itself, after those of the forward pass."""
        work = self.work(called)
        groups = [self.group(part, kernel, work[at]) for at, (part, kernel) in enumerate(called)]
        after = sum(not part.lowerable.backward for part, _ in called)
        return (*groups[:after], *self.copies(), *groups[after:])

    def work(self, called: Sequence[tuple[Part, inductor.Kernel]]) -> dict[int, list[Work]]:
        """Return what each kernel computes. Of an op that was decomposed into ops without FLOPs, as a product with a
        single column is, the FLOPs of the op, in the kernel that moves most of its bytes."""
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
        """Describe one kernel."""
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
        """Yield the copies of results into the inputs that the forward pass changes."""
        for action in self.of.schedule.forward:
            if action.kind == "write":
                assert action.value is not None
                made = self.about(action)
                layers, where = ((), None) if made is None else ((made.layer,) * bool(made.layer), made.where)
                size = 2 * self.graph.values[action.value].own_bytes
                yield Group(COPY, False, "forward", (COPY,), layers, where, size, 0, 0.0, "bandwidth")

    def op(self, mark: int) -> GraphOp | None:
        """Return the op that an action runs, or is about."""
        action = self.actions[mark]
        return self.about(action) if action.op is None else action.called(self.graph)

    def about(self, action: Action) -> GraphOp | None:
        """Return the op that makes what is encoded, decoded, written or given."""
        value = action.value if action.source is None else action.source
        return None if value is None else self.graph.maker.get(self.graph.base(value))

    def rate(self, mark: int | None) -> str:
        """Return the dtype whose FLOP/s count for an op."""
        op = None if mark is None else self.op(mark)
        return "float32" if op is None else work_of(self.graph, op).rate

    def bound(self, size: int, work: Sequence[Work]) -> Bound:
        """Return the resource that takes longer: memory or computation."""
        computing = sum(self.rates.seconds(one) - self.rates.call for one in work)
        return "compute" if computing > size / self.rates.bandwidth else "bandwidth"


_LAYERS = 3
"""That are named, of those in which an op is called."""


def unfused(fusion: Fusion) -> tuple[str, ...]:
    """Return a plan's notes on ops that run unfused: those of libraries first, then those that move the most.

    Not of products, convolutions and attention, which are torch's kernels in any compiled step; nor of ops that draw
    random numbers, copies into buffers and packed bits, which are so because memplan asked for it.
    """
    calls = defaultdict[tuple[str, ...], list[Group]](list)
    for group in fusion.groups:
        if not group.fused and _is_fallback(group.kernel):
            calls[_names(group)].append(group)
    order = sorted(calls, key=lambda names: (names[0].startswith("aten::"), -sum(one.bytes for one in calls[names])))
    return tuple(_told(names, calls[names]) for names in order)


def _is_fallback(kernel: str) -> bool:
    """Return whether a kernel of torch's, or of a library's, stands where Inductor could have written one."""
    if kernel == COPY or kernel.startswith("memplan.") or _torch.flop_formula(kernel) is not None:
        return False
    try:
        op = op_schema.overload(kernel)
    except (AttributeError, ValueError, RuntimeError):  # what Inductor names otherwise is its own
        return False
    return not op.is_view and torch.Tag.nondeterministic_seeded not in op.tags


def _names(group: Group) -> tuple[str, ...]:
    """Return the kernel that is called, and the ops of the plan that it replaces."""
    called = _short(group.kernel)
    return called, *dict.fromkeys(name for op in group.ops if (name := _short(op)) != called)


def _short(op: str) -> str:
    return "::".join(op.split(".")[:2])


def _told(names: tuple[str, ...], calls: Sequence[Group]) -> str:
    of = f" (of {', '.join(names[1:])})" if names[1:] else ""
    layers = list(dict.fromkeys(layer for one in calls for layer in one.layers))
    more = f" and {len(layers) - _LAYERS} more" if len(layers) > _LAYERS else ""
    places = f", in layer{'s' if len(layers) > 1 else ''} {', '.join(layers[:_LAYERS])}{more}" if layers else ""
    times = f"{len(calls)} call{'s' if len(calls) > 1 else ''}"
    return f"runs as its own kernel, not fused: {names[0]}{of}, {times}{places}"
