"""Choose segments to run piece by piece until a step fits its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

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
"""Of two searches, the second where the first finds no plan: see `Segments.around`. The first adds few segments, of
which the plan is quickly made; the second adds many small ones, and so reaches smaller budgets."""
FAR = 2.0
"""Tiles of whole levels come first for budgets below the smallest without tiles, divided by this: they reach the
smallest budgets, in longer steps."""
FEW = 2
"""Captures at most to find a faster plan around ops where one by levels fits: each takes seconds for large networks."""


def planned_in_tiles(
    study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Tile]], Study], error: BudgetError
) -> Planned:
    """Return a plan within the budget with segments that run piece by piece. ``study`` and ``error`` are those of the
    step without tiles; ``captured`` returns the study of the step with tiles, or raises NotTileable. Raises BudgetError
    if there is none; its ``smallest_budget`` is the smallest peak that was reached."""
    search = _TileSearch(study, settings, budget, captured, error)
    first, second = (partial(search.around_ops, premium) for premium in PREMIUMS)
    far = FAR * budget < error.smallest_budget
    for way in (search.in_levels, first, second) if far else (first, search.in_levels, second):
        planned = way()
        if planned is not None and far and way == search.in_levels:
            other = search.around_ops(PREMIUMS[0], FEW)
            return planned if other is None else min(planned, other, key=lambda found: found.plan.seconds)
        if planned is not None:
            return planned
    error, segments = search.error, search.segments
    highest = over_budget_ops_of(search.tried, settings, budget)[:AT_ONCE]
    if reasons := segments.reasons(highest):
        error = error.but(do=f"{error.do}; what does not run piece by piece: {'; '.join(reasons)}")
    raise error


class _TileSearch:
    """A search for tiles with which a step fits. Arguments: see `planned_in_tiles`."""

    def __init__(
        self, study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Tile]], Study],
        error: BudgetError,
    ) -> None:  # fmt: skip
        self.segments = Segments(study.captured.graph, study.captured.in_place_calls)
        self.error, self.tried = error, study
        """The error with the smallest peak so far, and the last study with tiles."""
        self._study, self._settings, self._budget, self._captured = study, settings, budget, captured

    def around_ops(self, premium: float, captures: int = ROUNDS + REFUSALS) -> Planned | None:
        """Return a plan with tiles around ops above the budget; None if none fits. See `Segments.around`."""
        segments, settings, budget = self.segments, self._settings, self._budget
        tiles, refusals = tuple[Tile, ...](), list[str]()
        self.tried = self._study
        for _ in range(captures):
            safe_point()
            more = _more_tiles(segments, self.tried, settings, budget, tiles, premium)
            if more == tiles:
                break
            _log.info("trying %d segments piece by piece", len(more))
            try:
                self.tried = self._captured(more)
                tiles = more
                return self.tried.planned(settings, budget)
            except NotTileable as reason:
                if not self._refuse(more, reason, refusals):
                    break
            except RecordingError as reason:
                _log.info("the step cannot be traced with its segments in pieces: %s", reason)
                break
            except BudgetError as lower:
                self._note(lower)
        return None

    def in_levels(self) -> Planned | None:
        """Return a plan whose tiles are the levels of a network with skip connections; None if none fits, or if no tile
        repeats another.

        A tile of a level repeats what it reads of an earlier one, which so is never whole, and nor is its gradient. The
        levels of the largest tensors come first, then further ones and more pieces. Without a segment that is refused,
        they are built anew.
        """
        segments, settings, budget = self.segments, self._settings, self._budget
        tiles, levels, refusals = segments.next_level((), budget), 1, list[str]()
        for _ in range(ROUNDS + REFUSALS):
            safe_point()
            if not any(tile.repeats for tile in tiles):
                break
            _log.info("trying %d segments piece by piece, some of which run others again", len(tiles))
            try:
                self.tried = self._captured(tiles)
                return self.tried.planned(settings, budget)
            except NotTileable as reason:
                if not self._refuse(tiles, reason, refusals):
                    break
                tiles = ()
                for _ in range(levels):
                    tiles = segments.next_level(tiles, budget)
                continue
            except RecordingError as reason:
                _log.info("the levels cannot run piece by piece: %s", reason)
                break
            except BudgetError as lower:
                self._note(lower)
            if budget < self.tried.least_peak(settings):
                break
            over = over_budget_ops_of(self.tried, settings, budget)
            finer, deeper = _finer(segments, tiles, over), segments.next_level(tiles, budget)
            enough = all(op.level - budget <= op.scratch // 2 for op in over)  # with half the scratch each fits
            more = next((more for more in ((finer, deeper) if enough else (deeper, finer)) if more != tiles), None)
            if more is None:
                break
            levels += more is deeper
            tiles = more
        return None

    def _refuse(self, tiles: Sequence[Tile], reason: NotTileable, refusals: list[str]) -> bool:
        """Exclude the segment among these that cannot run piece by piece, as a trace shows more than the graph. Returns
        whether others may: it is known which one it was, and not the last of several for the same reason.

        ``refusals``: earlier reasons, to which this one is added.
        """
        _log.info("a segment cannot run piece by piece: %s", reason)
        if reason.at is None:
            return False
        self.segments.refuse(tiles[reason.at], str(reason))
        refusals.append(str(reason))
        return len(refusals) < ALIKE or len(set(refusals[-ALIKE:])) > 1

    def _note(self, error: BudgetError) -> None:
        """Remember the error if its peak is the smallest so far."""
        self.error = min(self.error, error, key=lambda known: known.smallest_budget)


def _finer(segments: Segments, tiles: tuple[Tile, ...], over: Sequence[OverBudgetOp]) -> tuple[Tile, ...]:
    """Return the tiles with twice as many pieces where an op of a tile is in ``over`` and more pieces are possible."""
    slow = {tile for tile in tiles for op in over if op.tile and tile.first <= op.call <= tile.last}
    return tuple((segments.finer(tile, tiles) or tile) if tile in slow else tile for tile in tiles)


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
    ``study`` is the step with ``tiles``; ``premium``: as for `Segments.around`.
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
