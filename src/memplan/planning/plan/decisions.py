"""A schedule -> the list of decisions in it, each with a reason that a person can argue with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from memplan._bytes import format_bytes
from memplan._json import Json
from memplan._text import format_seconds
from memplan.planning.graph.joint_graph import Encoding, GraphOp, JointGraph, recomputable
from memplan.planning.levers.encode import LOSSY
from memplan.planning.plan.plan import Decision, Grade, Lever, Scope
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule

_STEP = Scope("step")


def decide(graph: JointGraph, schedule: Schedule) -> tuple[Decision, ...]:
    """One decision for every forward value that lives to the backward pass or is there again in it, in the order in
    which they are made; then those about the whole step. Their seconds add up to the schedule's."""
    decider = _Decider(graph, schedule)
    return (*decider.values(), *decider.step())


class _Decider:
    def __init__(self, graph: JointGraph, schedule: Schedule) -> None:
        self.graph, self.schedule = graph, schedule
        self.outputs = {graph.base(value) for value in graph.outputs}
        self.recomputable = recomputable(graph)
        self.encodings: dict[int, Encoding] = {}
        self.seconds: dict[int, float] = defaultdict(float)
        self.again: set[int] = set()
        self.readers: dict[int, list[Action]] = defaultdict(list)
        """By value or encoded form: what reads it in the backward pass."""
        self.waits = schedule.waits
        self.offloads = {o.value: o for o in graph.offloads if o.value in self.waits}
        for value, offload in self.offloads.items():
            self.seconds[value] = offload.use_seconds + self.waits[value]
        known = {encoding.value: encoding for encoding in graph.encodings}
        for action in (*schedule.forward, *schedule.backward):
            self._note(action, known)
        for action in schedule.backward:
            for value in action.reads if action.kind not in ("fetch", "fetched") else ():
                self.readers[value].append(action)
        self.dearest = self._dearest()

    def _note(self, action: Action, known: dict[int, Encoding]) -> None:
        if action.kind == "run" and action.recomputed:
            self.again.update(action.makes)
            self.seconds[action.makes[0]] += action.called(self.graph).seconds
        elif action.kind in ("encode", "decode") and action.value is not None:
            encoding = self.encodings[action.value] = known[action.value]
            self.seconds[action.value] += encoding.use_seconds if action.kind == "encode" else encoding.decode_seconds

    def _dearest(self) -> int | None:
        """Of what is kept though it could be made again, the value that takes the most time for each byte."""
        rates = {
            value: op.seconds / self.graph.values[value].bytes
            for value in self._kept()
            if (op := self.graph.maker[value].rerun) and self._may_run_again(value) and self.graph.values[value].bytes
        }
        return max(rates, key=lambda value: rates[value]) if len(rates) > 1 and any(rates.values()) else None

    def _kept(self) -> list[int]:
        saved = set(self.schedule.saved)
        forward = [value for op in self.graph.forward_ops for value in op.makes]
        return [value for value in forward if value in saved or value in self.outputs]

    def _may_run_again(self, value: int) -> bool:
        return value in self.recomputable

    # -- values

    def values(self) -> list[Decision]:
        """Those about single values."""
        kept = set(self._kept())
        found = list[Decision]()
        for op in self.graph.forward_ops:
            for value in op.makes:
                size = self.graph.values[value].bytes
                if value in self.offloads:
                    found.append(self._offloaded(op, value, size))
                elif value in self.encodings:
                    found.append(self._encoded(op, value, size))
                elif value in self.again:
                    found.append(self._decision(op, value, "recompute", size, self._why_again(op, value)))
                elif value in kept:
                    found.append(self._decision(op, value, "keep", size, self._why_kept(op, value)))
        return found

    def _decision(
        self, op: GraphOp, value: int, lever: Lever, size: int, reason: str,
        details: Mapping[str, Json] | None = None, grade: Grade = "exact",
    ) -> Decision:  # fmt: skip
        scope = Scope("value", (self._name(value),))
        seconds = self.seconds.get(value, 0.0)
        return Decision(lever, scope, grade, size, seconds, op.layer, op.where, reason, details or {})

    def _encoded(self, op: GraphOp, value: int, size: int) -> Decision:
        encoding = self.encodings[value]
        smaller = self.graph.values[encoding.encoded].bytes
        freed = 0 if value in self.schedule.saved else max(0, size - smaller)
        parts = [f"{format_bytes(smaller)} instead of {format_bytes(size)} ({encoding.codec})"]
        direct = [action for action in self.readers[encoding.encoded] if action.direct == value]
        if direct:
            parts.append(f"read as it is by {self._ops(direct)}")
        if value in self.schedule.saved:
            parts.append("the value itself is kept too")
        if value in self.again:
            parts.append(f"for the rest made again in {format_seconds(op.rerun.seconds)}")
        elif self.readers[value]:
            parts.append(self._needed(value))
        details = {"codec": encoding.codec, "encoded_bytes": smaller}
        grade: Grade = "lossy" if encoding.codec in LOSSY else "exact"
        return self._decision(op, value, "encode", freed, "; ".join(parts), details, grade)

    def _offloaded(self, op: GraphOp, value: int, size: int) -> Decision:
        """A value that waits in host memory; where some read an encoded form, that is there meanwhile."""
        offload, wait = self.offloads[value], self.waits[value]
        forward, backward = self.schedule.forward, self.schedule.backward
        stored = next(at for at, one in enumerate(forward) if one.kind == "stored" and one.value == value)
        fetch = next(at for at, one in enumerate(backward) if one.kind == "fetch" and one.value == value)
        last = next(one for one in reversed(forward[:stored]) if one.kind == "run")
        first = next(one for one in backward[fetch:] if one.kind == "run")
        smaller = self.graph.values[self.encodings[value].encoded].bytes if value in self.encodings else 0
        parts = [
            f"copied to host memory in {format_seconds(offload.copy_seconds)}, freed after {self._ops([last])}",
            f"fetched before {self._ops([first])}; {self._needed(value)}",
            f"the step waits {format_seconds(wait)} for it" if wait else "the step waits for neither copy",
        ]
        if smaller:
            parts.append(f"{format_bytes(smaller)} of it stay ({self.encodings[value].codec})")
        details = {"copy_seconds": offload.copy_seconds, "waits": wait, "host_bytes": size}
        return self._decision(op, value, "offload", max(0, size - smaller), "; ".join(parts), details)

    def _why_again(self, op: GraphOp, value: int) -> str:
        if value in self.seconds:
            by = "" if op.again is None else f" by {short(op.again.target)}"
            made = f"making it again{by} takes {format_seconds(self.seconds[value])}"
        else:
            others = [other for other in op.makes if other in self.seconds]
            made = f"made again together with {self._name(others[0])}" if others else "made again"
        return f"{made} for {format_bytes(self.graph.values[value].bytes)}; {self._needed(value)}"

    def _why_kept(self, op: GraphOp, value: int) -> str:
        needed = self._needed(value)
        if value in self.outputs:
            return f"returned by the model; {needed}" if needed else "returned by the model"
        if op.random:
            return f"random: never drawn again; {needed}"
        if op.once:
            return f"its op must run once only; {needed}"
        if value in self.graph.irreplaceable:
            return f"held by a call that is kept as it is; {needed}"
        if op.again is not None and value not in op.again.makes:
            return f"{needed}; with it {short(op.again.target)} can make {self._name(op.again.makes[0])} again"
        most = ", the most per byte of all that is kept" if value == self.dearest else ""
        return f"{needed}; making it again would take {format_seconds(op.rerun.seconds)}{most}"

    def _needed(self, value: int) -> str:
        """What reads a value in the backward pass: gradients before what is made again."""
        readers = self.readers[value]
        plain = [action for action in readers if not action.recomputed]
        if plain:
            return f"needed by {self._ops(plain)}"
        if readers:
            again = self._name(readers[0].makes[0])
            return f"needed to make {again} again" + _more(len(readers) - 1, "other")
        return ""

    def _ops(self, actions: Sequence[Action]) -> str:
        """The first of the ops, with its layer, and how many others there are."""
        first = self.graph.ops[actions[0].op] if actions[0].op is not None else None
        if first is None:
            return f"a {actions[0].kind}" + _more(len(actions) - 1, "op")
        layer = first.layer or ("" if first.gradient_of is None else self.graph.ops[first.gradient_of].layer)
        return short(first.target) + (f" of {layer}" if layer else "") + _more(len(actions) - 1, "op")

    def _name(self, value: int) -> str:
        return self.graph.values[value].name

    # -- the step

    def step(self) -> list[Decision]:
        """Those about all of the step."""
        choices, values = self.schedule.choices, self.graph.values
        found = list[Decision]()
        reuses = [
            (self._name(action.into), self._name(action.makes[0]), values[action.makes[0]].bytes)
            for action in (*self.schedule.forward, *self.schedule.backward)
            if action.into is not None
        ]
        if reuses:
            size = sum(size for *_, size in reuses)
            reason = f"results that take over the memory of a value that dies with their op: {len(reuses)}"
            found.append(Decision("in place", _STEP, "exact", size, 0.0, reason=reason, details={"reuses": reuses}))
        gradients = [of for of, _ in self.graph.gradients if values[of].kind == "parameter"]
        size = sum(values[of].own_bytes for of in gradients)
        details = {"parameters": len(gradients)}
        if choices.early and gradients:
            reason = "each parameter is updated and its gradient freed as soon as nothing reads them any more"
            found.append(Decision("update early", _STEP, "exact", size, 0.0, reason=reason, details=details))
        if choices.held and gradients:
            reason = "each gradient is added to the held one as soon as it is complete, and freed"
            found.append(Decision("accumulate", _STEP, "exact", size, 0.0, reason=reason, details=details))
        return found


def short(target: str) -> str:
    """``aten.relu.default`` as ``relu``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target


def _more(number: int, what: str) -> str:
    return f" and {number} more {what}{'' if number == 1 else 's'}" if number else ""
