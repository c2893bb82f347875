"""Plan: the decisions about a step, its predicted memory and time, and the reasons. Immutable; saved as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from memplan import _json
from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Json, Saved, Unreadable
from memplan._text import format_seconds, printable
from memplan.errors import BudgetError, UsageError
from memplan.explanation.memory_timeline import MemoryTimeline
from memplan.planning.graph.dependencies import is_allowed
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.levers.lever import Grade, GradientUse
from memplan.planning.levers.registry import LEVERS, RELEASE_GRADIENTS, UPDATE_EARLY
from memplan.planning.ops.kernel_group import Group
from memplan.planning.plan import choices_json
from memplan.planning.plan.decision import Decision
from memplan.planning.plan.fusion import Fusion
from memplan.planning.schedule.actions import Choices
from memplan.planning.tiles.tiled import Tile
from memplan.simulation.timeline import Timeline

_BYTES = ("host_bytes", "encoded_bytes")
"""Names in ``Decision.details`` whose values are bytes."""


@dataclass(frozen=True, repr=False)
class Plan(Saved, Displayed):
    """Decisions about a step. Sizes in bytes, times in seconds."""

    FORMAT: ClassVar[str] = "memplan.plan"
    AGAIN: ClassVar[str] = "Plan again"

    fingerprint: str
    """Fingerprint of the joint graph that the plan is for."""
    torch: str
    device: str
    budget: int
    decisions: tuple[Decision, ...]
    """Decisions for reports. The engine executes ``choices``."""
    choices: Choices
    names: Mapping[str, int] = field(hash=False)
    """Ids of all values that choices may name, by their names: in JSON, choices are names."""
    predicted: Timeline
    """Bytes over time of the planned step."""
    eager_peak: int
    """Predicted peak of the step without a plan."""
    floor: int
    """Smallest budget that the search could meet."""
    lower_bound: int
    """Bytes: no schedule of these ops, with their in-place variants, encodings and pieces, has a lower peak in the
    order of ops in which the floor was found."""
    seconds: float
    """Predicted seconds that the plan adds to the step."""
    step_seconds: float | None
    """Predicted time of the step without a plan; None if the ops' costs are unknown."""
    lower_bound_seconds: float
    """No plan within the budget, with the ops in this order, adds fewer seconds."""
    resident: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Bytes that are live throughout the step, by cause."""
    program: str = ""
    """The planned step as Python, to read and run. The engine generates its own from the choices."""
    notes: tuple[str, ...] = ()
    heuristics: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Settings of the search, by name."""
    optimizer: str | None = None
    """Name of the optimizer whose state and update are counted; None without an optimizer, and in plans that are older
    than this field."""
    fusion: Fusion | None = None
    """Kernels of the engine ``inductor``; None for the engine ``graph``, or if Inductor does not report them."""
    precision: Precision = EXACT
    """Precision in which the step computes, and in which values may be saved."""
    base_seconds: float | None = None
    """Predicted time of the step in that precision, without ``seconds``; None: ``step_seconds``."""
    cast_copies: int = 0
    """Peak bytes of copies of weights in lower precision. They are allocated and freed within the step, in addition to
    the weights themselves."""
    tiles: tuple[Tile, ...] = ()
    """Segments that run piece by piece."""
    kernels: tuple[Group, ...] = ()
    """Groups of calls that kernels replace."""
    course: MemoryTimeline | None = None
    """Memory timeline of the planned step by cause; None for fused kernels, and in plans older than this field."""
    eager_course: MemoryTimeline | None = None
    """Memory timeline of the step without a plan."""

    def __post_init__(self) -> None:
        chosen = self.choices.recompute | {value for _, value in self.choices.saved_forms}
        assert chosen <= set(self.names.values()), "a choice has no name"
        object.__setattr__(self, "heuristics", _json.frozen(self.heuristics, "heuristics"))

    @property
    def peak(self) -> int:
        """Predicted peak of the planned step."""
        return self.predicted.peak_reserved

    @property
    def grade(self) -> Grade:
        """How close the result is to that of the unplanned step. Fused kernels of an exact plan, and segments in
        pieces or by kernels, are ``reordered``: they add in another order."""
        if self.lost.lossy:
            return "lossy"
        adds_in_other_order = self.choices.fused or self.tiles or self.kernels
        return "reordered" if adds_in_other_order else "exact"

    @property
    def lost(self) -> Precision:
        """Precision that the plan actually uses, which may be less lossy than what ``precision`` allows."""
        saves_lossy = any(decision.scope.kind == "value" and decision.grade == "lossy" for decision in self.decisions)
        return self.precision if saves_lossy else replace(self.precision, save="exact")

    @property
    def total_seconds(self) -> float | None:
        """Predicted time of the planned step; None if the ops' costs are unknown."""
        base = self.step_seconds if self.base_seconds is None else self.base_seconds
        return None if base is None else base + self.seconds

    @property
    def gap(self) -> float:
        """Most seconds that a better plan within the same budget, with the ops in the same order, could save."""
        return max(0.0, self.seconds - self.lower_bound_seconds)

    @property
    def changes_nothing(self) -> bool:
        """Whether the step fits the budget without a plan, and the plan changes neither how values are saved nor how
        ops run."""
        choices = self.choices
        saves_otherwise = choices.recompute or choices.saved_forms
        runs_otherwise = choices.order or choices.gradients.updates_early or choices.fused or self.tiles or self.kernels
        return self.eager_peak <= self.budget and not (saves_otherwise or runs_otherwise or self.precision.compute)

    @property
    def host_bytes(self) -> int:
        """Upper bound of the bytes of pinned host memory for offloaded values, each in a block of a power of two."""
        return sum(int(decision.details.get("host_bytes", 0)) for decision in self.decisions)

    def count(self, lever: str) -> int:
        """Return the number of decisions that use ``lever``."""
        return sum(decision.lever == lever for decision in self.decisions)

    def as_python(self) -> str:
        """Return the planned forward and backward pass as runnable Python, each op with the user's file:line.

        The text of a loaded plan comes from its file: read it before you run it.
        """
        return self.program

    def _plain(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON. Choices name values instead of their ids."""
        return Saved._plain(self) | {"choices": choices_json.to_plain(self.choices, self.names)}

    @classmethod
    def _prepared(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a JSON file with ids in place of the value names in its choices. Raises Unreadable."""
        names = _json.read_part(Mapping[str, int], plain.get("names"), ".names")
        if len(set(names.values())) < len(names):
            raise Unreadable("gives two names to one value").within(".names")
        return {**plain, "choices": choices_json.by_id(plain.get("choices"), names)}

    def _check(self) -> None:
        """Raise Unreadable for a plan from a file whose decisions have unknown levers or details that are not bytes."""
        levers = ["keep", *(lever.name for lever in LEVERS)]
        for index, decision in enumerate(self.decisions):
            if decision.lever not in levers:
                unknown = f"is {decision.lever!r:.40}, which is none of {', '.join(map(repr, levers))}"
                raise Unreadable(unknown).within(f".decisions[{index}].lever")
            for name in _BYTES:
                _json.read_part(int, decision.details.get(name, 0), f".decisions[{index}].details.{name}")

    @property
    def summary(self) -> str:
        """A summary in a paragraph."""
        eager_peak, peak = format_bytes(self.eager_peak), format_bytes(self.peak)
        budget = f"the budget of {format_bytes(self.budget)}"
        if self.changes_nothing:
            return f"A step on {self.device} fits {budget} as it is: predicted peak {eager_peak}. {self._floor_text}"
        base = self.step_seconds if self.base_seconds is None else self.base_seconds
        share = f" ({100 * self.seconds / base:.1f} %)" if base else ""
        levers = Counter(decision.lever for decision in self.decisions if decision.scope.kind == "value")
        values = [lever.counted(levers[lever.name], self.host_bytes) for lever in LEVERS]
        updated = UPDATE_EARLY.summary if self.choices.gradients.updates_early else ""
        in_pieces = f"{len(self.tiles)} segment{'' if len(self.tiles) == 1 else 's'} in pieces" if self.tiles else ""
        groups = len(self.kernels)
        by_kernels = f"{groups} group{'' if groups == 1 else 's'} of ops by kernels" if groups else ""
        in_order = "ops of the backward pass moved" if self.choices.order else ""
        counts = "".join(f", {part}" for part in (in_pieces, by_kernels, *values, in_order, updated) if part)
        bound = ""
        if not self.choices.fused:  # unknown for fused kernels
            of_what = " of these pieces" if self.tiles else " of these kernels" if self.kernels else ""
            least = format_seconds(self.lower_bound_seconds)
            bound = f"No plan{of_what} in this order of ops and budget adds less than {least} "
            bound += f"(gap {format_seconds(self.gap)}). "
        return (
            f"A step on {self.device} in {budget}: predicted peak {eager_peak} -> {peak}, "
            f"{format_seconds(self.seconds)} added{share}{counts}. {self._lossy}{bound}{self._floor_text}"
        )

    @property
    def _floor_text(self) -> str:
        """Sentence about the smallest budget that the search could meet, and its lower bound."""
        floor, lower_bound = format_bytes(self.floor), format_bytes(self.lower_bound)
        if self.choices.fused:
            return f"The least looked at is {floor}, no less than {lower_bound} can be."
        order = "order of ops" if self.changes_nothing else "order"  # else the sentence before names it in full
        of_what = " with these pieces" if self.tiles else " with these kernels" if self.kernels else ""
        return f"The least budget found is {floor}; its {order} needs at least {lower_bound}{of_what}."

    @property
    def _lossy(self) -> str:
        """Sentences about the lost precision and its cost; empty for plans that lose none."""
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

    def __repr__(self) -> str:
        return f"<Plan: {self.summary}>"


def names_of(graph: JointGraph) -> dict[str, int]:
    """Return the ids of all values that a plan's choices may name, by name: those that the forward pass makes."""
    return {graph.values[value].name: value for op in graph.forward_ops for value in op.makes}


def check_fingerprint(plan: Plan, graph: JointGraph) -> None:
    """Raise UsageError if a plan is for another model or other inputs."""
    names = names_of(graph)
    if plan.fingerprint == graph.fingerprint and all(names.get(name) == value for name, value in plan.names.items()):
        return
    actual, expected = plan.fingerprint[:16], graph.fingerprint[:16]
    raise UsageError(
        f"The plan is for another model, or for other inputs: its fingerprint is {actual}"
        + (", but its values are numbered otherwise" if actual == expected else ""),
        expected=f"{expected}, that of this model with these inputs",
        do="Plan this step again",
    )


def check_forms(plan: Plan, graph: JointGraph) -> None:
    """Raise UsageError if a plan saves values in encodings that this step does not support."""
    missing = plan.choices.saved_forms - {(form.lever, form.value) for form in graph.forms}
    for lever in LEVERS:
        values = sum(name == lever.name for name, _ in missing)
        if values:
            number = f"{values} value" + ("" if values == 1 else "s")
            message, expected, do = lever.missing(number, plan.device)
            raise UsageError(message, expected=expected, do=do)


def check_order(plan: Plan, graph: JointGraph) -> None:
    """Raise UsageError if a plan runs backward ops in an order that their operands do not allow."""
    if not is_allowed(graph, plan.choices.order):
        raise UsageError(
            "The plan runs the ops of the backward pass in another order than they can run in",
            expected="each once, after those whose results it reads",
            do="Plan this step again",
        )


def check_settings(
    plan: Plan, *, gradients: GradientUse, optimizer: Any, state: int, peak: int, budget: int, fused: bool = False
) -> None:
    """Check that a plan is for these settings and meets the budget with them.

    Args:
        plan: a plan for this graph.
        gradients: use of each parameter's gradient.
        optimizer: a callable that makes the optimizer of the parameters, or None.
        state: bytes of the optimizer's state with these settings.
        peak: bytes that the plan's choices need with these settings.
        budget: in bytes.
        fused: whether the engine ``inductor`` is to run it.

    Raises:
        UsageError: the plan is for another use of gradients, or another engine.
        BudgetError: the plan's choices need more than the budget.
    """
    options = (  # (setting of the plan, setting of this step, its name if it is on, its name if it is off)
        (plan.choices.gradients.updates_early, gradients.updates_early, *UPDATE_EARLY.option),
        (plan.choices.gradients.accumulates, gradients.accumulates, *RELEASE_GRADIENTS.option),
        (plan.choices.fused, fused, "engine='inductor' (--engine inductor)", "engine='graph'"),
    )
    for planned, wanted, name_on, name_off in options:
        if planned != wanted:
            planned_name, wanted_name = (name_on if is_on else name_off for is_on in (planned, wanted))
            raise UsageError(
                f"The plan was made for {planned_name}, and this step asks for {wanted_name}",
                expected="the same settings",
                do=f"Ask for {planned_name}, or plan this step again",
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
    function = getattr(optimizer, "func", optimizer)  # of a functools.partial
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "an optimizer"


def _with_optimizer(name: str | None, state: int) -> str:
    """Describe an optimizer by its name and the bytes of its state: "with AdamW and 2 MiB of state"."""
    if name is None:
        return f"with {format_bytes(state)} of state" if state else "without an optimizer"
    return f"with {printable(name)} and {format_bytes(state)} of state"
