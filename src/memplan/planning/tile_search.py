"""Choose segments to run piece by piece until a step fits its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from memplan._interrupts import safe_point
from memplan.errors import BudgetError, RecordingError
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.search import STEEP
from memplan.planning.segments import OverBudgetOp, Segments, over_budget_ops
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Tile

_log = logging.getLogger("memplan")

ROUNDS = 8
"""Captures at most; each adds segments where the plan of the previous capture is above the budget."""
REFUSALS = 8
"""Further captures that may fail because a segment cannot run piece by piece."""
ALIKE = 3
"""Captures in a row that may fail for the same reason: segments around the same ops have it, too."""
AT_ONCE = 4
"""New segments in a capture at most, as the first may make others unnecessary."""
PREMIUMS = 2.0, 1.0
"""Searches, each where the one before finds no plan: see `Segments.around`. The first adds few segments, of which the
plan is quickly made; the second adds many small ones, and so reaches smaller budgets."""


def planned_in_tiles(
    study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Tile]], Study], error: BudgetError
) -> Planned:
    """Return a plan within the budget with segments that run piece by piece.

    Args:
        study: the step without tiles, which has no plan within the budget.
        settings: options of the plan.
        budget: bytes.
        captured: returns the study of the step with tiles, or raises NotTileable.
        error: the error of the step without tiles.

    Raises:
        BudgetError: there is no such plan; ``smallest_budget`` is the smallest peak that was reached.
    """
    segments, tried = Segments(study.captured.graph, study.captured.in_place_calls), study
    for premium in PREMIUMS:
        tiles, tried, refusals = tuple[Tile, ...](), study, list[str]()
        for _ in range(ROUNDS + REFUSALS):
            safe_point()
            if len(refusals) >= ALIKE and len(set(refusals[-ALIKE:])) == 1:
                break
            more = _more_tiles(segments, tried, settings, budget, tiles, premium)
            if more == tiles:
                break
            _log.info("trying %d segments piece by piece", len(more))
            try:
                tried = captured(more)
                tiles = more
                return tried.planned(settings, budget)
            except NotTileable as reason:  # tracing shows more than the graph
                _log.info("a segment cannot run piece by piece: %s", reason)
                if reason.at is None:  # unknown which segment it was
                    break
                segments.refuse(more[reason.at], str(reason))
                refusals.append(str(reason))
            except RecordingError as reason:
                _log.info("the step cannot be traced with its segments in pieces: %s", reason)
                break
            except BudgetError as lower:
                error = min(error, lower, key=lambda known: known.smallest_budget)
    highest = over_budget_ops_of(tried, settings, budget)[:AT_ONCE]
    if reasons := segments.reasons(highest):
        error = error.but(do=f"{error.do}; what does not run piece by piece: {'; '.join(reasons)}")
    raise error


def with_tile_remedy(error: BudgetError, study: Study, settings: Settings, budget: int) -> BudgetError:
    """Return the error of a step without tiles, with the advice to allow tiles if some may lower its peak."""
    if settings.allow != "exact":
        return error
    segments = Segments(study.captured.graph, study.captured.in_place_calls)
    if not _more_tiles(segments, study, settings, budget, (), PREMIUMS[0]):
        return error
    return error.but(do=f"{error.do}; or let segments run piece by piece, which adds in another order: "
                     "allow='reordered' (--allow reordered)")  # fmt: skip


def _more_tiles(
    segments: Segments, study: Study, settings: Settings, budget: int, tiles: tuple[Tile, ...], premium: float
) -> tuple[Tile, ...]:
    """Return the tiles to try next; the same tiles if nothing is expected to help.

    For each op above the budget, the highest first, its tile is cut into more pieces, or a new tile is laid around it.

    Args:
        segments: segments that the step can be cut into.
        study: the step with ``tiles``.
        settings: options of the plan.
        budget: bytes.
        tiles: present tiles.
        premium: as for `Segments.around`.
    """
    if budget < study.least_peak(settings):
        return tiles
    chosen, new = list(tiles), 0
    for op in over_budget_ops_of(study, settings, budget):
        index = next((index for index, tile in enumerate(chosen) if tile.first <= op.call <= tile.last), None)
        if index is not None and chosen[index] not in tiles:
            continue  # chosen for an op with a higher level
        if index is not None and op.tile:
            finer = segments.finer(chosen[index])
            if finer is not None:
                chosen[index] = finer
                continue
        if new < AT_ONCE:
            larger = segments.around(op, budget, chosen, premium)
            if larger is not None:
                chosen = [tile for tile in chosen if not larger.first <= tile.first <= larger.last]
                chosen.append(larger)
                new += 1
    return tuple(sorted(chosen, key=lambda tile: tile.first))


def over_budget_ops_of(study: Study, settings: Settings, budget: int) -> list[OverBudgetOp]:
    """Return the ops that exceed the budget in the plan that comes nearest to it, the most live bytes first."""
    search = study.search(settings)
    nearest = schedule(search.graph, search.nearest(budget, STEEP).choices)
    return over_budget_ops(search.graph, nearest, search.outside_memory, budget)
