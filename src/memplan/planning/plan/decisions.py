"""List the decisions of a schedule, each with its reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, KeptForm, Value, recomputable
from memplan.planning.graph.op_schema import short
from memplan.planning.levers import registry
from memplan.planning.levers.lever import GradientUse, Reason
from memplan.planning.levers.registry import RECOMPUTE
from memplan.planning.plan.decision import Decision, Scope
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule

_STEP = Scope("step")


def decide(graph: JointGraph, schedule: Schedule) -> tuple[Decision, ...]:
    """Return a decision for each forward value that is saved for the backward pass or restored in it, in the order of
    the ops that make them; then the decisions about the whole step. Their seconds add up to the schedule's."""
    decider = _Decider(graph, schedule)
    return (*decider.values(), *decider.step())


class _Decider:
    """The planned step that levers query for their reasons (see `memplan.planning.levers.lever.PlannedStep`)."""

    def __init__(self, graph: JointGraph, schedule: Schedule) -> None:
        self.graph, self.schedule = graph, schedule
        self.outputs = {graph.base(value) for value in graph.outputs}
        self.recomputable = recomputable(graph)
        self.forms: dict[int, list[KeptForm]] = defaultdict(list)
        """By value: its kept forms. The decision is about the first form, and its reason names the others."""
        self.seconds: dict[int, float] = defaultdict(float)
        self.recomputed: set[int] = set()
        self.readers: dict[int, list[Action]] = defaultdict(list)
        """By value or kept form: the actions that read it in the backward pass."""
        self.waited = schedule.waits
        for value, wait in self.waited.items():
            self.seconds[value] = next(f.use_seconds for f in graph.forms if f.value == value and f.is_copied) + wait
        for action in (*schedule.forward, *schedule.backward):
            self._note(action)
        for forms in self.forms.values():
            forms.sort(key=lambda form: (not form.is_copied, not form.whole))
        for action in schedule.backward:
            form = None if action.form is None else graph.form[action.form]
            if form is None or not form.is_copied:
                for value in action.reads:
                    self.readers[value].append(action)
        self.costliest = self._costliest()

    def _note(self, action: Action) -> None:
        if action.kind == "run":
            if action.recomputed:
                self.recomputed.update(action.makes)
                self.seconds[action.makes[0]] += action.called(self.graph).seconds
        elif action.form is not None:
            form = self.graph.form[action.form]
            if action.kind == "store":
                self.forms[form.value].append(form)
            if not form.is_copied:
                self.seconds[form.value] += form.use_seconds if action.kind == "store" else form.fetch_seconds

    def _costliest(self) -> int | None:
        """Of the values that are kept but recomputable, the value with the most seconds of recomputation per byte."""
        rates = {
            value: op.seconds / self.graph.values[value].bytes
            for value in self._saved_values()
            if (op := self.graph.maker[value].rerun) and value in self.recomputable and self.graph.values[value].bytes
        }
        return max(rates, key=lambda value: rates[value]) if len(rates) > 1 and any(rates.values()) else None

    def _saved_values(self) -> list[int]:
        """Forward values that live after the forward pass: saved values and outputs."""
        saved = set(self.schedule.saved)
        forward = [value for op in self.graph.forward_ops for value in op.makes]
        return [value for value in forward if value in saved or value in self.outputs]

    # -- values

    def values(self) -> list[Decision]:
        """Return the decisions about single values."""
        kept = set(self._saved_values())
        decisions = list[Decision]()
        for op in self.graph.forward_ops:
            for value in op.makes:
                if value in self.forms:
                    lever, reason = self._kept_as(*self.forms[value])
                elif value in self.recomputed:
                    lever, reason = RECOMPUTE.name, RECOMPUTE.new_tensors(self, value)
                elif value in kept:
                    lever, reason = "keep", RECOMPUTE.kept(self, value, costs_most=value == self.costliest)
                else:
                    continue
                decisions.append(self._decision(op, value, lever, reason))
        return decisions

    def _kept_as(self, form: KeptForm, *others: KeptForm) -> tuple[str, Reason]:
        """Name and reason of the lever that keeps a value. Its other forms, for other readers, are counted against
        it."""
        reason = registry.find(form.lever).reason(self, form)
        if others and not form.is_copied:
            other_bytes = sum(self.graph.values[other.kept].bytes for other in others)
            names = ", ".join(other.how or other.lever for other in others)
            text = f"{reason.text}; {format_bytes(other_bytes)} stay beside it ({names})"
            reason = replace(reason, bytes=max(0, reason.bytes - other_bytes), text=text)
        return form.lever, reason

    def _decision(self, op: GraphOp, value: int, lever: str, reason: Reason) -> Decision:
        scope, seconds = Scope("value", (self._name(value),)), self.seconds.get(value, 0.0)
        return Decision(
            lever, scope, reason.grade, reason.bytes, seconds, op.layer, op.where, reason.text, reason.details
        )

    # -- queries of levers

    def is_saved(self, value: int) -> bool:
        """Whether the value itself is saved for the backward pass."""
        return value in self.schedule.saved

    def is_recomputed(self, value: int) -> bool:
        """Whether the value is recomputed in the backward pass."""
        return value in self.recomputed

    def direct_readers(self, form: KeptForm) -> str:
        """Describe the ops that read the kept form itself; empty if there are none."""
        direct = [action for action in self.readers[form.kept] if action.form == form.kept and action.kind == "run"]
        return self._ops(direct) if direct else ""

    def freed_after(self, form: KeptForm) -> str:
        """Describe the op after which the value of a copied form is freed."""
        forward = self.schedule.forward
        stored = next(at for at, a in enumerate(forward) if (a.kind, a.form) == ("stored", form.kept))
        return self._ops([next(action for action in reversed(forward[:stored]) if action.kind == "run")])

    def fetched_before(self, form: KeptForm) -> str:
        """Describe the op before which the copy back to the device begins."""
        backward = self.schedule.backward
        fetch = next(at for at, a in enumerate(backward) if (a.kind, a.form) == ("fetch", form.kept))
        return self._ops([next(action for action in backward[fetch:] if action.kind == "run")])

    def waits(self, form: KeptForm) -> float:
        """Seconds that the step waits for the copies of a form."""
        return self.waited.get(form.value, 0.0)

    def other_forms(self, form: KeptForm) -> Sequence[KeptForm]:
        """Return the other forms that the same value is kept in."""
        return [other for other in self.forms[form.value] if other is not form]

    @property
    def reuses(self) -> Sequence[tuple[str, str, int]]:
        """Names of an overwritten value and of the result in its memory, and their bytes, for each op in place."""
        return [
            (self._name(action.into), self._name(action.makes[0]), self.graph.values[action.makes[0]].bytes)
            for action in (*self.schedule.forward, *self.schedule.backward)
            if action.into is not None
        ]

    @property
    def gradients(self) -> GradientUse:
        """Use of the parameters' gradients."""
        return self.schedule.choices.gradients

    @property
    def trained(self) -> Sequence[Value]:
        """Parameters that get a gradient."""
        values = (self.graph.values[of] for of, _ in self.graph.gradients)
        return [value for value in values if value.kind == "parameter"]

    # -- reasons

    def needed(self, value: int) -> str:
        """Describe the readers of a value in the backward pass: backward ops or, if there are none, recomputed ops."""
        readers = self.readers[value]
        plain = [action for action in readers if not action.recomputed]
        if plain:
            return f"needed by {self._ops(plain)}"
        if readers:
            recomputed = self._name(readers[0].makes[0])
            return f"needed to make {recomputed} again" + _more(len(readers) - 1, "other")
        return ""

    def _ops(self, actions: Sequence[Action]) -> str:
        """Describe the first of the actions, with its layer, and the number of the others."""
        first = self.graph.ops[actions[0].op] if actions[0].op is not None else None
        if first is None:
            return f"a {self._verb(actions[0])}" + _more(len(actions) - 1, "op")
        layer = first.layer or ("" if first.gradient_of is None else self.graph.ops[first.gradient_of].layer)
        return short(first.target) + (f" of {layer}" if layer else "") + _more(len(actions) - 1, "op")

    def _verb(self, action: Action) -> str:
        """The verb for an action that runs no op."""
        if action.form is None or action.kind not in ("store", "fetch"):
            return action.kind
        stores, fetches = registry.find(self.graph.form[action.form].lever).verbs
        return stores if action.kind == "store" else fetches

    def _name(self, value: int) -> str:
        return self.graph.values[value].name

    # -- the step

    def step(self) -> list[Decision]:
        """Return the decisions about the whole step."""
        reasons = ((lever.name, lever.decide(self)) for lever in registry.LEVERS)
        return [
            Decision(name, _STEP, reason.grade, reason.bytes, 0.0, reason=reason.text, details=reason.details)
            for name, reason in reasons
            if reason is not None
        ]


def _more(number: int, what: str) -> str:
    return f" and {number} more {what}{'' if number == 1 else 's'}" if number else ""
