"""Compare a planned step before and after fusion: kernels, bytes moved, and which kernels are bound by bandwidth.

Before: the same plan run by the engine ``graph``, one kernel for each op of the schedule. After: the kernels that the
generated code calls. The bytes of a kernel are a lower bound: each tensor that it reads or writes counts once, and an
operand twice if a kernel needs statistics of all of it first. FLOPs are those that `torch.utils.flop_counter` counts:
products and convolutions, but no pointwise arithmetic.
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
from memplan.planning.graph.joint_graph import GraphOp
from memplan.planning.graph.roofline import CPU, Rates, Work, rates_of, work_of
from memplan.planning.inductor.partition import Fused, Part
from memplan.planning.levers import registry
from memplan.planning.plan.fusion import Bound, Fusion, Group
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule
from memplan.trace.records import HOST

UNTOLD = "this version of Inductor does not say what its kernels move: what fusion brings is not known"
COPY = "aten.copy_.default"
"""Kernel of the engine's own copies into buffers, after the forward pass."""
_TWICE = {
    "aten._native_batch_norm_legit_functional.default": ("input",),
    "aten._native_batch_norm_legit.default": ("input",),
    "aten._native_batch_norm_legit.no_stats": ("input",),
    "aten.native_batch_norm.default": ("input",),
    "aten.native_batch_norm_backward.default": ("grad_out", "input"),
}
"""Operands that a kernel reads twice in training: it needs the statistics of the whole batch before any result.
Source: aten/src/ATen/native/Normalization.cpp (`batch_norm_cpu_update_stats_template` and then
`batch_norm_cpu_transform_input_template`; `batch_norm_backward_cpu_template`)."""


def fusion_of(fused: Fused, codes: Mapping[str, inductor.Code], device: Device | None = None) -> Fusion | None:
    """Compare a fused step with the same plan run op by op. ``codes`` has Inductor's code by name of the part;
    ``device`` is the one whose rates count, None for a CPU.

    Returns:
        None if Inductor did not list its kernels.
    """
    called = list[tuple[Part, inductor.Kernel]]()
    for part in fused.parts:
        kernels = codes[part.name].kernels
        if kernels is None:
            return None
        called += [(part, kernel) for kernel in kernels]
    bytes_before = bytes_by_action(fused.schedule)  # an entry for each kernel
    groups = _Grouping(fused, rates_of(device) if device else CPU).groups(called)
    return Fusion(
        device=HOST if device is None else device.name,
        kernels_before=len(bytes_before),
        kernels_after=len(groups),
        bytes_before=sum(bytes_before.values()),
        bytes_after=sum(group.bytes for group in groups),
        groups=groups,
    )


def bytes_by_action(schedule: Schedule) -> dict[int, int]:
    """Return the bytes that each action of a schedule reads and writes when the engine ``graph`` runs it: an op, an
    encoding, a decoding or a copy. Keys are indices in the forward and backward actions, concatenated. Actions without
    a kernel are missing."""
    graph = schedule.graph
    sizes = dict[int, int]()
    for index, action in enumerate((*schedule.forward, *schedule.backward)):
        form = None if action.encoding is None else graph.form_by_encoded[action.encoding]
        if action.op is not None:
            op = action.called_op(graph)
            sizes[index] = work_of(graph, op).bytes
            names = _TWICE.get(op.target, ())
            arguments = op_schema.arguments_of(op.target, op.args, op.kwargs) if names else {}
            # batch norms name it train or training; in evaluation statistics are arguments, and nothing is read twice
            in_training = arguments.get("train", arguments.get("training", True))
            if in_training:
                sizes[index] += sum(graph.values[arguments[name].value].contiguous_bytes for name in names)
            if form is not None:  # it is read in place of the value
                sizes[index] += graph.values[form.encoded].bytes - graph.values[form.value].bytes
        elif form is not None and action.kind in ("store", "fetch"):
            store, fetch, _ = registry.find(form.lever).works(graph, form)
            sizes[index] = (store if action.kind == "store" else fetch).bytes
        elif action.kind == "write" or action.returns_copy:  # a copy: each byte is read and written
            assert action.value is not None
            sizes[index] = 2 * graph.values[action.value].contiguous_bytes
    return sizes


class _Grouping:
    """Describes each kernel as a group of the plan's ops.

    A kernel's *origins* are the traced ops that it computes. Each has the *mark* of the plan's op that it comes from:
    an index into `actions`.
    """

    def __init__(self, fused: Fused, rates: Rates) -> None:
        self.fused, self.graph, self.rates = fused, fused.schedule.graph, rates

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Actions of both passes: a mark is an index of it."""
        return (*self.fused.schedule.forward, *self.fused.schedule.backward)

    def groups(self, called: Sequence[tuple[Part, inductor.Kernel]]) -> tuple[Group, ...]:
        """Return all kernels of a step in order. The engine's own copies follow the forward pass. ``called``: each
        kernel that the generated code calls, with its part."""
        work = self.work(called)
        groups = [self.group(part, kernel, work[index]) for index, (part, kernel) in enumerate(called)]
        forward_kernels = sum(not part.lowerable.backward for part, _ in called)
        return (*groups[:forward_kernels], *self.copies(), *groups[forward_kernels:])

    def work(self, called: Sequence[tuple[Part, inductor.Kernel]]) -> dict[int, list[Work]]:
        """Return the FLOPs of each kernel, by its index in ``called`` (as for `groups`). The bytes are 0: kernels have
        their own.

        An op that was decomposed into ops without FLOPs, such as a product with a single column, counts for the kernel
        with the most bytes of those that compute it.
        """
        work_of_kernel, counted_origins = defaultdict[int, list[Work]](list), set[tuple[str, str]]()
        marks_with_flops, kernels_of_mark = set[int | None](), defaultdict[int, list[int]](list)
        for index, (part, kernel) in enumerate(called):
            for origin in kernel.origins:
                if origin.mark is not None:
                    kernels_of_mark[origin.mark].append(index)
                if origin.flops and (part.name, origin.name) not in counted_origins:  # several kernels may share it
                    counted_origins.add((part.name, origin.name))
                    marks_with_flops.add(origin.mark)
                    work_of_kernel[index].append(Work(origin.flops, bytes=0, rate_dtype=self.rate(origin.mark)))
        for mark, kernels in kernels_of_mark.items():
            op = self.op(mark)
            if mark in marks_with_flops or op is None:
                continue
            work = work_of(self.graph, op)
            if work.flops:
                largest = max(kernels, key=lambda index: called[index][1].bytes)
                work_of_kernel[largest].append(Work(work.flops, bytes=0, rate_dtype=work.rate_dtype))
        return work_of_kernel

    def group(self, part: Part, kernel: inductor.Kernel, work: Sequence[Work]) -> Group:
        """Describe a kernel of a part. ``work``: the FLOPs of its ops."""
        marks = {origin.mark for origin in kernel.origins if origin.mark is not None}
        ops = [op for op in map(self.op, sorted(marks)) if op is not None]
        flops = sum(item.flops for item in work)
        return Group(
            kernel.name, kernel.fused, "backward" if part.lowerable.backward else "forward",
            tuple(op.target for op in ops), tuple(dict.fromkeys(op.layer for op in ops if op.layer)),
            next((op.where for op in ops if op.where), None), kernel.bytes, flops,
            flops / kernel.bytes if kernel.bytes else 0.0, self.bound(kernel.bytes, work),
        )  # fmt: skip

    def copies(self) -> Iterator[Group]:
        """Yield the copies of results into the inputs that the forward pass changes."""
        for action in self.fused.schedule.forward:
            if action.kind == "write":
                assert action.value is not None
                op = self.op_of_value(action)
                layers = (op.layer,) if op is not None and op.layer else ()
                size = 2 * self.graph.values[action.value].contiguous_bytes
                where = None if op is None else op.where
                yield Group(
                    COPY, fused=False, phase="forward", ops=(COPY,), layers=layers, where=where, bytes=size, flops=0,
                    intensity=0.0, bound="bandwidth",
                )  # fmt: skip

    def op(self, mark: int) -> GraphOp | None:
        """Return the op that an action runs, or the op whose result it encodes, decodes, writes or returns."""
        action = self.actions[mark]
        return self.op_of_value(action) if action.op is None else action.called_op(self.graph)

    def op_of_value(self, action: Action) -> GraphOp | None:
        """Return the op that computes the value that is encoded, decoded, written or returned."""
        value = action.value if action.source is None else action.source
        return None if value is None else self.graph.maker.get(self.graph.base(value))

    def rate(self, mark: int | None) -> str:
        """Return the dtype whose FLOP/s count for the op with a mark; None: an unknown op."""
        op = None if mark is None else self.op(mark)
        return "float32" if op is None else work_of(self.graph, op).rate_dtype

    def bound(self, size: int, work: Sequence[Work]) -> Bound:
        """Return which takes longer: "bandwidth", to move ``size`` bytes, or "compute", for the FLOPs of ``work``."""
        compute_seconds = sum(self.rates.seconds(item) - self.rates.call_seconds for item in work)
        move_seconds = size / self.rates.bandwidth
        return "compute" if compute_seconds > move_seconds else "bandwidth"


_LAYERS = 3
"""Maximum number of layers that a note names."""


def unfused(fusion: Fusion) -> tuple[str, ...]:
    """Return a plan's notes on ops that run unfused: ops of other libraries first, then by bytes moved, descending.

    Leaves out products, convolutions and attention, which are torch's kernels in any compiled step, and ops that draw
    random numbers, copies into buffers and packed bits, which are unfused by design of memplan.
    """
    calls = defaultdict[tuple[str, ...], list[Group]](list)  # by kernel, and the other ops of the plan that it computes
    for group in fusion.groups:
        if not group.fused and _is_fallback(group.kernel):
            kernel, ops = _short(group.kernel), dict.fromkeys(map(_short, group.ops))
            calls[kernel, *(op for op in ops if op != kernel)].append(group)
    bytes_moved = {names: sum(group.bytes for group in groups) for names, groups in calls.items()}
    order = sorted(calls, key=lambda names: (names[0].startswith("aten::"), -bytes_moved[names]))
    return tuple(_note(names, calls[names]) for names in order)


def _is_fallback(kernel: str) -> bool:
    """Return whether an op of torch or a library runs unfused although Inductor generates kernels for its kind."""
    if kernel == COPY or kernel.startswith("memplan.") or _torch.flop_formula(kernel) is not None:
        return False
    try:
        op = op_schema.overload(kernel)
    except (AttributeError, ValueError, RuntimeError):  # a name that is no op is a kernel that Inductor generated
        return False
    return not op.is_view and torch.Tag.nondeterministic_seeded not in op.tags


def _short(op: str) -> str:
    """Return ``aten::relu`` for ``aten.relu.default``."""
    return "::".join(op.split(".")[:2])


def _note(names: tuple[str, ...], calls: Sequence[Group]) -> str:
    """Return the note on the calls of an unfused kernel. ``names``: the kernel, then other ops that it computes."""
    kernel, *ops = names
    of = f" (of {', '.join(ops)})" if ops else ""
    layers = list(dict.fromkeys(layer for call in calls for layer in call.layers))
    more = f" and {len(layers) - _LAYERS} more" if len(layers) > _LAYERS else ""
    places = f", in layer{'s' if len(layers) > 1 else ''} {', '.join(layers[:_LAYERS])}{more}" if layers else ""
    times = f"{len(calls)} call{'s' if len(calls) > 1 else ''}"
    return f"runs as its own kernel, not fused: {kernel}{of}, {times}{places}"
