"""Turn choices into a schedule: the order of actions, the frees of values, and in-place ops.

The engine executes the schedule, the simulator counts its bytes, the validator checks it. Forward ops keep their order,
backward ops run in that of the choices. A value that is not kept is recomputed just before the first op that reads it,
at most once, and every value is freed after its last use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memplan._interrupts import safe_point
from memplan.planning.graph.joint_graph import (
    RESIDENT,
    GraphOp,
    JointGraph,
    SavedForm,
    output_bases,
    recomputable_values,
)
from memplan.planning.schedule import host_copies
from memplan.planning.schedule.actions import Action, Choices

MAX_AUTOGRAD_NODES = 16
"""Most autograd nodes for gradients that stay in memory until the update. A node costs as much as a small op: 200 of
them slow a network of many small layers down by a tenth. With a single node, gradients could not be reduced between
processes during the backward pass, nor could a backward pass for the last layers alone end early. Fused kernels have a
single node: they are compiled as a whole and compute all gradients before the first is returned."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of both passes of a step, in order."""

    graph: JointGraph
    choices: Choices
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    saved: tuple[int, ...]
    """Ids of the saved values and encodings, without resident values."""

    @property
    def seconds(self) -> float:
        """Seconds that recomputation, encodings and waits add to the step."""
        form, total = self.graph.form_by_encoded, sum(self.waits.values())
        for action in (*self.forward, *self.backward):
            if action.kind == "run" and action.recomputed:
                total += action.called_op(self.graph).seconds
            elif action.kind == "store" and action.encoding is not None:
                total += form[action.encoding].use_seconds
            elif action.kind == "fetch" and action.encoding is not None:
                total += form[action.encoding].fetch_seconds
        return total

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that the step waits for copies, by value that is copied to host memory."""
        return host_copies.simulate_waits(self.graph, (*self.forward, *self.backward))


def schedule(graph: JointGraph, choices: Choices) -> Schedule:
    """Schedule the step under these choices.

    Values that cannot be recomputed (their op is random or has a side effect) and outputs are kept in any case.
    """
    safe_point()
    return _Scheduler(graph, choices).run()


def may_change_after_return(graph: JointGraph, choices: Choices, value_id: int) -> bool:
    """Return whether value ``value_id`` may change once its gradient is returned: by an early update, or hooks."""
    value = graph.values[value_id]
    return value.hooked or (choices.gradients.updates_early and value.kind == "parameter")


def frees_gradient(graph: JointGraph, choices: Choices, value_id: int) -> bool:
    """Return whether the gradient of value ``value_id`` is freed as soon as it is returned."""
    return graph.values[value_id].kind == "parameter" and choices.gradients.frees


def copied_gradients(graph: JointGraph, choices: Choices) -> frozenset[int]:
    """Return the parameters and inputs whose gradient has to be copied before it is returned.

    A gradient is copied if its memory is not its own: other gradients share it, or it belongs to an input, an output or
    a result of the forward pass. A gradient with other strides than its value is copied, too, as autograd does. The
    gradient of a parameter that is added to ``.grad`` is not.
    """
    outputs = output_bases(graph)
    gradients_in_base = Counter(graph.base(gradient) for _, gradient in graph.gradients)
    copied = set[int]()
    for value_id, gradient in graph.gradients:
        if choices.gradients.accumulates and graph.values[value_id].kind == "parameter":
            continue
        base = graph.values[graph.base(gradient)]
        is_shared = gradients_in_base[base.id] > 1 or base.id in outputs
        is_of_backward_op = base.kind == "result" and graph.maker[base.id].phase == "backward"
        has_other_strides = graph.values[gradient].stride != graph.values[value_id].stride
        if is_shared or not is_of_backward_op or has_other_strides:
            copied.add(value_id)
    return frozenset(copied)


@dataclass
class _Draft:
    """An action under construction: frees and overwritten operands are added at the end."""

    action: Action
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: list[int] = field(default_factory=list)
    overwritten: int | None = None
    """The value whose memory the op's first result takes over; None for new memory."""

    def to_action(self) -> Action:
        """Return the finished action."""
        frees = tuple(sorted(self.frees))
        return replace(self.action, reads=self.reads, makes=self.makes, overwritten=self.overwritten, frees=frees)


def _store_draft(form: SavedForm) -> _Draft:
    """Return the action that encodes a value, or begins its copy to host memory."""
    return _Draft(Action("store", value=form.value, encoding=form.encoded), (form.value,), (form.encoded,))


def _fetch_draft(form: SavedForm) -> _Draft:
    """Return the action that decodes a value, or begins its copy to the device."""
    return _Draft(
        Action("fetch", value=form.value, encoding=form.encoded), (form.encoded, *form.fetch_operands), (form.value,)
    )


def _wait_draft(kind: Literal["stored", "fetched"], form: SavedForm) -> _Draft:
    """Return the action that waits for the end of a copy to (``stored``) or from (``fetched``) host memory."""
    return _Draft(Action(kind, value=form.value, encoding=form.encoded), (form.value, form.encoded), ())


class _Scheduler:
    """Builds the schedule of a graph under fixed choices."""

    def __init__(self, graph: JointGraph, choices: Choices) -> None:
        """Resolve the choices: which encodings are used, which values are recomputed."""
        self.graph, self.choices = graph.in_order(choices.order), choices
        self.outputs = output_bases(graph)
        """Values that own the memory of the step's outputs."""
        self.decoded_from: dict[int, SavedForm] = {}
        """By value: the encoding to decode it from."""
        used_forms = list[SavedForm]()
        for form in graph.ranked_forms:
            is_chosen = (form.lever, form.value) in choices.saved_forms and form.value not in self.outputs
            # of several chosen encodings from which a value can be decoded, only the first by rank is used
            if is_chosen and (not form.can_restore_value or self.decoded_from.setdefault(form.value, form) is form):
                used_forms.append(form)
        self.forms = {form.encoded: form for form in used_forms}
        """Encodings that are used, by the id of the encoded value."""
        self.encoding_read_by: dict[tuple[int, int], SavedForm] = {}
        """Encoding that an op reads instead of a value, by (op, value)."""
        for form in used_forms:
            for op in form.direct_readers:
                self.encoding_read_by.setdefault((op, form.value), form)
        self.to_recompute = (choices.recompute & recomputable_values(graph)) - self.decoded_from.keys()
        """Values that are recomputed; those that can be decoded are not."""
        self.resident = {v.id for v in graph.values if v.kind in RESIDENT}
        """Values of parameters, buffers, inputs and constants."""
        self.tangents = [v.id for v in graph.values if v.kind == "tangent"]
        """Gradients of the outputs, which the backward pass gets."""
        self.live = self.resident | set(self.tangents)
        """Values that are live at the current point of the backward pass, as `_backward` adds its actions."""
        self.copied_gradients = copied_gradients(graph, choices)
        """See `copied_gradients`."""

    def run(self) -> Schedule:
        """Schedule the backward pass first: it determines the values to save."""
        backward = self._backward()
        # saved is what the backward pass reads before it is made there, in the order of first use
        made, first_uses = self.resident | set(self.tangents), dict[int, None]()
        for draft in backward:
            first_uses.update((value, None) for value in draft.reads if value not in made)
            made.update(draft.makes)
        saved = tuple(first_uses)
        forward = self._forward(saved)
        fixed = self.resident | self.outputs
        kept_gradients = {
            self.graph.base(gradient)
            for value_id, gradient in self.graph.gradients
            if self._is_kept_by_autograd(value_id)
        }
        self._add_frees(forward, allocated=(), never_freed=fixed | set(saved))
        self._add_frees(backward, allocated=(*saved, *self.tangents), never_freed=fixed | kept_gradients)
        forward_actions = tuple(draft.to_action() for draft in forward)
        backward_actions = tuple(draft.to_action() for draft in backward)
        return Schedule(self.graph, self.choices, forward_actions, backward_actions, saved)

    # -- forward

    def _forward(self, saved: Sequence[int]) -> list[_Draft]:
        """Return the actions of the forward pass. ``saved``: values and encodings that the backward pass needs.

        Encodings are stored, and mutated inputs written, after the last forward op that reads the value. Copies to the
        host begin right after the op that computes the value.
        """
        last_use = {value: op.index for op in self.graph.forward_ops for value in (*op.reads, *op.makes)}
        stored_forms = [self.forms[value] for value in sorted(saved) if value in self.forms]
        after_op: dict[int, list[_Draft]] = defaultdict(list)
        """By index of an op; -1: what depends on no forward op comes at the end."""
        for form in stored_forms:
            if not form.is_copied:
                after_op[last_use[form.value]].append(_store_draft(form))
        for target, source in self.graph.mutations:
            base = self.graph.base(source)
            last_read = max(last_use.get(target, -1), last_use.get(base, -1))
            after_op[last_read].append(_Draft(Action("write", value=target, source=source), (base,), ()))
        copy_begins, copy_ends = self._copies_to_host([form for form in stored_forms if form.is_copied])
        drafts = list[_Draft]()
        for position, op in enumerate(self.graph.forward_ops):
            drafts.append(_Draft(Action("run", op=op.index), op.reads, op.makes))
            drafts += copy_begins[op.index]
            drafts += after_op.pop(op.index, ())
            drafts += copy_ends[position]
        return drafts + [draft for remaining in after_op.values() for draft in remaining]

    def _copies_to_host(
        self, forms: Sequence[SavedForm]
    ) -> tuple[Mapping[int, list[_Draft]], Mapping[int, list[_Draft]]]:
        """Return the drafts that begin copies to the host, and those that wait for their ends.

        The first are by the index in ``graph.ops`` of the op that computes the value, the others by the position in
        ``graph.forward_ops`` of the op after which they come.
        """
        after = host_copies.device_free_positions(self.graph, forms)
        begins: dict[int, list[_Draft]] = defaultdict(list)
        ends: dict[int, list[_Draft]] = defaultdict(list)
        for form in host_copies.copy_order(self.graph, forms):
            begins[self.graph.maker[form.value].index].append(_store_draft(form))
            ends[after[form.value]].append(_wait_draft("stored", form))
        return begins, ends

    # -- backward

    def _backward(self) -> list[_Draft]:
        """Return the actions of the backward pass: each op after the recomputations and copies that it needs."""
        drafts_of_ops = list[list[_Draft]]()
        needed_at = dict[int, int]()
        """By value that is copied back from host memory: the position of the backward op that needs it first."""
        for index, op in enumerate(self.graph.backward_ops):
            reads, run = op.reads, Action("run", op=op.index)
            encodings = (self.encoding_read_by.get((op.index, value)) for value in op.reads)
            form = next((form for form in encodings if form is not None), None)
            if form is not None:  # the op reads the first such encoding instead of its value
                reads = tuple(form.encoded if value == form.value else value for value in op.reads)
                run = replace(run, encoding=form.encoded)
            rematerializations, copied_back = self._rematerialize(value for value in op.reads if value in reads)
            needed_at.update(dict.fromkeys(copied_back, index))
            drafts_of_ops.append([*rematerializations, _Draft(run, reads, op.makes)])
            self.live.update(op.makes)
        begins, ends = self._copies_to_device(needed_at)
        drafts = [_Draft(Action("receive"), (), tuple(self.tangents))]
        for index, drafts_of_op in enumerate(drafts_of_ops):
            drafts += (*begins[index], *ends[index], *drafts_of_op)
        return self._with_gradient_returns(drafts)

    def _copies_to_device(
        self, needed_at: Mapping[int, int]
    ) -> tuple[Mapping[int, list[_Draft]], Mapping[int, list[_Draft]]]:
        """Return the drafts that begin copies to the device, and those that wait for their ends.

        Both are by the position in ``graph.backward_ops`` of the op before which they come. ``needed_at``: by value to
        copy, the position of the op that needs it first.
        """
        before = host_copies.fetch_positions(self.graph, needed_at, self.decoded_from)
        begins: dict[int, list[_Draft]] = defaultdict(list)
        ends: dict[int, list[_Draft]] = defaultdict(list)
        for value, index in sorted(needed_at.items(), key=lambda item: (item[1], item[0])):
            form = self.decoded_from[value]
            begins[before[value]].append(_fetch_draft(form))
            ends[index].append(_wait_draft("fetched", form))
        return begins, ends

    def _rematerialize(self, values: Iterable[int]) -> tuple[list[_Draft], set[int]]:
        """Return the actions that make values live by recomputing or decoding them, and the values to copy back from
        host memory.

        Values that are live already are left out; actions for operands are included, in the order of the forward pass.
        The copies must be done before these actions.
        """
        copied_back = set[int]()
        ops: dict[int, GraphOp] = {}
        decoded: set[int] = set()
        """Values whose encoding needs no other operands, decoded just before they are read."""
        decoded_with_operands: dict[int, SavedForm] = {}
        """Encodings that need other operands, by the op in whose place they are decoded."""
        results_wanted: dict[int, set[int]] = defaultdict(set)
        """By op to recompute: those of its results that are needed."""
        stack, seen = list(values), set[int]()
        while stack:
            value = stack.pop()
            if value in seen or value in self.live:
                continue
            seen.add(value)
            form = self.decoded_from.get(value)
            if form is not None and form.is_copied:
                copied_back.add(value)
            elif form is not None and form.fetch_operands:
                decoded_with_operands[self.graph.maker[value].index] = form
                stack.extend(form.fetch_operands)
            elif form is not None:
                decoded.add(value)
            elif value in self.to_recompute:
                op = self.graph.maker[value].recompute_op
                results_wanted[op.index].add(value)
                if op.index not in ops:
                    ops[op.index] = op
                    stack.extend(op.reads)
        self.live.update(copied_back)
        drafts = list[_Draft]()
        for index in sorted({*ops, *decoded_with_operands}):
            reads = decoded_with_operands[index].fetch_operands if index in decoded_with_operands else ops[index].reads
            drafts += self._fetch_missing(decoded & set(reads))
            if index in decoded_with_operands:
                drafts.append(_fetch_draft(decoded_with_operands[index]))
            else:
                makes = tuple(value for value in ops[index].makes if value in results_wanted[index])
                drafts.append(_Draft(Action("run", op=index, recomputed=True), reads, makes))
            self.live.update(drafts[-1].makes)
        return drafts + self._fetch_missing(decoded), copied_back

    def _fetch_missing(self, values: set[int]) -> list[_Draft]:
        """Return the decodings of those values that are not live yet, and mark them as live."""
        missing = sorted(values - self.live)
        self.live.update(missing)
        return [_fetch_draft(self.decoded_from[value]) for value in missing]

    # -- gradients

    def _with_gradient_returns(self, drafts: list[_Draft]) -> list[_Draft]:
        """Insert the return of each gradient after its last read and, if its parameter may change at once, after the
        last read of the parameter. Gradients that stay in memory are returned in groups: see MAX_AUTOGRAD_NODES."""
        last_use = {value: index for index, draft in enumerate(drafts) for value in (*draft.reads, *draft.makes)}
        ready_at, grouped = dict[int, int](), set[int]()
        for value_id, gradient in self.graph.gradients:
            ready_at[value_id] = last_use.get(self.graph.base(gradient), 0)
            is_freed = frees_gradient(self.graph, self.choices, value_id)
            if may_change_after_return(self.graph, self.choices, value_id):
                ready_at[value_id] = max(ready_at[value_id], last_use.get(self.graph.base(value_id), 0))
            elif self._is_kept_by_autograd(value_id) or (self.choices.fused and not is_freed):
                grouped.add(value_id)
        positions = sorted({ready_at[value_id] for value_id in grouped})
        groups = 1 if self.choices.fused else MAX_AUTOGRAD_NODES
        positions_of_group = max(1, -(-len(positions) // groups))  # rounded up
        last_of_group = dict[int, int]()
        """By position at which a gradient is ready: the last position of its group."""
        for begin in range(0, len(positions), positions_of_group):
            group = positions[begin : begin + positions_of_group]
            last_of_group.update(dict.fromkeys(group, group[-1]))
        returns_after: dict[int, list[_Draft]] = defaultdict(list)
        for value_id, gradient in self.graph.gradients:
            action = Action("give", value=value_id, source=gradient, returns_copy=value_id in self.copied_gradients)
            index = last_of_group[ready_at[value_id]] if value_id in grouped else ready_at[value_id]
            returns_after[index].append(_Draft(action, (self.graph.base(gradient),), ()))
        return [action for index, draft in enumerate(drafts) for action in (draft, *returns_after.get(index, ()))]

    def _is_kept_by_autograd(self, value_id: int) -> bool:
        """Return whether autograd keeps a value's gradient itself, not a copy, so that it must not be freed."""
        return value_id not in self.copied_gradients and not frees_gradient(self.graph, self.choices, value_id)

    # -- memory

    def _add_frees(self, drafts: Sequence[_Draft], *, allocated: Iterable[int], never_freed: set[int]) -> None:
        """Free every value except ``never_freed`` after its last use, or let the op of the last use overwrite it.

        ``allocated``: values that are live before the first draft.
        """
        last_use = dict.fromkeys(allocated, 0)
        last_use.update((value, index) for index, draft in enumerate(drafts) for value in (*draft.reads, *draft.makes))
        for value, index in last_use.items():
            if value not in never_freed:
                drafts[index].frees.append(value)
        if not self.choices.in_place:
            return
        not_owned = never_freed | set(self.tangents)  # the caller may read tangents again
        piecewise_ops = self.choices.pieces
        for draft in drafts:
            if draft.action.op is None or not draft.makes:
                continue
            op = draft.action.called_op(self.graph)
            is_piecewise = op.in_place_scratch is not None
            is_excluded = is_piecewise and piecewise_ops is not None and op.index not in piecewise_ops
            makes_first_result = draft.makes[0] == op.makes[0]  # the only one that can overwrite
            if is_excluded or not makes_first_result:
                continue
            freed_operands = [value for value in op.overwrites if value in draft.frees and value not in not_owned]
            if freed_operands:
                draft.overwritten = freed_operands[0]  # the best: they are in this order
                draft.frees.remove(draft.overwritten)


def with_fewest_piecewise_ops(planned: Schedule, fits: Callable[[Schedule], Sequence[bool]]) -> Schedule:
    """Return the schedule with ops working in place piece by piece only where the step would not fit otherwise.

    ``fits`` returns for every action, forward and backward, whether the bytes during it are within the budget. Working
    piece by piece changes the bytes during the op alone, so a schedule without pieces is checked once.
    """
    without = schedule(planned.graph, replace(planned.choices, pieces=frozenset()))
    actions = (*without.forward, *without.backward)
    too_large = {
        action.op for action, fit in zip(actions, fits(without), strict=True) if not fit and action.op is not None
    }
    fewest = schedule(planned.graph, replace(planned.choices, pieces=frozenset(too_large)))
    return fewest if all(fits(fewest)) else planned
