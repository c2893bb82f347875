"""Plan a captured call for any budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import BudgetError, CompileError, MemplanError
from memplan.explanation.memory_timeline import MemoryTimeline
from memplan.explanation.over_time import memory_timeline_of
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.opaque_calls import notes_on_library_ops
from memplan.planning.capture.recapture import recapture_in_channels_last
from memplan.planning.cost import cpu_workspace
from memplan.planning.cost.clock import clock_of
from memplan.planning.cost.cuda_workspace import with_card_workspaces
from memplan.planning.cost.eager_baseline import AS_MODELLED, baseline
from memplan.planning.cost.op_timing import seconds_to_measure, step_seconds, with_costs
from memplan.planning.cost.optimizer_memory import RecordedUpdates, memory_outside_graph
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.graph.precision import UNSCALED
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor.candidate_search import Fusing, as_fusible
from memplan.planning.inductor.fusion_report import UNTOLD, fusion_of, unfused
from memplan.planning.inductor.partition import Fused
from memplan.planning.levers.lever import GradientUse, Situation
from memplan.planning.levers.registry import with_encodings
from memplan.planning.ops.kernel_group import Group
from memplan.planning.plan.budget_error import budget_error
from memplan.planning.plan.decisions import decide, kernel_decisions, tile_decisions
from memplan.planning.plan.plan import (
    Plan,
    check_fingerprint,
    check_forms,
    check_order,
    check_settings,
    names_of,
    optimizer_name,
)
from memplan.planning.plan.precision_report import cast_copy_peak, lower_precision_decisions
from memplan.planning.plan.segments_note import segments_note
from memplan.planning.plan.workspace_band import workspace_band
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.codegen import program
from memplan.planning.schedule.scheduler import Schedule, frees_gradient, schedule, with_fewest_piecewise_ops
from memplan.planning.schedule.to_trace import reserved_bytes, timeline_of, trace_of
from memplan.planning.search.order import in_lower_order
from memplan.planning.search.reserved import least_reserved
from memplan.planning.search.search import Infeasible, Search, Solution
from memplan.planning.settings import Engine, Settings
from memplan.planning.tiles.tiled import Tile
from memplan.planning.validation.validate import validate
from memplan.simulation.timeline import Timeline


@dataclass(frozen=True)
class Planned:
    """A plan with everything needed to run it."""

    captured: Captured
    """The call that it is for."""
    schedule: Schedule
    outside_memory: OutsideMemory
    plan: Plan
    fused: Fused | None = None
    """Compiled parts, for the engine ``inductor``."""

    def noting(self, notes: Sequence[str]) -> Planned:
        """Return a copy whose plan has further notes."""
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *notes))) if notes else self


_MOMENTS = 800
"""Approximate number of points of a plan's memory timelines."""
LONGER = 6.0
"""Times the usual limit on measuring, for a search that takes some ten seconds anyway."""
SLOWER = 1.1
"""Ratio of op-by-op seconds above which channels last is used only for budgets that the written layout does not meet.
These seconds do not include the main gain of channels last: norms and activations that fuse with less traffic."""


class Study:
    """A captured call in one precision and layout, with results that do not depend on the budget.

    Args:
        model, call, captured: the call and its capture, with costs.
        study_as_written: study of the unchanged step, if ``captured`` is in another precision or layout, or has tiles
            or kernels.
        tiles: segments of the captured call that run piece by piece.
        kernels: groups of its calls that kernels replace.
    """

    def __init__(
        self, model: nn.Module, call: Call, captured: Captured, study_as_written: Study | None = None,
        tiles: tuple[Tile, ...] = (), kernels: tuple[Group, ...] = (),
    ) -> None:  # fmt: skip
        self.model, self.call, self.captured, self.study_as_written = model, call, captured, study_as_written
        self.tiles, self.kernels = tiles, kernels
        self.recorded_updates = RecordedUpdates() if study_as_written is None else study_as_written.recorded_updates
        """Updates of the parameters, which are those of the unchanged step."""
        self._steps: dict[tuple[int, GradientUse, Engine], _Step] = {}
        """Results of `step` by id() of the optimizer, use of gradients and engine."""
        self._channels_last: Study | None = None
        """The same step with convolutions in channels last; None if that is not equivalent, or was not tried yet."""
        self._channels_last_tried = captured.channels_last
        """Whether channels last was tried, or the step is in channels last itself."""

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        """Inputs of the call and constants of its graph, by value."""
        inputs = (value for value in self.captured.graph.values if value.kind == "input")
        return {value.id: self.call.tensors[int(value.path)] for value in inputs} | dict(self.captured.constants)

    def timed_longer(self, settings: Settings) -> Study:
        """Return the study with costs for a search of segments to run piece by piece: what they add to the step is a
        difference of seconds, for which the step's ops have to be measured rather than estimated."""
        graph = _with_costs(self.captured.graph, settings, share=LONGER)
        timed = Study(self.model, self.call, replace(self.captured, graph=graph), self.study_as_written)
        timed.recorded_updates = self.recorded_updates
        return timed

    def planned(self, settings: Settings, budget: int) -> Planned:
        """Return the plan for a budget in bytes. Raises BudgetError.

        With fused kernels: the plan in the first layout in which it fits.
        """
        if settings.engine == "graph":
            search = self.search(settings)
            try:
                return _Planning(self, settings, budget).op_by_op()
            finally:
                search.forget()
        layouts, errors = self.layouts(settings), list[MemplanError]()
        if settings.plan is not None:
            fingerprint = settings.plan.fingerprint
            layouts = [study for study in layouts if study.captured.graph.fingerprint == fingerprint] or [self]
        for study in layouts:
            try:
                return _Planning(study, settings, budget).fused()
            except (BudgetError, CompileError) as error:  # the other layout may still fit
                errors.append(error)
        budget_errors = [error for error in errors if isinstance(error, BudgetError)]
        raise min(budget_errors, key=lambda error: error.smallest_budget) if budget_errors else errors[-1]

    def layouts(self, settings: Settings) -> list[Study]:
        """Return the studies for fused kernels, in the order to try them.

        The step with convolutions in channels last, if that is equivalent, comes before the step as written, unless it
        takes much longer.
        """
        if not settings.channels_last:
            return [self]
        if not self._channels_last_tried:
            self._channels_last_tried = True
            captured = recapture_in_channels_last(self.model, self.call, self.captured, settings.fixed_precision)
            if captured is not None:
                graph = _with_costs(captured.graph, settings, share=0.5)  # most ops are measured already
                as_written = self.study_as_written or self
                self._channels_last = Study(self.model, self.call, replace(captured, graph=graph), as_written)
        if self._channels_last is None:
            return [self]
        slower = _is_slower(self._channels_last.captured.graph, self.captured.graph)
        return [self, self._channels_last] if slower else [self._channels_last, self]

    def least_peak(self, settings: Settings) -> int:
        """Return a lower bound of any plan's peak, with segments in pieces, too.

        It is the larger of two levels: between the passes, with the step's outputs, their gradients and what a loss
        outside of the graph allocates; and at the end of the backward pass, with the gradients that are not freed.
        """
        search = self.search(settings)
        graph, choices = search.graph, Choices(gradients=settings.gradients)
        always_live = sum(_resident(graph, settings, search.outside_memory).values())
        staying = (parameter for parameter, _ in graph.gradients if not frees_gradient(graph, choices, parameter))
        gradients_at_end = sum(graph.values[parameter].contiguous_bytes for parameter in staying)
        bases = {graph.base(value) for value in graph.outputs}
        outputs = (value for value in graph.values if value.id in bases and value.kind not in RESIDENT)
        output_gradients = (value for value in graph.values if value.kind == "tangent")
        between_passes = sum(value.bytes for value in (*outputs, *output_gradients)) + search.outside_memory.loss_bytes
        return always_live + max(gradients_at_end, between_passes)

    def frontier(self, settings: Settings, points: int) -> list[Solution]:
        """Return the frontier of plans between saving everything and the floor, in at most ``points`` budgets.

        For fused kernels, in the first layout.
        """
        if settings.engine == "graph":
            search = self.search(settings)
            try:
                return search.frontier(points)
            finally:
                search.forget()
        first, *_ = self.layouts(settings)
        return first.step(settings).fusing.frontier(points)

    def search(self, settings: Settings) -> Search:
        """Return the search for choices on the step, which all budgets share."""
        return self.step(settings).search

    def eager_peak(self, settings: Settings) -> int:
        """Return the predicted peak of the step without a plan in bytes."""
        peak, _ = self.step(settings).without_plan
        return peak

    def step(self, settings: Settings) -> _Step:
        """Return the cached search and baseline for the settings' optimizer, use of gradients and engine."""
        # a step keeps its optimizer alive, so that no other gets the same id()
        key = id(settings.optimizer), settings.gradients, settings.engine
        if key not in self._steps:
            self._steps[key] = _Step(self, settings)
        return self._steps[key]


class _Step:
    """Search and baseline of a study for one optimizer, use of gradients and engine, computed when first needed."""

    def __init__(self, study: Study, settings: Settings) -> None:
        self._study, self._settings = study, settings

    @cached_property
    def search(self) -> Search:
        """Search that all budgets share.

        With the engine ``graph``, backward ops are in the order that needs the least memory of those tried. Inductor
        orders the kernels of a pass by itself.
        """
        settings = self._settings
        if settings.engine != "graph" or not settings.heuristics.order:
            return self.search_as_captured
        return in_lower_order(self.search_as_captured)

    @cached_property
    def search_as_captured(self) -> Search:
        """Like `search`, with the backward ops in the order in which they were captured."""
        study, settings, graph = self._study, self._settings, self._study.captured.graph
        steady = None  # the graph with seconds that are the same on every machine, if its own were measured
        are_measured = settings.device is None and not isinstance(settings.costs, str)  # else estimates
        if are_measured:
            steady = with_costs(graph, device=settings.home.card, how="roofline")
        if settings.engine == "inductor":
            graph, steady = as_fusible(graph), steady and as_fusible(steady)
        outside_memory = memory_outside_graph(
            study.model, graph, settings.counted_optimizer, settings.gradients, home=settings.home,
            loss_bytes_ratio=settings.loss_bytes_ratio, tensors=study.tensors, recorded=study.recorded_updates,
        )  # fmt: skip
        return Search(
            graph, outside_memory, gradients=settings.gradients, heuristics=settings.heuristics, modelled_graph=steady
        )

    @cached_property
    def least_reserved(self) -> tuple[Choices, int]:
        """Choices of the smallest budget on a card that has a plan, and that budget in bytes."""
        return least_reserved(self.search)

    @cached_property
    def fusing(self) -> Fusing:
        """Search for steps of fused kernels, based on the op-by-op search."""
        return Fusing(self.search)

    @cached_property
    def without_plan(self) -> tuple[int, MemoryTimeline]:
        """Predicted peak of the step without a plan in bytes, and its memory timeline. A step that was captured in
        another precision or layout has those of the step as written."""
        study, settings = self._study, self._settings
        if study.study_as_written is not None:
            return study.study_as_written.step(settings).without_plan
        outside_memory = self.search_as_captured.outside_memory
        if _torch.is_fully_sharded(study.model):  # it cannot be copied and recorded: all values are saved instead
            save_all = schedule(self.search_as_captured.graph, Choices(gradients=settings.gradients))
            trace, timeline = trace_of(save_all, outside_memory), timeline_of(save_all, outside_memory)
            return timeline.peak_reserved, memory_timeline_of(trace, timeline, moments=_MOMENTS)
        # workspaces: measured if this machine's CPU runs the step, else by memplan's formulas
        measures = _measures(settings)
        workspaces = (
            partial(cpu_workspace.with_measured_workspaces, limit=cpu_workspace.LIMIT) if measures else AS_MODELLED
        )
        trace, timeline = baseline(
            study.model,
            study.call,
            settings.optimizer,
            gradients_exist=settings.gradients.accumulates,
            home=settings.home,
            known=workspaces,
        )
        # what the recording lacks: gradients and state of parameters that other steps train; it has workspaces
        added = {cause: size for cause, size in outside_memory.other_bytes.items() if cause != "workspace"}
        last_step = len(timeline.steps) - 1
        memory_timeline = memory_timeline_of(trace, timeline, moments=_MOMENTS).step(last_step).plus(added)
        return timeline.steps[-1].peak_reserved + sum(added.values()), memory_timeline


@dataclass(frozen=True)
class _Bounds:
    """Bounds of a plan, and its predicted timeline."""

    predicted: Timeline
    floor: int
    """Smallest peak that the search reached, in bytes."""
    peak_bound: int
    """Lower bound of any plan's peak, in bytes."""
    seconds_bound: float
    """Lower bound of the added seconds; 0 if none is known."""


class _Planning:
    """A single plan: search, validation and report."""

    def __init__(self, study: Study, settings: Settings, budget: int) -> None:
        self._study, self._settings, self._budget = study, settings, budget
        self._graph, self._search = study.captured.graph, study.search(settings)
        self._outside_memory = self._search.outside_memory

    def op_by_op(self) -> Planned:
        """Plan for the engine ``graph``: by the choices of an earlier plan, else by a search."""
        outside_memory, budget, earlier = self._outside_memory, self._budget, self._settings.plan
        if earlier is not None:
            self._check_graph(earlier)
            planned, search = schedule(self._graph, earlier.choices), self._search
            added_seconds_bound = earlier.lower_bound_seconds
            self._check_settings(earlier, timeline_of(planned, outside_memory).peak_reserved)
            planned = with_fewest_piecewise_ops(planned, partial(fits, outside_memory=outside_memory, budget=budget))
        else:
            planned, added_seconds_bound, search = self._within_budget()
        validate(self._graph, planned, budget=budget, outside_memory=outside_memory)
        timeline, floor = timeline_of(planned, outside_memory), search.floor_peak
        if self._settings.home.card is not None:  # the search counts live bytes, a card reserves more
            _, floor = self._study.step(self._settings).least_reserved
        floor = min(floor, timeline.peak_reserved)
        bounds = _Bounds(timeline, floor, search.lower_bound, added_seconds_bound)
        return Planned(self._study.captured, planned, outside_memory, self._plan(planned, bounds))

    def _within_budget(self) -> tuple[Schedule, float, Search]:
        """Return the schedule for the budget, a lower bound of the seconds that any schedule adds, and the search that
        has the floor.

        On a card the allocator reserves more than the live bytes. The search is repeated with a budget that is smaller
        by the difference; where no schedule has so few live bytes, the one that reserves least is taken.
        """
        outside_memory, budget, target = self._outside_memory, self._budget, self._budget
        while True:
            result, search = self._searched(target)
            planned = schedule(self._graph, result.choices)
            if isinstance(result, Infeasible):
                if self._settings.home.card is not None:
                    planned = self._least_reserved(planned)
                if timeline_of(planned, outside_memory).peak_reserved <= budget:
                    return planned, 0.0, search
                raise budget_error(planned, outside_memory, budget)
            planned = with_fewest_piecewise_ops(planned, partial(fits, outside_memory=outside_memory, budget=target))
            excess = timeline_of(planned, outside_memory).peak_reserved - budget
            if excess <= 0:
                return planned, result.lower_bound_seconds, search
            live_peak = levels(planned, outside_memory).peak
            target = min(target, live_peak) - excess

    def _least_reserved(self, fewest_live: Schedule) -> Schedule:
        """Return the schedule that reserves least: ``fewest_live``, which has the fewest live bytes, or another."""
        choices, reserved = self._study.step(self._settings).least_reserved
        if reserved_bytes(fewest_live, self._outside_memory) <= reserved:
            return fewest_live
        return schedule(self._graph, choices)

    def _searched(self, budget: int) -> tuple[Solution | Infeasible, Search]:
        """Return the result for a budget, and the search that has the floor.

        If all values can be saved, backward ops run in the captured order, else in the order that needs less. If only
        the captured order meets the budget, it is used after all: the other order was chosen by a peak near the floor.
        """
        as_captured, reordered = self._study.step(self._settings).search_as_captured, self._search
        if as_captured.save_all.peak <= budget:
            return as_captured.within(budget), reordered
        result = reordered.within(budget)
        if reordered is as_captured or not isinstance(result, Infeasible) or budget < as_captured.lower_bound:
            return result, reordered
        captured_result = as_captured.within(budget)
        if isinstance(captured_result, Infeasible) and result.smallest <= captured_result.smallest:
            return result, reordered
        return captured_result, as_captured

    def fused(self) -> Planned:
        """Plan for the engine ``inductor``: by an earlier plan's choices, else by a search over candidates."""
        fusing, graph, settings = self._study.step(self._settings).fusing, self._search.graph, self._settings
        if settings.plan is not None:
            self._check_graph(settings.plan)
            candidate = fusing.candidate(settings.plan.choices)
            self._check_settings(settings.plan, candidate.peak)
        else:
            candidate = fusing.within(self._budget)
            if candidate is None:
                lowest = fusing.lowest
                raise budget_error(lowest.schedule, self._outside_memory, self._budget, lowest.timeline)
        validate(graph, candidate.schedule, outside_memory=self._outside_memory)
        floor = min(known.peak for known in fusing.candidates)
        bounds = _Bounds(candidate.timeline, floor, self._study.least_peak(settings), seconds_bound=0.0)
        plan = self._plan(candidate.schedule, bounds)
        fusion = fusion_of(candidate.fused, candidate.code_of_part, settings.device or settings.home.card)
        plan = replace(plan, fusion=fusion, notes=(*plan.notes, *(unfused(fusion) if fusion else (UNTOLD,))))
        captured = replace(self._study.captured, graph=graph)
        return Planned(captured, candidate.schedule, self._outside_memory, plan, candidate.fused)

    def _check_graph(self, plan: Plan) -> None:
        """Raise UsageError if the user's plan is for another step, or for encodings or an order that this step does not
        allow."""
        check_fingerprint(plan, self._graph)
        check_forms(plan, self._graph)
        check_order(plan, self._graph)

    def _check_settings(self, plan: Plan, peak: int) -> None:
        """Raise UsageError if the user's plan is for other settings or a larger budget. ``peak``: its bytes here."""
        settings = self._settings
        check_settings(
            plan, gradients=settings.gradients, fused=settings.engine == "inductor", optimizer=settings.optimizer,
            state=self._outside_memory.by_cause().get("optimizer_state", 0), peak=peak, budget=self._budget,
        )  # fmt: skip

    def _plan(self, planned: Schedule, bounds: _Bounds) -> Plan:
        """Return the plan of a schedule: its decisions and choices, predicted memory and time."""
        study, settings, graph, outside_memory = self._study, self._settings, self._graph, self._outside_memory
        precision, timeline = settings.fixed_precision, None  # no timeline by cause for fused kernels
        as_written = graph if study.study_as_written is None else study.study_as_written.captured.graph
        eager_peak, eager_timeline = study.step(settings).without_plan
        # pieces and kernels are choices of the plan: their seconds count as added to the step, not as the step's own
        rewritten = study.tiles or study.kernels
        piece_seconds = max(0.0, step_seconds(graph) - step_seconds(as_written)) if rewritten else 0.0
        if not planned.choices.fused:
            timeline = memory_timeline_of(trace_of(planned, outside_memory), bounds.predicted, moments=_MOMENTS)
            timeline = _without_storages(timeline)
        # precision and memory format, in contrast, change the seconds that the plan adds to
        is_other_step = precision.compute or (_is_slower(graph, as_written) and not piece_seconds)
        return Plan(
            fingerprint=graph.fingerprint,
            torch=torch.__version__,
            device=settings.home.target.name if settings.device is None else settings.device.name,
            budget=self._budget,
            decisions=(
                *lower_precision_decisions(planned.graph, precision),
                *tile_decisions(graph, as_written, study.tiles),
                *kernel_decisions(graph, as_written, study.kernels),
                *decide(planned.graph, planned, outside_memory),
            ),
            choices=planned.choices,
            names=names_of(graph),
            predicted=bounds.predicted,
            eager_peak=eager_peak,
            floor=bounds.floor,
            lower_bound=bounds.peak_bound,
            seconds=planned.seconds + piece_seconds,
            tiles=study.tiles,
            kernels=study.kernels,
            step_seconds=step_seconds(as_written) or None,
            lower_bound_seconds=bounds.seconds_bound + piece_seconds,
            resident=_resident(graph, settings, outside_memory),
            program=program(planned, defines_segments=True),
            notes=self._notes(planned, bounds),
            heuristics=dataclasses.asdict(settings.heuristics),
            optimizer=optimizer_name(settings.optimizer),
            precision=precision,
            base_seconds=(step_seconds(graph) or None) if is_other_step else None,
            cast_copies=cast_copy_peak(planned) if precision.compute else 0,
            course=timeline,
            eager_course=_without_storages(eager_timeline),
        )

    def _notes(self, planned: Schedule, bounds: _Bounds) -> tuple[str, ...]:
        """Return the notes of a plan: what is not counted, estimated, or valid for this call alone."""
        captured, call, settings, notes = self._study.captured, self._study.call, self._settings, list[str]()
        if settings.optimizer is None:
            notes.append("no optimizer was given: its state and update are not counted")
        if settings.fixed_precision.compute == "float16":
            notes.append(UNSCALED)
        if settings.device is not None:
            kernels = "the CPU's kernels" if settings.home.card is None else f"kernels of {settings.home.card.title}"
            notes.append(f"seconds are estimates for {settings.device.title}; bytes are those of {kernels}")
        if settings.home.card is not None and not planned.choices.fused:
            notes.extend(segments_note(planned, self._outside_memory))
        expected = (
            {}
            if settings.home.card is None
            else with_card_workspaces(captured.graph, settings.home.card).expected_scratch
        )
        if expected:
            # the schedule's simulation is not valid for fused kernels, whose code says when each buffer is live
            band = None if planned.choices.fused else workspace_band(planned, self._outside_memory, expected)
            notes.append(_expected_workspaces(len(expected), bounds.predicted.peak_reserved, band, self._budget))
        notes.extend(map(str, captured.opaque_calls))
        notes.extend(notes_on_library_ops(captured.graph))
        if captured.printed:
            notes.append("what forward() prints is not shown while it is traced: it has no values then")
        inputs = ", ".join(dict.fromkeys(call.name_of(condition.input) for condition in captured.conditions))
        if inputs:
            notes.append(
                f"values of {inputs} decide what is computed: a call where they decide otherwise is planned anew"
            )
        return tuple(notes)


def _expected_workspaces(count: int, peak: int, band: tuple[int, int] | None, budget: int) -> str:
    """Return the note on ``count`` ops with expected workspaces. ``band``: bounds in bytes that hold the plan's peak in
    95 % of steps; None if unknown."""
    note = f"the workspaces of {count} ops are those that cuDNN is expected to choose"
    if band is None:
        return note
    lowest, highest = band
    needs = f"the plan needs about {format_bytes(peak)} (95 %: {format_bytes(lowest)} to {format_bytes(highest)})"
    return f"{note}: {needs}" + (", whose upper end is above the budget" if highest > budget else "")


def _without_storages(timeline: MemoryTimeline) -> MemoryTimeline:
    """Return the memory timeline without the storages and segments at its peak, which a plan does not save."""
    return replace(timeline, alive=(), segments=())


def _is_slower(graph: JointGraph, as_written: JointGraph) -> bool:
    """Return whether the ops of a graph take more than `SLOWER` times as long as those of the step as written."""
    return (step_seconds(graph) or 0.0) > SLOWER * (step_seconds(as_written) or 0.0)


def _with_costs(graph: JointGraph, settings: Settings, *, share: float = 1.0) -> JointGraph:
    """Return the graph with seconds and workspaces of its ops, and on a card with the forms in host memory.

    ``share``: share of the time limit for measuring.
    """
    card = settings.device or settings.home.card
    if settings.host_memory and card is not None and settings.engine == "graph":
        graph = with_encodings(graph, Situation(settings.fixed_precision.save, card))
    if settings.home.card is not None:
        graph = with_card_workspaces(graph, settings.home.card).graph
    if isinstance(settings.costs, str):
        return with_costs(graph, device=card, how="roofline")
    clock = clock_of(settings.home.name)
    begin = clock()
    if _measures(settings):
        graph = cpu_workspace.with_measured_scratch(graph)
    workspace_seconds = clock() - begin
    limit = share * seconds_to_measure(settings.home.name)
    limit = max(limit - workspace_seconds, limit / 2)  # timing takes less after kernels ran once
    return with_costs(graph, device=settings.device, known=settings.costs, place=settings.home.name, limit=limit)


def _measures(settings: Settings) -> bool:
    """Return whether workspaces are measured: for this machine's CPU, unless plans must be the same on all machines."""
    return settings.device is None and settings.home.card is None and not isinstance(settings.costs, str)


def fits(planned: Schedule, outside_memory: OutsideMemory, budget: int) -> list[bool]:
    """Return for each action, forward and backward, whether the memory in use during it fits the budget."""
    counted = levels(planned, outside_memory)
    return [level <= budget for level in (*counted.forward, *counted.backward)]


def _resident(graph: JointGraph, settings: Settings, outside_memory: OutsideMemory) -> dict[str, int]:
    """Return the bytes that are allocated during the whole step, by cause."""
    cause_of_kind = {"parameter": "weight", "buffer": "buffer", "constant": "buffer", "input": "input"}
    sizes: dict[str, int] = {}
    for value in graph.values:
        if value.kind in RESIDENT:
            cause = cause_of_kind[value.kind]
            sizes[cause] = sizes.get(cause, 0) + value.bytes
    if settings.gradients.accumulates:
        trained = (graph.values[of] for of, _ in graph.gradients)
        sizes["parameter_gradient"] = sum(value.contiguous_bytes for value in trained if value.kind == "parameter")
    for cause, size in outside_memory.by_cause().items():
        sizes[cause] = sizes.get(cause, 0) + size
    return sizes
