"""Choices -> Schedule: what runs when, what is freed when, in whose memory each result lies.

The schedule is the one account of a planned step: the engine executes it, the simulator counts it, the validator
checks it. The order of the graph's ops stays; what is not kept is made again just before the first op that reads it,
at most once, and every value is freed after its last use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memplan._interrupts import safe_point
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, KeptForm, _outputs, recomputable
from memplan.planning.schedule import host_copies
from memplan.planning.schedule.actions import Action, Choices

NODES = 16
"""Moments at which gradients are given that stay in memory anyway. To autograd each is a node, which takes as long as
a small op: two hundred would slow a network of many small layers down by a tenth. With one alone, gradients could not
be reduced between processes while the backward pass still runs, nor a pass for the last layers end before. Of fused
kernels there is one, as they are compiled in one part where gradients stay: all are made before the first is given."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step as the engine runs it."""

    graph: JointGraph
    choices: Choices
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    saved: tuple[int, ...]
    """Ids of what lives from the forward to the backward pass: values and kept forms; not what is resident."""

    @property
    def seconds(self) -> float:
        """Seconds that recomputing values, and keeping them in other forms, adds to the step."""
        form, total = self.graph.form, sum(self.waits.values())
        for action in (*self.forward, *self.backward):
            if action.kind == "run" and action.recomputed:
                total += action.called(self.graph).seconds
            elif action.kind == "store" and action.form is not None:
                total += form[action.form].use_seconds
            elif action.kind == "fetch" and action.form is not None:
                total += form[action.form].fetch_seconds
        return total

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that the step waits for the copies of each value that is kept as a copy."""
        return host_copies.waits(self.graph, (*self.forward, *self.backward))


def schedule(graph: JointGraph, choices: Choices) -> Schedule:
    """Schedule the step under these choices.

    A value that cannot be made again (it is random, or has an effect), or that the forward pass returns, is kept
    whatever the choices say.
    """
    safe_point()
    return _Scheduler(graph, choices).run()


def changed_at_once(graph: JointGraph, choices: Choices, of: int) -> bool:
    """Return whether a value may change as soon as its gradient is given: by its update, or by hooks of its own."""
    value = graph.values[of]
    return value.hooked or (choices.gradients.updates and value.kind == "parameter")


def frees_gradient(graph: JointGraph, choices: Choices, of: int) -> bool:
    """Return whether the gradient of a value is used up as soon as it is given."""
    return graph.values[of].kind == "parameter" and choices.gradients.frees


def copied_gradients(graph: JointGraph, choices: Choices) -> frozenset[int]:
    """Return the values whose gradient is given as a copy: its memory is somebody else's too, or laid out otherwise
    than the parameter (then autograd copies it). What is added to a held gradient is not copied."""
    outputs, users = _outputs(graph), Counter(graph.base(gradient) for _, gradient in graph.gradients)
    found = set[int]()
    for of, gradient in graph.gradients:
        if choices.gradients.adds and graph.values[of].kind == "parameter":
            continue
        base = graph.values[graph.base(gradient)]
        foreign = base.kind != "result" or base.id in outputs or graph.maker[base.id].phase == "forward"
        if users[base.id] > 1 or foreign or graph.values[gradient].stride != graph.values[of].stride:
            found.add(of)
    return frozenset(found)


@dataclass
class _Draft:
    """An action in the making."""

    action: Action
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: list[int] = field(default_factory=list)
    into: int | None = None

    def finished(self) -> Action:
        return replace(self.action, reads=self.reads, makes=self.makes, into=self.into, frees=tuple(sorted(self.frees)))


def _stores(form: KeptForm) -> _Draft:
    return _Draft(Action("store", value=form.value, form=form.kept), (form.value,), (form.kept,))


def _fetches(form: KeptForm) -> _Draft:
    return _Draft(Action("fetch", value=form.value, form=form.kept), (form.kept, *form.also_reads), (form.value,))


def _waits(kind: Literal["stored", "fetched"], form: KeptForm) -> _Draft:
    """The wait for the end of a copy."""
    return _Draft(Action(kind, value=form.value, form=form.kept), (form.value, form.kept), ())


class _Scheduler:
    def __init__(self, graph: JointGraph, choices: Choices) -> None:
        self.graph, self.choices = graph, choices
        self.outputs = _outputs(graph)
        self.whole: dict[int, KeptForm] = {}
        """By value: the form that it is fetched from."""
        forms = list[KeptForm]()
        for form in graph.ranked_forms:
            chosen = (form.lever, form.value) in choices.kept_as and form.value not in self.outputs
            if chosen and (not form.whole or self.whole.setdefault(form.value, form) is form):
                forms.append(form)
        self.forms = {form.kept: form for form in forms}
        self.direct: dict[tuple[int, int], KeptForm] = {}
        """By op and value: the form that the op reads instead."""
        for form in forms:
            for op in form.direct:
                self.direct.setdefault((op, form.value), form)
        self.dropped = (choices.recompute & recomputable(graph)) - self.whole.keys()
        self.resident = {v.id for v in graph.values if v.kind in RESIDENT}
        self.tangents = [v.id for v in graph.values if v.kind == "tangent"]
        self.there = self.resident | set(self.tangents)
        self.copies = copied_gradients(graph, choices)

    def run(self) -> Schedule:
        backward = self._backward()
        saved = self._saved(backward)
        forward = self._forward(saved)
        fixed = self.resident | self.outputs
        self._free(forward, born=(), kept=fixed | set(saved))
        self._free(backward, born=(*saved, *self.tangents), kept=fixed | self._kept_gradients())
        return Schedule(
            self.graph,
            self.choices,
            tuple(draft.finished() for draft in forward),
            tuple(draft.finished() for draft in backward),
            saved,
        )

    def _saved(self, backward: Sequence[_Draft]) -> tuple[int, ...]:
        """What the backward pass reads and does not make, in order of first use."""
        made, saved = set(self.there_at_start), dict[int, None]()
        for draft in backward:
            saved.update((value, None) for value in draft.reads if value not in made)
            made.update(draft.makes)
        return tuple(saved)

    @property
    def there_at_start(self) -> set[int]:
        return self.resident | set(self.tangents)

    # -- forward

    def _forward(self, saved: Sequence[int]) -> list[_Draft]:
        """The forward ops; each store and each write after the last op that reads what it frees or changes. A copy
        begins right after its op, and is waited for after the last op that it can run beside."""
        last = {value: op.index for op in self.graph.forward_ops for value in (*op.reads, *op.makes)}
        stored = [form for value in sorted(saved) if (form := self.forms.get(value)) is not None]
        due: dict[int, list[_Draft]] = defaultdict(list)
        for form in stored:
            if not form.is_copied:
                due[last[form.value]].append(_stores(form))
        for target, source in self.graph.mutations:
            base = self.graph.base(source)
            after = max(last.get(target, -1), last.get(base, -1))
            due[after].append(_Draft(Action("write", value=target, source=source), (base,), ()))
        begins, ends = self._copied_out([form for form in stored if form.is_copied])
        drafts = list[_Draft]()
        for at, op in enumerate(self.graph.forward_ops):
            drafts.append(_Draft(Action("run", op=op.index), op.reads, op.makes))
            drafts += begins[op.index]
            drafts += due.pop(op.index, ())
            drafts += ends[at]
        return drafts + [draft for rest in due.values() for draft in rest]

    def _copied_out(self, forms: Sequence[KeptForm]) -> tuple[Mapping[int, list[_Draft]], Mapping[int, list[_Draft]]]:
        """The copies of values: their beginnings by the op that makes the value, their ends by position."""
        after = host_copies.stored_after(self.graph, forms)
        begins: dict[int, list[_Draft]] = defaultdict(list)
        ends: dict[int, list[_Draft]] = defaultdict(list)
        for form in host_copies.in_order(self.graph, forms):
            begins[self.graph.maker[form.value].index].append(_stores(form))
            ends[after[form.value]].append(_waits("stored", form))
        return begins, ends

    # -- backward

    def _backward(self) -> list[_Draft]:
        parts, needed = list[list[_Draft]](), dict[int, int]()
        for at, op in enumerate(self.graph.backward_ops):
            form = next((self.direct[op.index, v] for v in op.reads if (op.index, v) in self.direct), None)
            direct, kept = (None, None) if form is None else (form.value, form.kept)
            reads = tuple(kept if v == direct and kept is not None else v for v in op.reads)
            drafts, fetched = self._provided(v for v in op.reads if v != direct)
            needed.update(dict.fromkeys(fetched, at))
            parts.append([*drafts, _Draft(Action("run", op=op.index, form=kept), reads, op.makes)])
            self.there.update(op.makes)
        begins, ends = self._copied_back(needed)
        drafts = [_Draft(Action("receive"), (), tuple(self.tangents))]
        for at, part in enumerate(parts):
            drafts += (*begins[at], *ends[at], *part)
        return self._with_gives(drafts)

    def _copied_back(self, needed: Mapping[int, int]) -> tuple[Mapping[int, list[_Draft]], Mapping[int, list[_Draft]]]:
        """The copies back, their beginnings and ends, by the position of the backward op that is next."""
        before = host_copies.fetched_before(self.graph, needed, self.whole)
        begins: dict[int, list[_Draft]] = defaultdict(list)
        ends: dict[int, list[_Draft]] = defaultdict(list)
        for value, at in sorted(needed.items(), key=lambda item: (item[1], item[0])):
            form = self.whole[value]
            begins[before[value]].append(_fetches(form))
            ends[at].append(_waits("fetched", form))
        return begins, ends

    def _provided(self, values: Iterable[int]) -> tuple[list[_Draft], set[int]]:
        """What makes forward values that are not there: again, with all that they need, in the forward order. And what
        has to be copied back before that."""
        copied = set[int]()
        ops: dict[int, GraphOp] = {}
        fetched: set[int] = set()
        """From forms that need nothing else: just before they are read."""
        rebuilt: dict[int, KeptForm] = {}
        """By op: forms that need other values, fetched where the op would run again."""
        wanted: dict[int, set[int]] = defaultdict(set)
        stack, seen = list(values), set[int]()
        while stack:
            value = stack.pop()
            if value in seen or value in self.there:
                continue
            seen.add(value)
            form = self.whole.get(value)
            if form is not None and form.is_copied:
                copied.add(value)
            elif form is not None and form.also_reads:
                rebuilt[self.graph.maker[value].index] = form
                stack.extend(form.also_reads)
            elif form is not None:
                fetched.add(value)
            elif value in self.dropped:
                op = self.graph.maker[value].rerun
                wanted[op.index].add(value)
                if op.index not in ops:
                    ops[op.index] = op
                    stack.extend(op.reads)
        self.there.update(copied)
        drafts = list[_Draft]()
        for index in sorted({*ops, *rebuilt}):
            reads = rebuilt[index].also_reads if index in rebuilt else ops[index].reads
            drafts += self._fetched(fetched & set(reads))
            if index in rebuilt:
                drafts.append(_fetches(rebuilt[index]))
            else:
                makes = tuple(value for value in ops[index].makes if value in wanted[index])
                drafts.append(_Draft(Action("run", op=index, recomputed=True), reads, makes))
            self.there.update(drafts[-1].makes)
        return drafts + self._fetched(fetched), copied

    def _fetched(self, values: set[int]) -> list[_Draft]:
        missing = sorted(values - self.there)
        self.there.update(missing)
        return [_fetches(self.whole[value]) for value in missing]

    # -- gradients

    def _with_gives(self, drafts: list[_Draft]) -> list[_Draft]:
        """The same with each gradient given away as soon as nothing reads it and, where its parameter may be changed
        at once, nothing reads that either. Those that stay wait for others: see NODES."""
        last = {value: at for at, draft in enumerate(drafts) for value in (*draft.reads, *draft.makes)}
        ready, waiting = dict[int, int](), set[int]()
        for of, gradient in self.graph.gradients:
            ready[of] = last.get(self.graph.base(gradient), 0)
            if changed_at_once(self.graph, self.choices, of):
                ready[of] = max(ready[of], last.get(self.graph.base(of), 0))
            elif self._stays(of) or (self.choices.fused and not frees_gradient(self.graph, self.choices, of)):
                waiting.add(of)
        together = _together(sorted({ready[of] for of in waiting}), 1 if self.choices.fused else NODES)
        due: dict[int, list[_Draft]] = defaultdict(list)
        for of, gradient in self.graph.gradients:
            action = Action("give", value=of, source=gradient, copies=of in self.copies)
            at = together[ready[of]] if of in waiting else ready[of]
            due[at].append(_Draft(action, (self.graph.base(gradient),), ()))
        return [one for at, draft in enumerate(drafts) for one in (draft, *due.get(at, ()))]

    def _stays(self, of: int) -> bool:
        """Whether a gradient stays in the receiver's hands, in its own memory."""
        return of not in self.copies and not frees_gradient(self.graph, self.choices, of)

    def _kept_gradients(self) -> set[int]:
        """Bases of gradients that stay: they are not freed after they were given."""
        return {self.graph.base(gradient) for of, gradient in self.graph.gradients if self._stays(of)}

    # -- memory

    def _in_pieces_only(self, op: GraphOp) -> bool:
        """Whether an op could work in place piece by piece, and is not to."""
        pieces = self.choices.pieces
        return op.scratch_into is not None and pieces is not None and op.index not in pieces

    def _free(self, drafts: Sequence[_Draft], *, born: Iterable[int], kept: set[int]) -> None:
        """Free everything after its last use; where the op that uses it last can work in its memory, it does."""
        last = dict.fromkeys(born, 0)
        last.update((value, at) for at, draft in enumerate(drafts) for value in (*draft.reads, *draft.makes))
        for value, at in last.items():
            if value not in kept:
                drafts[at].frees.append(value)
        if not self.choices.in_place:
            return
        foreign = kept | set(self.tangents)
        for draft in drafts:
            if draft.action.op is None or not draft.makes:
                continue
            op = draft.action.called(self.graph)
            if draft.makes[0] != op.makes[0] or self._in_pieces_only(op):
                continue
            draft.into = next((v for v in op.overwrites if v in draft.frees and v not in foreign), None)
            if draft.into is not None:
                draft.frees.remove(draft.into)


def with_fewest_pieces(made: Schedule, fits: Callable[[Schedule], Sequence[bool]]) -> Schedule:
    """Return the same schedule where an op works piece by piece only if the step would not fit otherwise.

    ``fits`` says of every action, forward and backward, whether its level is within the budget. Where a result lies
    changes the level during its own op alone, so that one look at all levels without pieces is enough.
    """
    without = schedule(made.graph, replace(made.choices, pieces=frozenset()))
    actions = (*without.forward, *without.backward)
    needed = {a.op for a, one in zip(actions, fits(without), strict=True) if not one and a.op is not None}
    some = schedule(made.graph, replace(made.choices, pieces=frozenset(needed)))
    return some if all(fits(some)) else made


def _together(moments: Sequence[int], most: int) -> dict[int, int]:
    """For each of these moments, in order, the one at which what is ready then is given: so many of them at most."""
    size = max(1, -(-len(moments) // most))
    return {at: moments[min(k - k % size + size, len(moments)) - 1] for k, at in enumerate(moments)}
