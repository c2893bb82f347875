"""Plan calls of a model: capture, costs and search, reused for calls of the same kind."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn

from memplan._bytes import format_bytes
from memplan._interrupts import safe_point
from memplan.errors import BudgetError, UsageError
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.replaced_calls import GroupGone
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.kernel_search import planned_with_kernels, with_kernel_remedy
from memplan.planning.levers.lever import Situation
from memplan.planning.levers.registry import with_encodings
from memplan.planning.ops.kernel_group import Group
from memplan.planning.plan.plan import Plan
from memplan.planning.precision_search import FrontierPoint, fastest, frontier, with_graph_remedy, with_lossy_remedy
from memplan.planning.relative_budget import Relative
from memplan.planning.request import Request
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study, _with_costs
from memplan.planning.tile_search import planned_in_tiles, with_tile_remedy
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Tile

_log = logging.getLogger("memplan")


class Planner:
    """Planner of one model. Work that does not depend on the budget is done once for each kind of call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._studies: dict[tuple[Hashable, Precision], Study] = {}
        """By kind of call and precision."""

    def planned(
        self,
        call: Call,
        settings: Settings,
        budget: int,
        key: Hashable = None,
        captured: Captured | None = None,
        *,
        remedies: bool = True,
    ) -> Planned:
        """Return the fastest plan that the search finds within the budget, in the fastest precision if lossy plans are
        allowed and the settings leave the precision open.

        Args:
            call: arguments of the model. Its state and that of autocast are the current ones.
            settings: options of the plan.
            budget: limit in bytes of all memory on the device.
            key: identifies this kind of call and state; calls with the same key are captured once.
            captured: the captured call, if it was captured before.
            remedies: whether an error names other settings that meet the budget, each of which is planned.

        Raises:
            BudgetError: no plan fits the budget.
            RecordingError, UsageError: the step cannot be captured.
        """
        if key is None and (captured is None or settings.chooses_precision):
            key = object()  # unique to this call: its remedies and precisions share captures
        try:
            return self._plan_once(call, settings, budget, key, captured)
        except BudgetError as error:
            if settings.plan is not None or captured is not None or not remedies:
                raise
            if settings.engine == "inductor":
                error = with_graph_remedy(
                    error, lambda with_graph: self._plan_once(call, with_graph, budget, key), settings
                )
            if settings.allow == "exact":
                error = with_lossy_remedy(
                    error, lambda lossy_settings: self.study(call, lossy_settings, key), self._model, settings, budget
                )
            raise error from None

    def _plan_once(
        self, call: Call, settings: Settings, budget: int, key: Hashable, captured: Captured | None = None
    ) -> Planned:
        """Like `planned`, but an error only says what else to allow: nothing else is planned for it."""
        if settings.chooses_precision:
            return fastest(lambda settled: self.study(call, settled, key), self._model, settings, budget)
        study = self.study(call, settings, key, captured)
        _log.info("planning for %s", format_bytes(budget))
        try:
            return study.planned(settings, budget)
        except BudgetError as error:
            if settings.plan is not None or settings.engine != "graph":
                raise
            on_cpu = settings.home.card is None
            if settings.allow != "reordered":
                remedied = with_tile_remedy(error, study, settings, budget) if on_cpu else error
                if remedied is error:  # else it names the same setting already
                    remedied = with_kernel_remedy(error, study, settings, budget)
                raise remedied from None
            if on_cpu:  # only there segments run piece by piece
                timed = study.timed_longer(settings)
                try:
                    return planned_in_tiles(
                        timed, settings, budget, lambda tiles: self._rewritten(timed, call, settings, tiles), error
                    )
                except BudgetError as lower:
                    error = lower
            return planned_with_kernels(
                study, settings, budget, lambda groups: self._rewritten(study, call, settings, kernels=groups), error
            )

    def _rewritten(
        self, study: Study, call: Call, settings: Settings, tiles: Sequence[Tile] = (), kernels: Sequence[Group] = ()
    ) -> Study:
        """Return the study of a call in which segments run piece by piece, or kernels replace groups of ops.

        ``study``: of the same call without either.
        """
        precision, reads = settings.fixed_precision, study.captured.reads
        captured = capture(self._model, call, precision, tiles=tiles, kernels=kernels, reads=reads)
        captured = replace(captured, graph=_with_costs(captured.graph, settings))
        return Study(self._model, call, captured, study, tuple(tiles), tuple(kernels))

    def captured_as(self, plan: Plan, call: Call, settings: Settings) -> Captured:
        """Capture a call with the segments in pieces and the kernels of a plan, and with costs.

        Raises:
            NotTileable, GroupGone: they do not apply to this call.
        """
        captured = capture(self._model, call, settings.fixed_precision, tiles=plan.tiles, kernels=plan.kernels)
        return replace(captured, graph=_with_costs(captured.graph, settings))

    def bounded(self, request: Request, key: Hashable) -> Request:
        """Return the request with its budget in bytes; for a relative one the plain step is recorded first."""
        if not isinstance(request.budget, Relative):
            return request
        return request.bounded(self.study(request.call, request.settings, key).eager_peak(request.settings))

    def frontier(self, call: Call, settings: Settings, points: int, key: Hashable) -> tuple[FrontierPoint, ...]:
        """Return the Pareto frontier of predicted bytes and seconds, over all allowed precisions. Each precision has
        ``points`` plans at most."""
        return frontier(lambda settled: self.study(call, settled, key), self._model, settings, points)

    def study(self, call: Call, settings: Settings, key: Hashable = None, captured: Captured | None = None) -> Study:
        """Return the `Study` of a call in the precision of the settings: its capture, costs and search, which serve any
        budget.

        Studies are cached by ``key`` and precision. An earlier plan's tiles and kernels (``settings.plan``) are part of
        the study. Raises UsageError if the tiles or kernels of the earlier plan do not apply to this call."""
        precision = settings.fixed_precision
        earlier_plan = settings.plan
        if earlier_plan is not None and (earlier_plan.tiles or earlier_plan.kernels):
            plain = self.study(call, replace(settings, plan=None, precision=precision), key, captured)
            try:
                return self._rewritten(plain, call, settings, earlier_plan.tiles, earlier_plan.kernels)
            except (NotTileable, GroupGone) as reason:
                rewritten = "segments in pieces" if earlier_plan.tiles else "groups of ops by kernels"
                raise UsageError(
                    f"The plan is for another model, or for other inputs: of its {rewritten}, {reason}",
                    expected="the model and the inputs that it was made for",
                    do="Plan this step again",
                ) from None
        study = self._studies.get((key, precision)) if key is not None else None
        if study is None:
            exact_study = self._studies.get((key, EXACT)) if precision.lossy else None
            captured = captured or self._capture(call, key, precision)
            study = Study(
                self._model, call, replace(captured, graph=_with_costs(captured.graph, settings)), exact_study
            )
            if key is not None:
                self._studies[key, precision] = study
        return study

    def _capture(self, call: Call, key: Hashable, precision: Precision) -> Captured:
        """Capture the call, or reuse an earlier capture that computes in the same precision.

        Such captures differ only in the encodings in which tensors may be saved.
        """
        for (study_key, study_precision), study in self._studies.items():
            if key is not None and study_key == key and _computes_alike(study_precision, precision):
                captured = study.captured
                return replace(captured, graph=with_encodings(captured.graph, Situation(save=precision.save)))
        safe_point()
        _log.info("tracing the step")
        return capture(self._model, call, precision)


def _computes_alike(a: Precision, b: Precision) -> bool:
    """Return whether two precisions differ at most in how values and moments are saved."""
    return replace(a, save=b.save, moments=b.moments) == b
