"""An interpreter of schedules: memory holds symbols, and whoever is given memory may change it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from memplan.planning.graph.joint_graph import JointGraph, SavedForm, Value
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Action, Choices
from memplan.planning.schedule.scheduler import Schedule

RESIDENT = ("parameter", "buffer", "input", "constant")


class Wrong(Exception):
    """A schedule did not do what the graph says."""


class Machine:
    """Runs a schedule on symbols. A kernel's result is a symbol of the op and of what it read."""

    def __init__(self, graph: JointGraph, plan: Schedule, outside_memory: OutsideMemory) -> None:
        self.graph, self.plan, self.outside_memory = graph, plan, outside_memory
        self.memory: dict[int, Any] = {v.id: ("given", v.id) for v in graph.values if self.is_resident(v)}
        held = [math.prod(v.shape) * 4 for v in graph.values if v.id in dict(graph.gradients) and v.kind == "parameter"]
        self.base = outside_memory.held_bytes + sum(held) * plan.choices.gradients.accumulates
        self.copies = self.peak = self.draws = 0
        self.effects: list[int] = []
        self.theirs: list[int] = []
        self.gradients: dict[int, Any] = {}
        self.first: dict[int, tuple[list[Any], Any]] = {}
        """By op with another that makes its first result again: what that is to read, and the result."""
        self.underway: dict[int, tuple[int, Any]] = {}
        """Copies, by where they go: from where, and what."""
        self.operands: dict[int, Any] = dict(self.memory)
        """What each forward value held when it was made."""
        self.count(0)

    @staticmethod
    def is_resident(value: Value) -> bool:
        return value.kind in RESIDENT and value.base == value.id

    def run(self) -> None:
        for actions in (self.plan.forward, self.plan.backward):
            for action in actions:
                try:
                    getattr(self, "do_" + action.kind)(action)
                    for value in action.frees:
                        del self.memory[value]
                except (LookupError, TypeError, ValueError, StopIteration) as error:
                    raise Wrong(f"{action}: {error!r}") from None
            if self.underway:
                raise Wrong("a pass ends, and something is still copied")
        self.count(0 if self.plan.choices.gradients.updates_early else self.outside_memory.update_bytes)

    def count(self, transient: int) -> None:
        live = sum(self.graph.values[value].bytes for value in self.memory)
        self.peak = max(self.peak, self.base + self.copies + live + transient)

    def size(self, value: int) -> int:
        return self.graph.values[value].bytes

    def do_receive(self, action: Action) -> None:
        self.memory.update({v.id: ("given", v.id) for v in self.graph.values if v.kind == "tangent"})
        self.count(self.outside_memory.loss_bytes)

    def do_run(self, action: Action) -> None:
        op = first = self.graph.ops[-1 if action.op is None else action.op]
        if action.recomputed and op.cheaper_recompute is not None:
            op = op.cheaper_recompute
        form = None if action.encoding is None else self.graph.form_by_encoded[action.encoding]
        seen = {value: self.memory[value] for value in op.reads if form is None or value != form.value}
        in_place = action.overwritten is not None and op.in_place_scratch is not None
        scratch = op.in_place_scratch if in_place else op.scratch
        if form is not None:
            scratch = form.direct_reader_scratch
            if op.index not in form.direct_readers:
                raise Wrong(f"{op.index} has no kernel for the kept form")
            seen[form.value] = self.fetched(form)
        if op.random:
            self.draws += 1
        if op.must_run_once or op.random:
            self.effects.append(op.index)
        symbol = (op.index, self.draws * op.random, *(seen[value] for value in op.reads))
        if action.overwritten is not None:
            if action.overwritten not in op.overwrites or self.size(action.overwritten) != self.size(op.makes[0]):
                raise Wrong(f"{op.index} cannot work in the memory of {action.overwritten}")
            if self.graph.values[action.overwritten].kind == "tangent" or action.makes[0] != op.makes[0]:
                raise Wrong("that memory is not for this")
            del self.memory[action.overwritten]
        for value in action.makes:
            if value in self.memory:
                raise Wrong(f"{value} is there twice")
            self.memory[value] = hash((op.makes.index(value), symbol))
            if not action.recomputed:
                self.operands[value] = self.memory[value]
        if op is not first:
            operands, result = self.first[op.index]
            self.memory[op.makes[0]] = result if operands == list(seen.values()) else "something else"
        elif op.cheaper_recompute is not None and not action.recomputed:
            known = self.memory | seen
            self.first[op.index] = [known[value] for value in op.cheaper_recompute.reads], known[op.makes[0]]
        self.count((scratch or 0) + op.discarded + sum(self.size(v) for v in op.makes if v not in action.makes))

    def fetched(self, form: SavedForm) -> Any:
        """What a kept form stands for."""
        found = self.memory[form.encoded]
        if found[0] != form.codec:
            raise Wrong("this is no such form")
        return found[1]

    def form(self, action: Action) -> SavedForm:
        found = self.graph.form_by_encoded[-1 if action.encoding is None else action.encoding]
        if found.value != action.value:
            raise Wrong("a form of another value")
        return found

    def do_store(self, action: Action) -> None:
        form = self.form(action)
        if form.is_copied:
            return self.begin(form.value, form.encoded)
        if form.encoded in self.memory:
            raise Wrong("stored twice")
        self.memory[form.encoded] = (form.codec, self.memory[form.value])
        self.count(form.store_scratch)

    def do_fetch(self, action: Action) -> None:
        form = self.form(action)
        if form.is_copied:
            return self.begin(form.encoded, form.value)
        if not form.can_restore_value or form.value in self.memory:
            raise Wrong("cannot be fetched")
        if any(self.memory[value] != self.operands[value] for value in form.fetch_operands):
            raise Wrong("fetched of other operands")
        self.memory[form.value] = self.fetched(form)
        self.count(form.fetch_scratch)

    def begin(self, source: int, target: int) -> None:
        """Begin a copy that runs beside the ops."""
        if target in self.memory or source in self.underway:
            raise Wrong("copied twice, or what is not there yet")
        self.memory[target], self.underway[target] = "nothing yet", (source, self.memory[source])
        self.count(0)

    def moved(self, action: Action) -> tuple[int, int]:
        """Where a copy comes from, and where it goes to."""
        form = self.form(action)
        return (form.value, form.encoded) if action.kind == "stored" else (form.encoded, form.value)

    def do_stored(self, action: Action) -> None:
        source, target = self.moved(action)
        if self.underway.pop(target) != (source, self.memory[source]) or target not in self.memory:
            raise Wrong("it was changed while it was copied, or its memory is gone")
        self.memory[target] = self.memory[source]

    do_fetched = do_stored

    def do_write(self, action: Action) -> None:
        values = self.graph.values
        self.memory[values[action.value or 0].base] = ("new", self.memory[values[action.source or 0].base])

    def do_give(self, action: Action) -> None:
        of, values = self.graph.values[action.value or 0], self.graph.values
        base = values[action.source or 0].base
        if of.id in self.gradients:
            raise Wrong("given twice")
        self.gradients[of.id] = (action.source, self.memory[base])
        early = self.plan.choices.gradients.updates_early and of.kind == "parameter"
        held = self.plan.choices.gradients.accumulates and of.kind == "parameter"
        copy = math.prod(of.shape) * 4 if action.returns_copy else 0
        self.count(copy + (self.outside_memory.update_by_parameter.get(of.id, 0) if early else 0))
        if early or of.hooked:
            self.memory[of.base] = ("updated", of.id)
        if not (early or held):
            self.copies += copy
            if not action.returns_copy:
                if base in self.theirs or values[base].kind not in ("result",) or base in self.graph.outputs:
                    raise Wrong("memory of others is given away")
                self.theirs.append(base)
                self.memory[base] = "theirs now"

    def results(self) -> Any:
        """All that can be seen of the step from outside."""
        kept = {value: self.memory[value] for value in self.memory if value not in self.theirs}
        return {v: symbol for v, symbol in kept.items() if symbol != ("updated", v)}, self.gradients, self.effects


def straight(graph: JointGraph) -> Any:
    """What a step gives that keeps everything to its end, without schedule()."""
    forward = [Action("run", op=op.index, makes=op.makes) for op in graph.forward_ops]
    backward = [Action("run", op=op.index, makes=op.makes) for op in graph.backward_ops]
    writes = [Action("write", value=target, source=source) for target, source in graph.mutations]
    gives = [Action("give", value=of, source=gradient, returns_copy=True) for of, gradient in graph.gradients]
    machine = Machine(
        graph,
        Schedule(graph, Choices(), (*forward,), (Action("receive"), *backward, *writes, *gives), ()),
        OutsideMemory(),
    )
    machine.run()
    stays = {v.id for v in graph.values if v.kind in RESIDENT} | {graph.base(value) for value in graph.outputs}
    machine.memory = {value: symbol for value, symbol in machine.memory.items() if value in stays}
    return machine.results()


def interpreted(graph: JointGraph, plan: Schedule, outside_memory: OutsideMemory) -> int:
    """The peak of a schedule that does all that the graph says, and leaves nothing behind; else Wrong."""
    machine = Machine(graph, plan, outside_memory)
    machine.run()
    memory, gradients, effects = machine.results()
    wanted, right, once = straight(graph)
    if plan.choices.gradients.updates_early:
        trained = {of for of, _ in graph.gradients if graph.values[of].kind == "parameter"}
        wanted = {value: symbol for value, symbol in wanted.items() if value not in trained}
    if memory != wanted or gradients != right or effects != once:
        raise Wrong("other results, or memory is left")
    return machine.peak


def with_action(plan: Schedule, at: int, *actions: Action) -> Schedule:
    """The schedule with other actions in the place of one, both passes counted on."""
    cut = len(plan.forward)
    if at < cut:
        return replace(plan, forward=(*plan.forward[:at], *actions, *plan.forward[at + 1 :]))
    at -= cut
    return replace(plan, backward=(*plan.backward[:at], *actions, *plan.backward[at + 1 :]))
