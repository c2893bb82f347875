"""Plan: what is decided about a step, what it needs then, and why. Immutable, and the same value back from JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memplan import _json
from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Json, Unreadable
from memplan._text import format_seconds, printable, write_whole
from memplan.errors import BudgetError, PlanFormatError, UsageError
from memplan.explanation.course import Course, course_from
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.levers.lever import Grade, GradientUse
from memplan.planning.levers.registry import LEVERS, RELEASE_GRADIENTS, UPDATE_EARLY
from memplan.planning.plan import choices_json, table
from memplan.planning.plan.decision import Decision
from memplan.planning.plan.fusion import Fusion
from memplan.planning.schedule.actions import Choices
from memplan.simulation.timeline import Timeline

FORMAT = "memplan.plan"
_BYTES = ("host_bytes", "encoded_bytes")
"""Details of decisions that are numbers of bytes."""
SCHEMA = 1
"""Version of the JSON form. Raised whenever a reader of the old form would misread the new one, or the other way
round; another lever does not: it is refused by name. Nor does a field with a default, which older plans lack."""

_COURSES = ("course", "eager_course")


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Decisions about a step. Sizes in bytes, times in seconds."""

    fingerprint: str
    """Fingerprint of the joint graph that it is for."""
    torch: str
    device: str
    budget: int
    decisions: tuple[Decision, ...]
    """Decisions in words; ``choices`` is what is carried out."""
    choices: Choices
    names: Mapping[str, int] = field(hash=False)
    """The id of every value that may be chosen, by its name: in JSON, choices are names."""
    predicted: Timeline
    """Bytes over time of the planned step."""
    eager_peak: int
    """Predicted peak of the step without a plan."""
    floor: int
    """Smallest budget that was found to be enough."""
    lower_bound: int
    """No schedule of these ops, with their forms in place and encoded, has a peak below it."""
    seconds: float
    """Predicted: what the plan adds to a step."""
    step_seconds: float | None
    """Predicted time of the step without a plan; None where no costs are known."""
    lower_bound_seconds: float
    """No plan within the budget adds less."""
    resident: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Bytes that are there all the time, by cause."""
    program: str = ""
    """The planned step as Python: to be read and run by people. The engine writes its own from the choices."""
    notes: tuple[str, ...] = ()
    heuristics: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Settings of the search, by name."""
    optimizer: str | None = None
    """The name of the optimizer whose state and update are counted; None where none is, and in plans of before this
    field."""
    fusion: Fusion | None = None
    """Kernels of the engine ``inductor``; None for the engine ``graph``, and where Inductor does not report them."""
    precision: Precision = EXACT
    """Precision that the step computes in, and in which values may be saved."""
    base_seconds: float | None = None
    """Predicted time of the step in that precision, before ``seconds`` are added; None: ``step_seconds``."""
    cast_copies: int = 0
    """Bytes of copies of weights in lower precision that are there at once, at the most: beside the weights, which
    stay what they are. They come and go with the step, and are not resident."""
    course: Course | None = None
    """Bytes by cause over the planned step; None of fused kernels, and in plans of before this field."""
    eager_course: Course | None = None
    """The same of the step without a plan."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        chosen = self.choices.recompute | {value for _, value in self.choices.kept_as}
        assert chosen <= set(self.names.values()), "a choice has no name"
        object.__setattr__(self, "heuristics", _json.frozen(self.heuristics, "heuristics"))

    @property
    def peak(self) -> int:
        """Predicted peak of the planned step."""
        return self.predicted.peak_reserved

    @property
    def grade(self) -> Grade:
        """Return how close the result is to the unplanned step's. Fused kernels of an exact plan add in another
        order."""
        return "lossy" if self.lost.lossy else "reordered" if self.choices.fused else "exact"

    @property
    def lost(self) -> Precision:
        """Precision that is really lost: the plan's, less what it allows and does not use."""
        saves = any(one.scope.kind == "value" and one.grade == "lossy" for one in self.decisions)
        return self.precision if saves else replace(self.precision, save="exact")

    @property
    def total_seconds(self) -> float | None:
        """Predicted time of the planned step; None where no costs are known."""
        base = self.step_seconds if self.base_seconds is None else self.base_seconds
        return None if base is None else base + self.seconds

    @property
    def gap(self) -> float:
        """Seconds that a better plan within the same budget could save at the most."""
        return max(0.0, self.seconds - self.lower_bound_seconds)

    @property
    def changes_nothing(self) -> bool:
        """Return whether the step fits as it stands, every value is kept as it is, and nothing is compiled."""
        choices = self.choices
        chosen = choices.recompute or choices.kept_as or choices.gradients.updates or choices.fused
        chosen = bool(chosen or self.precision.compute)
        return self.eager_peak <= self.budget and not chosen

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that values take which wait there, at most."""
        return sum(int(decision.details.get("host_bytes", 0)) for decision in self.decisions)

    def count(self, lever: str) -> int:
        """Count how many decisions use a lever."""
        return sum(decision.lever == lever for decision in self.decisions)

    def as_python(self) -> str:
        """Return the planned forward and backward pass as Python that runs, each line with the user's file:line.

        A plan that was read from a file has the text of that file: read it before you run it.
        """
        return self.program

    def to_json(self) -> str:
        """Return the plan as JSON text, the same text for the same plan."""
        plain = _json.to_plain(replace(self, course=None, eager_course=None))
        plain = {name: value for name, value in plain.items() if name not in _COURSES}
        courses = {name: getattr(self, name) for name in _COURSES}
        plain |= {name: course.to_dict() for name, course in courses.items() if course is not None}
        plain["choices"] = choices_json.to_plain(self.choices, self.names)
        return _json.text_of({"format": FORMAT, **plain})

    @classmethod
    def from_json(cls, text: str, source: str = "The text") -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanFormatError: not JSON, not a plan, of another schema version, or with what this memplan does not know.
        """
        try:
            return _read(_json.parse(text))
        except Unreadable as error:
            raise _no_plan(source, error) from None

    @property
    def summary(self) -> str:
        """Return a summary of one paragraph."""
        before, after = format_bytes(self.eager_peak), format_bytes(self.peak)
        budget = f"the budget of {format_bytes(self.budget)}"
        least = "The least looked at" if self.choices.fused else "The least found to be enough"
        floor = f"{least} is {format_bytes(self.floor)}, no less than {format_bytes(self.lower_bound)} can be."
        if self.changes_nothing:
            return f"A step on {self.device} fits {budget} as it is: predicted peak {before}. {floor}"
        base = self.step_seconds if self.base_seconds is None else self.base_seconds
        share = f" ({100 * self.seconds / base:.1f} %)" if base else ""
        levers = Counter(one.lever for one in self.decisions if one.scope.kind == "value")
        values = [lever.counted(levers[lever.name], self.host_bytes) for lever in LEVERS]
        updated = UPDATE_EARLY.summary if self.choices.gradients.updates else ""
        counts = ", ".join(filter(None, (*values, updated)))
        bound = ""
        if not self.choices.fused:  # of fused kernels none is known
            bound = f"No plan in this budget adds less than {format_seconds(self.lower_bound_seconds)} "
            bound += f"(gap {format_seconds(self.gap)}). "
        return (
            f"A step on {self.device} in {budget}: predicted peak {before} -> {after}, "
            f"{format_seconds(self.seconds)} added{share}, {counts}. {self._lossy}{bound}{floor}"
        )

    @property
    def _lossy(self) -> str:
        """Return sentences on what is lossy about it; none where it is exact."""
        if self.grade != "lossy":
            return ""
        total, before = self.total_seconds, self.step_seconds
        took = f": {format_seconds(total)} predicted, {format_seconds(before)} without" if total and before else ""
        text = f"Lossy, {self.lost}{took}. "
        if self.cast_copies:
            text += f"Weights stay {format_bytes(self.resident.get('weight', 0))} as they are, copies of them in "
            text += f"{self.precision.compute} take {format_bytes(self.cast_copies)} at the most"
            state = self.resident.get("optimizer_state", 0)
            text += f", the optimizer's state {format_bytes(state)}. " if state else ". "
        return text

    def __str__(self) -> str:
        """Return the summary and, where the step is changed, what fusion brings it, and a table: what is decided about
        the whole step, then the largest of the rest, each with its reason."""
        if self.changes_nothing:
            return self.summary
        fused = [] if self.fusion is None else [f"As fused kernels: {self.fusion.summary}."]
        return "\n".join([self.summary, *fused, *table.lines_of(self.decisions)])


def names_of(graph: JointGraph) -> dict[str, int]:
    """Return the id of every value that a plan's choices may name: what the forward pass makes."""
    return {graph.values[value].name: value for op in graph.forward_ops for value in op.makes}


def check_fingerprint(plan: Plan, graph: JointGraph) -> None:
    """Refuse a plan for another model or other inputs.

    Raises:
        UsageError: the fingerprints differ, or the plan calls values otherwise.
    """
    names = names_of(graph)
    if plan.fingerprint == graph.fingerprint and all(names.get(name) == value for name, value in plan.names.items()):
        return
    found, expected = plan.fingerprint[:16], graph.fingerprint[:16]
    raise UsageError(
        f"The plan is for another model, or for other inputs: its fingerprint is {found}"
        + (", but its values are numbered otherwise" if found == expected else ""),
        expected=f"{expected}, that of this model with these inputs",
        do="Plan this step again",
    )


def check_forms(plan: Plan, graph: JointGraph) -> None:
    """Refuse a plan that keeps values in forms that this step cannot keep them in. Raises UsageError."""
    missing = plan.choices.kept_as - {(form.lever, form.value) for form in graph.forms}
    for lever in LEVERS:
        values = sum(name == lever.name for name, _ in missing)
        if values:
            found, expected, do = lever.missing(_values(values), plan.device)
            raise UsageError(found, expected=expected, do=do)


def check_settings(
    plan: Plan, *, gradients: GradientUse, optimizer: Any, state: int, peak: int, budget: int, fused: bool = False
) -> None:
    """Refuse a plan for another update, for gradients held otherwise, or for less beside the step than there is now.

    Args:
        plan: a plan for this graph.
        gradients: what becomes of each parameter's gradient.
        fused: whether the engine ``inductor`` is to run it.
        optimizer: a callable of the parameters, or None.
        state: bytes of the optimizer's state.
        peak: bytes that the plan's choices need with these settings.
        budget: bytes that there are.

    Raises:
        UsageError: the plan was made for another use of gradients, or another engine.
        BudgetError: the plan's choices need more than the budget with what there is now.
    """
    options = (
        (plan.choices.gradients.updates, gradients.updates, *UPDATE_EARLY.option),
        (plan.choices.gradients.adds, gradients.adds, *RELEASE_GRADIENTS.option),
        (plan.choices.fused, fused, "engine='inductor' (--engine inductor)", "engine='graph'"),
    )
    for made, asked, yes, no in options:
        if made != asked:
            raise UsageError(
                f"The plan was made for {yes if made else no}, and this step asks for {yes if asked else no}",
                expected="the same settings",
                do=f"Ask for {yes if made else no}, or plan this step again",
            )
    if peak > budget:
        before = _with_optimizer(plan.optimizer, plan.resident.get("optimizer_state", 0))
        now = _with_optimizer(optimizer_name(optimizer), state)
        raise BudgetError(
            f"The plan {'' if before == now else f'was made {before}; {now} it '}needs {format_bytes(peak)}",
            expected=f"no more than the budget of {format_bytes(budget)}",
            do="Plan this step again, with this optimizer and this budget, or give the plan what it needs",
            smallest_budget=peak,
        )


def optimizer_name(optimizer: Any) -> str | None:
    """Return the name of a callable that makes an optimizer; None for None.

    Example:
        >>> optimizer_name(torch.optim.AdamW), optimizer_name(lambda parameters: torch.optim.AdamW(parameters))
        ('AdamW', 'an optimizer')
    """
    if optimizer is None:
        return None
    name = getattr(getattr(optimizer, "func", optimizer), "__name__", "")  # of a functools.partial what it calls
    return name if name.isidentifier() else "an optimizer"


def _with_optimizer(name: str | None, state: int) -> str:
    if name is None:
        return f"with {format_bytes(state)} of state" if state else "without an optimizer"
    return f"with {printable(name)} and {format_bytes(state)} of state"


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to a file; one that is there already is replaced only when the new one is complete."""
    write_whole(path, plan.to_json())


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file that `save_plan` wrote. Raises PlanFormatError, OSError."""
    try:
        text = _json.read_text(path)
    except Unreadable as error:
        raise _no_plan(str(path), error) from None
    return Plan.from_json(text, str(path))


def _no_plan(source: str, error: Unreadable) -> PlanFormatError:
    return PlanFormatError(
        f"{source} is no plan that can be used: {error}",
        expected=f"a plan of schema version {SCHEMA}, written by memplan",
        do="Plan again, or read it with the memplan that wrote it",
    )


def _values(number: int) -> str:
    return f"{number} value" + ("" if number == 1 else "s")


def _read(plain: Any) -> Plan:
    if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
        raise Unreadable(f'it has no "format": "{FORMAT}"')
    if plain.get("schema") != SCHEMA:
        raise Unreadable(f"its schema version is {_json.shown(plain.get('schema'))}")
    courses = {name: course_from(plain.pop(name), f"the plan.{name}") for name in _COURSES if plain.get(name)}
    names = _json.from_plain(Mapping[str, int], plain.get("names"), "names")
    if len(set(names.values())) < len(names):
        raise Unreadable("names gives two names to one value")
    plan = _json.from_plain(Plan, {**plain, "choices": choices_json.by_id(plain.get("choices"), names)}, "the plan")
    plan = replace(plan, **courses)
    levers = ["keep", *(lever.name for lever in LEVERS)]
    for at, decision in enumerate(plan.decisions):
        if decision.lever not in levers:
            place, known = f"the plan.decisions[{at}].lever", ", ".join(map(repr, levers))
            raise Unreadable(f"{place} is {decision.lever!r:.40}, which is none of {known}")
        for name in _BYTES:
            _json.from_plain(int, decision.details.get(name, 0), f"the plan.decisions[{at}].details.{name}")
    return plan
