"""List the decisions of a schedule, each with its reason."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, SavedForm, Value, recomputable_values
from memplan.planning.graph.op_schema import KERNELS, short
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers import registry
from memplan.planning.levers.lever import GradientUse, Reason
from memplan.planning.levers.registry import KERNEL, RECOMPUTE, TILE
from memplan.planning.ops.kernel_group import Group
from memplan.planning.ops.tile import TILE_OPS, TILE_WITH_GRADIENTS
from memplan.planning.plan.decision import Decision, Scope
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.schedule.scheduler import schedule as scheduled
from memplan.planning.tiles.tiled import Tile as TileOfStep

_STEP = Scope("step")


def decide(graph: JointGraph, schedule: Schedule, outside_memory: OutsideMemory | None = None) -> tuple[Decision, ...]:
    """Return the decisions of a schedule: about each forward value that is saved or restored, in the order of the
    graph, then about the whole step.

    Their seconds add up to the schedule's. ``outside_memory``: memory on the device in addition to the graph's.
    """
    decider = _Decider(graph, schedule, outside_memory)
    return (*decider.values(), *decider.step())


def tile_decisions(graph: JointGraph, plain: JointGraph, tiles: Sequence[TileOfStep]) -> list[Decision]:
    """Return a decision for each segment that runs piece by piece in ``graph``. ``plain`` is the step without tiles."""
    decisions = list[Decision]()
    for tile in tiles:
        ops = [op for op in plain.forward_ops if op.call is not None and tile.first <= op.call <= tile.last]
        tile_ops = [op for op in graph.ops if op.target in TILE_OPS and graph.call_of(op) == tile.last]
        bytes_before = sum(plain.values[value].bytes for op in ops for value in op.makes)
        results = [value for op in tile_ops if op.phase == "forward" for value in op.makes]
        reason = TILE.reason_of(
            bytes_before - sum(graph.values[value].bytes for value in results), tile,
            max((op.scratch for op in tile_ops), default=0),
            gradients_in_forward=any(op.target == TILE_WITH_GRADIENTS for op in tile_ops),
        )  # fmt: skip
        layers = list(dict.fromkeys(op.layer for op in ops if op.layer))
        # none where the model's own forward or the loss calls all of them
        layer = " to ".join(dict.fromkeys((*layers[:1], *layers[-1:])))
        seconds = max(0.0, sum(op.seconds for op in tile_ops) - _seconds_with_derivatives(plain, ops))
        decisions.append(_segment_decision(TILE.name, plain, ops, seconds, layer, reason))
    return decisions


def kernel_decisions(graph: JointGraph, plain: JointGraph, groups: Sequence[Group]) -> list[Decision]:
    """Return a decision for each group of calls that a kernel replaces. ``plain`` is the step without kernels."""
    decisions = list[Decision]()
    for group in groups:
        ops = [op for op in plain.forward_ops if op.call in group.calls]
        kernel_ops = [op for op in graph.ops if graph.call_of(op) == group.last]  # in the place of the last call
        reason = KERNEL.reason_of(
            group.kernel, saved_bytes(plain, group.calls), saved_bytes(graph, (group.last,)),
            max((op.scratch for op in kernel_ops if op.target in KERNELS), default=0),
        )  # fmt: skip
        layer = next((op.layer for op in ops if op.layer), "")
        seconds = sum(op.seconds for op in kernel_ops) - _seconds_with_derivatives(plain, ops)
        decisions.append(_segment_decision(KERNEL.name, plain, ops, seconds, layer, reason))
    return decisions


def _seconds_with_derivatives(graph: JointGraph, ops: Sequence[GraphOp]) -> float:
    """Return the seconds of some forward ops and of the backward ops that compute their derivatives."""
    indices = {op.index for op in ops}
    return sum(op.seconds for op in graph.ops if op.index in indices or op.gradient_of in indices)


def _segment_decision(
    lever: str, plain: JointGraph, ops: Sequence[GraphOp], seconds: float, layer: str, reason: Reason
) -> Decision:
    """Return the decision of a lever about some consecutive forward ops of the step as written (``plain``)."""
    made = [plain.values[value].name for op in ops for value in op.makes]
    scope = Scope("segment", (made[0], made[-1]))
    return Decision(
        lever, scope, reason.grade, reason.bytes, seconds, layer, ops[0].where, reason.text, reason.details
    )  # fmt: skip


def saved_bytes(graph: JointGraph, calls: Collection[int]) -> int:
    """Return the bytes that the forward ops of these calls save: their results that the backward pass reads."""
    read = {value for op in graph.backward_ops for value in op.reads}
    made = {value for op in graph.forward_ops if op.call in calls for value in op.makes}
    return sum(graph.values[value].bytes for value in read & made)


class _Decider:
    """A planned step, answering what levers want to know for their reasons
    (`memplan.planning.levers.lever.PlannedStep`)."""

    def __init__(self, graph: JointGraph, schedule: Schedule, outside_memory: OutsideMemory | None) -> None:
        """Collect what the schedule recomputes, encodes and reads, and the seconds that this adds."""
        self.graph, self.schedule, self.outside_memory = graph, schedule, outside_memory
        self.packed_bytes = 0 if outside_memory is None else outside_memory.packed_half_bytes
        """Bytes of the optimizer's state that are low halves of master weights."""
        self.moment_bytes_saved = 0 if outside_memory is None else outside_memory.moment_bytes_saved
        self.outputs = {graph.base(value) for value in graph.outputs}
        """Values that own the memory of the step's outputs."""
        self.recomputable = recomputable_values(graph)
        """Values that the backward pass may recompute."""
        self.forms: dict[int, list[SavedForm]] = defaultdict(list)
        """Encodings by value. The decision is about the first, and its reason names the others."""
        self.added_seconds: dict[int, float] = defaultdict(float)
        """By value: seconds that recomputing it, or its encodings and copies, adds to the step."""
        self.recomputed: set[int] = set()
        """Values that it recomputes."""
        self.readers: dict[int, list[Action]] = defaultdict(list)
        """Actions of the backward pass that read a value or encoding."""
        self.wait_by_value = schedule.waits
        """By value that is copied to host memory: seconds that the step waits for the copies."""
        copies = {form.value: form for form in graph.forms if form.is_copied}
        for value, wait in self.wait_by_value.items():
            self.added_seconds[value] = copies[value].use_seconds + wait
        for action in (*schedule.forward, *schedule.backward):
            self._note(action)
        for forms in self.forms.values():  # copies first, then those that the value can be decoded from
            forms.sort(key=lambda form: (not form.is_copied, not form.can_restore_value))
        for action in schedule.backward:
            form = None if action.encoding is None else graph.form_by_encoded[action.encoding]
            if form is None or not form.is_copied:  # a copy's action is no reader to name
                for value in action.reads:
                    self.readers[value].append(action)
        seconds_per_byte = {
            value: graph.maker[value].recompute_op.seconds / graph.values[value].bytes
            for value in self._saved_values()
            if value in self.recomputable and graph.values[value].bytes
        }
        self.costliest: int | None = None
        """Saved but recomputable value with the most seconds of recomputation per byte; None if there is no other."""
        if len(seconds_per_byte) > 1 and any(seconds_per_byte.values()):
            self.costliest = max(seconds_per_byte, key=lambda value: seconds_per_byte[value])

    def _note(self, action: Action) -> None:
        """Record what an action recomputes or encodes, and the seconds that it adds."""
        if action.kind == "run":
            if action.recomputed:
                self.recomputed.update(action.makes)
                self.added_seconds[action.makes[0]] += action.called_op(self.graph).seconds  # once for all results
        elif action.encoding is not None:
            form = self.graph.form_by_encoded[action.encoding]
            if action.kind == "store":
                self.forms[form.value].append(form)
            if not form.is_copied:  # those of copies are known: see `__init__`
                self.added_seconds[form.value] += form.use_seconds if action.kind == "store" else form.fetch_seconds

    def _saved_values(self) -> list[int]:
        """Return the forward values that are saved or returned by the model, in the order of the graph."""
        saved = set(self.schedule.saved)
        forward = [value for op in self.graph.forward_ops for value in op.makes]
        return [value for value in forward if value in saved or value in self.outputs]

    # -- values

    def values(self) -> list[Decision]:
        """Return the decisions about single values."""
        saved = set(self._saved_values())
        decisions = list[Decision]()
        for op in self.graph.forward_ops:
            for value in op.makes:
                if value in self.forms:
                    lever, reason = self._encoding_decision(*self.forms[value])
                elif value in self.recomputed:
                    lever, reason = RECOMPUTE.name, RECOMPUTE.recomputed(self, value)
                elif value in saved:
                    lever, reason = "keep", RECOMPUTE.saved(self, value, costs_most=value == self.costliest)
                else:
                    continue
                scope, seconds = Scope("value", (self._name(value),)), self.added_seconds.get(value, 0.0)
                decisions.append(Decision(
                    lever, scope, reason.grade, reason.bytes, seconds, op.layer, op.where, reason.text, reason.details
                ))  # fmt: skip
        return decisions

    def _encoding_decision(self, form: SavedForm, *others: SavedForm) -> tuple[str, Reason]:
        """Return the lever of a value's encoding, and the reason. ``others`` are the value's further encodings: the
        reason names them, and its bytes are less theirs."""
        reason = registry.find(form.lever).reason(self, form)
        if others and not form.is_copied:
            other_bytes = sum(self.graph.values[other.encoded].bytes for other in others)
            names = ", ".join(other.codec or other.lever for other in others)
            text = f"{reason.text}; {format_bytes(other_bytes)} stay beside it ({names})"
            reason = replace(reason, bytes=max(0, reason.bytes - other_bytes), text=text)
        return form.lever, reason

    # -- queries of levers

    def is_saved(self, value: int) -> bool:
        """Whether the value itself is saved for the backward pass."""
        return value in self.schedule.saved

    def is_recomputed(self, value: int) -> bool:
        """Whether the value is recomputed in the backward pass."""
        return value in self.recomputed

    def encoding_readers(self, form: SavedForm) -> str:
        """Describe the ops that read the encoding itself; empty if there are none."""
        readers = self.readers[form.encoded]
        direct = [action for action in readers if action.encoding == form.encoded and action.kind == "run"]
        return self._describe_ops(direct) if direct else ""

    def freed_after(self, form: SavedForm) -> str:
        """Describe the op after which an offloaded value is freed."""
        forward = self.schedule.forward
        copy_end = next(index for index, a in enumerate(forward) if a.kind == "stored" and a.encoding == form.encoded)
        return self._describe_ops([next(action for action in reversed(forward[:copy_end]) if action.kind == "run")])

    def fetched_before(self, form: SavedForm) -> str:
        """Describe the op before which the copy back to the device begins."""
        backward = self.schedule.backward
        copy_begin = next(index for index, a in enumerate(backward) if a.kind == "fetch" and a.encoding == form.encoded)
        return self._describe_ops([next(action for action in backward[copy_begin:] if action.kind == "run")])

    def wait_seconds(self, form: SavedForm) -> float:
        """Seconds that the step waits for the copies of a form."""
        return self.wait_by_value.get(form.value, 0.0)

    def other_forms(self, form: SavedForm) -> Sequence[SavedForm]:
        """Return the other encodings of the same value."""
        return [other for other in self.forms[form.value] if other is not form]

    @property
    def overwritten_values(self) -> Sequence[tuple[str, str, int]]:
        """Names of an overwritten value and of the result in its memory, and their bytes, for each op in place."""
        return [
            (self._name(action.overwritten), self._name(action.makes[0]), self.graph.values[action.makes[0]].bytes)
            for action in (*self.schedule.forward, *self.schedule.backward)
            if action.overwritten is not None
        ]

    @property
    def moved_ops(self) -> Sequence[GraphOp]:
        """The fewest backward ops whose move explains the order: all but a longest sequence in captured order."""
        # longest increasing subsequence of op indices, by patience sorting
        order = self.schedule.choices.order
        smallest_ends = list[int]()
        """By length less 1: the smallest last op of an increasing subsequence of that length."""
        predecessor = dict[int, int]()
        """By op: the op before it in its subsequence, -1 for the first."""
        for op in order:
            length_before = bisect_left(smallest_ends, op)  # of the longest subsequence that the op can extend
            predecessor[op] = smallest_ends[length_before - 1] if length_before else -1
            smallest_ends[length_before : length_before + 1] = [op]  # replaced, or appended
        stays, op = set[int](), smallest_ends[-1] if smallest_ends else -1
        while op >= 0:
            stays.add(op)
            op = predecessor[op]
        return [self.graph.ops[op] for op in order if op not in stays]

    @property
    def freed_by_order(self) -> int:
        """The bytes by which the peak would be higher in the captured order of ops."""
        captured = scheduled(self.graph, replace(self.schedule.choices, order=()))
        return levels(captured, self.outside_memory).peak - levels(self.schedule, self.outside_memory).peak

    @property
    def gradient_use(self) -> GradientUse:
        """Use of the parameters' gradients."""
        return self.schedule.choices.gradients

    @property
    def trained_parameters(self) -> Sequence[Value]:
        """Parameters that get a gradient."""
        values = (self.graph.values[of] for of, _ in self.graph.gradients)
        return [value for value in values if value.kind == "parameter"]

    # -- reasons

    def value_readers(self, value: int) -> str:
        """Describe what reads a value in the backward pass: its ops, else a value that is recomputed from it. Empty if
        nothing reads it."""
        readers = self.readers[value]
        backward_ops = [action for action in readers if not action.recomputed]
        if backward_ops:
            return f"needed by {self._describe_ops(backward_ops)}"
        if readers:
            recomputed = self._name(readers[0].makes[0])
            return f"needed to recompute {recomputed}" + _and_more(len(readers) - 1, "other")
        return ""

    def _describe_ops(self, actions: Sequence[Action]) -> str:
        """Describe the first of some actions and count the others: "addmm of layer1 and 2 more ops"."""
        action, others = actions[0], _and_more(len(actions) - 1, "op")
        if action.op is not None:
            op = self.graph.ops[action.op]
            layer = self.graph.layer_of(op)
            return short(op.target) + (f" of {layer}" if layer else "") + others
        verb: str = action.kind
        if action.encoding is not None and action.kind in ("store", "fetch"):
            stores, fetches = registry.find(self.graph.form_by_encoded[action.encoding].lever).verbs
            verb = stores if action.kind == "store" else fetches
        return f"a {verb}{others}"

    def _name(self, value: int) -> str:
        """Return the name of a value."""
        return self.graph.values[value].name

    # -- the step

    def step(self) -> list[Decision]:
        """Return the decisions about the whole step."""
        reasons = ((lever.name, lever.decide(self)) for lever in registry.LEVERS)
        return [
            Decision(name, _STEP, reason.grade, reason.bytes, seconds=0.0, reason=reason.text, details=reason.details)
            for name, reason in reasons
            if reason is not None
        ]


def _and_more(number: int, what: str) -> str:
    """Return " and 2 more ops", empty for 0."""
    return f" and {number} more {what}{'' if number == 1 else 's'}" if number else ""
