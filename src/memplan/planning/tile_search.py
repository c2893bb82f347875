"""Choose segments to run piece by piece until a step fits its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from memplan._interrupts import safe_point
from memplan.errors import BudgetError, RecordingError
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.search import STEEP
from memplan.planning.segments import MOST_PIECES, Hot, Segments, hot_ops
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Tile

_log = logging.getLogger("memplan")

ROUNDS = 8
"""Most captures: each has the segments that the one before was found to need."""
REFUSALS = 8
"""Most captures that find that a segment cannot run piece by piece."""
AT_ONCE = 4
"""Most new segments a round: with these, others may not be needed."""


def planned_in_tiles(
    study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Tile]], Study], error: BudgetError
) -> Planned:
    """Return a plan whose segments run piece by piece.

    Args:
        study: the step as written, which has no plan within the budget.
        settings, budget: of the plan.
        captured: returns the study of the step with tiles. Raises NotTileable.
        error: why the step has no plan as written.

    Raises:
        BudgetError: there is none; its ``smallest_budget`` is the smallest that was reached.
    """
    segments, tiles, tried = Segments(study.captured.graph, study.captured.in_place_calls), tuple[Tile, ...](), study
    for _ in range(ROUNDS + REFUSALS):
        safe_point()
        more = _more_tiles(segments, tried, settings, budget, tiles)
        if more == tiles:
            break
        _log.info("trying %d segments piece by piece", len(more))
        try:
            tried = captured(more)
            tiles = more
            return tried.planned(settings, budget)
        except NotTileable as reason:  # what the trace alone shows
            _log.info("a segment cannot run piece by piece: %s", reason)
            if reason.at is None:
                break
            segments.refuse(more[reason.at], str(reason))
        except RecordingError as reason:
            _log.info("the step cannot be traced with its segments in pieces: %s", reason)
            break
        except BudgetError as lower:
            error = min(error, lower, key=lambda known: known.smallest_budget)
    reasons = segments.reasons(_hot_ops(tried, settings, budget)[:AT_ONCE])
    if reasons:
        error = error.but(do=f"{error.do}; what does not run piece by piece: {'; '.join(reasons)}")
    raise error


def with_tile_remedy(error: BudgetError, study: Study, settings: Settings, budget: int) -> BudgetError:
    """Return the error of a step without tiles that says so if some may lower its peak."""
    if settings.allow != "exact":
        return error
    segments = Segments(study.captured.graph, study.captured.in_place_calls)
    if not _more_tiles(segments, study, settings, budget, ()):
        return error
    return error.but(do=f"{error.do}; or let segments run piece by piece, which adds in another order: "
                     "allow='reordered' (--allow reordered)")  # fmt: skip


def _more_tiles(
    segments: Segments, study: Study, settings: Settings, budget: int, tiles: tuple[Tile, ...]
) -> tuple[Tile, ...]:
    """Return tiles with more pieces, or more tiles, where a step is above its budget; the same if none may help."""
    if budget < study.least(settings):
        return tiles
    chosen, new = list(tiles), 0
    for hot in _hot_ops(study, settings, budget):
        at = next((at for at, tile in enumerate(chosen) if tile.first <= hot.call <= tile.last), None)
        if at is not None and chosen[at] not in tiles:
            continue  # chosen for an op that is higher
        if at is not None and hot.tile and chosen[at].pieces < MOST_PIECES:
            finer = replace(chosen[at], pieces=chosen[at].pieces * 2)
            if segments.segment(finer.first, finer.last, finer.axis, finer.pieces) is not None:
                chosen[at] = finer
                continue
        if new < AT_ONCE:
            larger = segments.around(hot, budget, chosen)
            if larger is not None:
                chosen = [tile for tile in chosen if not larger.first <= tile.first <= larger.last]
                chosen.append(larger)
                new += 1
    return tuple(sorted(chosen, key=lambda tile: tile.first))


def _hot_ops(study: Study, settings: Settings, budget: int) -> list[Hot]:
    """Return the ops at which a step is above its budget even where the search brought it as near as it could."""
    search = study.search(settings)
    nearest = schedule(search.graph, search.nearest(budget, STEEP).choices)
    return hot_ops(search.graph, nearest, search.outside_memory, budget)
