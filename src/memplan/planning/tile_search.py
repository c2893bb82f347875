"""Choose segments to run piece by piece until a step fits its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from memplan._interrupts import safe_point
from memplan.errors import BudgetError, RecordingError
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.levers.registry import TILE
from memplan.planning.plan.plan import Plan
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.search import STEEP
from memplan.planning.segments import OverBudgetOp, Segments, over_budget_ops, repeated_ranges
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
"""``premium`` of `Segments.tile_around` in two searches, the second where the first has no plan. The first adds few
segments, of which the plan is quickly made; the second adds many small ones, and so reaches smaller budgets."""
FAR = 2.0
"""Tiles of whole levels come first for budgets below the smallest without tiles, divided by this: they reach the
smallest budgets, in longer steps."""
TRIALS = 6
"""Captures at most to leave out tiles of a plan that fits, or some of their pieces."""
LEAST_ADDED = 0.02
"""Share of the step's time that tiles add, or their borders, for such a trial."""
FEW = 4
"""Captures at most to find a faster plan around ops where a plan by levels fits: each takes seconds for large networks.
"""


def planned_in_tiles(
    study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Tile]], Study], error: BudgetError
) -> Planned:
    """Return a plan within the budget with segments that run piece by piece. ``study`` and ``error`` are those of the
    step without tiles; ``captured`` returns the study of the step with tiles, or raises NotTileable. Raises BudgetError
    if there is none; its ``smallest_budget`` is the smallest peak that was reached."""
    search = _TileSearch(study, settings, budget, captured, error)
    return search.in_less_time(search.first_that_fits())


class _TileSearch:
    """A search for tiles with which a step fits. Arguments: see `planned_in_tiles`."""

    def __init__(
        self, study: Study, settings: Settings, budget: int, captured: Callable[[Sequence[Tile]], Study],
        error: BudgetError,
    ) -> None:  # fmt: skip
        self.segments = Segments(study.captured.graph, study.captured.in_place_calls)
        self.error, self.tried = error, study
        """The error with the smallest peak so far, and the last study that was planned."""
        self._study, self._settings, self._budget, self._captured = study, settings, budget, captured

    def first_that_fits(self) -> Planned:
        """Return the first plan found within the budget. Errors: see `planned_in_tiles`."""
        few_segments, many_segments = (partial(self.around_ops, premium) for premium in PREMIUMS)
        is_far = FAR * self._budget < self.error.smallest_budget
        if is_far and (by_levels := self.in_levels()) is not None:
            around_ops = self.around_ops(PREMIUMS[0], captures=FEW)  # may be faster
            return by_levels if around_ops is None else min(by_levels, around_ops, key=lambda each: each.plan.seconds)
        for attempt in (few_segments, many_segments) if is_far else (few_segments, self.in_levels, many_segments):
            planned = attempt()
            if planned is not None:
                return planned
        error, segments = self.error, self.segments
        highest = over_budget_ops_of(self.tried, self._settings, self._budget)[:AT_ONCE]
        if reasons := segments.reasons(highest):
            error = error.but(do=f"{error.do}; what does not run piece by piece: {'; '.join(reasons)}")
        raise error

    def around_ops(self, premium: float, captures: int = ROUNDS + REFUSALS) -> Planned | None:
        """Return a plan with tiles around ops above the budget; None if none fits. See `Segments.tile_around`."""
        segments, settings, budget = self.segments, self._settings, self._budget
        tiles, refusals = tuple[Tile, ...](), list[str]()
        self.tried = self._study
        for _ in range(captures):
            safe_point()
            next_tiles = _more_tiles(segments, self.tried, settings, budget, tiles, premium)
            if next_tiles == tiles:
                break
            _log.info("trying %d segments piece by piece", len(next_tiles))
            try:
                self.tried = self._captured(next_tiles)
                tiles = next_tiles
                return self.tried.planned(settings, budget)
            except NotTileable as reason:
                if not self._refuse(next_tiles, reason, refusals):
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

        In a U-Net, a level of the decoder reads what the encoder computed on that level. The decoder's tile computes it
        again, piece by piece, so that neither it nor its gradient is ever whole. The levels of the largest tensors come
        first, then further levels and more pieces. After a segment was refused, the levels are built anew without it.
        """
        segments, settings, budget = self.segments, self._settings, self._budget
        tiles, level_count, refusals = segments.with_next_level((), budget), 1, list[str]()
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
                for _ in range(level_count):
                    tiles = segments.with_next_level(tiles, budget)
                continue
            except RecordingError as reason:
                _log.info("the levels cannot run piece by piece: %s", reason)
                break
            except BudgetError as lower:
                self._note(lower)
            if budget < self.tried.least_peak(settings):
                break
            over = over_budget_ops_of(self.tried, settings, budget)
            finer, deeper = _finer(segments, tiles, over), segments.with_next_level(tiles, budget)
            finer_may_fit = all(op.level - budget <= op.scratch // 2 for op in over)  # with half of their scratch
            changes = (finer, deeper) if finer_may_fit else (deeper, finer)
            next_tiles = next((changed for changed in changes if changed != tiles), None)
            if next_tiles is None:
                break
            level_count += next_tiles is deeper
            tiles = next_tiles
        return None

    def in_less_time(self, planned: Planned) -> Planned:
        """Return the plan, or a faster one that lacks some of its tiles or has fewer pieces.

        Tiles are laid one after the other, each where the plan before was above the budget. A later one often makes an
        earlier one, or its many pieces, needless. Those that add the most time come first.
        """
        tiles, step_seconds = planned.plan.tiles, planned.plan.step_seconds or 0.0
        decisions = (decision for decision in planned.plan.decisions if decision.lever == TILE.name)
        added = {tile: decision.seconds for tile, decision in zip(tiles, decisions, strict=True)}
        costly = [tile for tile in tiles if added[tile] >= LEAST_ADDED * step_seconds]
        trials = TRIALS
        for tile in sorted(costly, key=lambda tile: -added[tile]):
            for instead in self._cheaper(tile, planned.plan):
                if not trials:
                    return planned
                trials -= 1
                faster = self._with_tiles(planned, tile, instead)
                if faster is not None:
                    planned = faster
                if (faster is None) == bool(instead):  # even half as many pieces are too few, or it was left out
                    break
                tile = instead[0] if instead else tile
        return planned

    def _cheaper(self, tile: Tile, plan: Plan) -> Iterator[tuple[Tile, ...]]:
        """Yield what may take the place of a tile of a plan, in less time: nothing, then half as many pieces, a quarter
        and so on, as long as their borders count."""
        others = [other for other in plan.tiles if other != tile]
        is_repeated = any(tile.first in other.repeats for other in others)
        transient = self._budget - sum(plan.resident.values())
        if others and not is_repeated and _largest_operands(self._study.captured.graph, tile) <= transient:
            yield ()
        repeats = repeated_ranges(tile, plan.tiles)
        segment = self.segments.segment(tile.first, tile.last, tile.axis, tile.pieces, repeats)
        while segment is not None and tile.pieces > 2:
            fewer = replace(tile, pieces=tile.pieces // 2)
            saved = segment.seconds(tile.pieces) - segment.seconds(fewer.pieces)
            if saved < LEAST_ADDED * (plan.step_seconds or 0.0):
                break
            yield (fewer,)
            tile = fewer

    def _with_tiles(self, planned: Planned, tile: Tile, instead: tuple[Tile, ...]) -> Planned | None:
        """Return the plan with other tiles in the place of one; None if it does not fit or is not faster."""
        tiles = [each for old in planned.plan.tiles for each in (instead if old == tile else (old,))]
        safe_point()
        change = f"in {instead[0].pieces} pieces" if instead else "as a whole"
        _log.info("trying the segment from call %d to %d %s", tile.first, tile.last, change)
        try:
            changed = self._captured(tiles).planned(self._settings, self._budget)
        except (BudgetError, NotTileable, RecordingError):
            return None
        return changed if changed.plan.seconds < planned.plan.seconds else None

    def _refuse(self, tiles: Sequence[Tile], reason: NotTileable, refusals: list[str]) -> bool:
        """Exclude the segment among ``tiles`` that cannot run piece by piece. Return whether another capture may
        succeed: the segment is known, and it was not the last of several that failed for the same reason.

        ``refusals``: earlier reasons, to which this one is added.
        """
        _log.info("a segment cannot run piece by piece: %s", reason)
        if reason.at is None:
            return False
        self.segments.refuse(tiles[reason.at], str(reason))
        refusals.append(str(reason))
        last_reasons = refusals[-ALIKE:]
        return len(last_reasons) < ALIKE or len(set(last_reasons)) > 1

    def _note(self, error: BudgetError) -> None:
        """Remember the error if its peak is the smallest so far."""
        self.error = min(self.error, error, key=lambda known: known.smallest_budget)


def _finer(segments: Segments, tiles: tuple[Tile, ...], over: Sequence[OverBudgetOp]) -> tuple[Tile, ...]:
    """Return the tiles with twice as many pieces where an op of a tile is in ``over`` and more pieces are possible."""
    over_budget = {tile for tile in tiles for op in over if op.is_tile and tile.first <= op.call <= tile.last}
    return tuple((segments.tile_in_more_pieces(tile, tiles) or tile) if tile in over_budget else tile for tile in tiles)


def _largest_operands(graph: JointGraph, tile: Tile) -> int:
    """Return the most bytes that an op in the range of a tile, or of its derivative, reads at once: about what the step
    without that tile holds at least, more than that where an op reads an encoding. Weights and inputs of the step do
    not count."""
    ops = [op for op in graph.ops if (call := graph.call_of(op)) is not None and tile.first <= call <= tile.last]
    operands = ({graph.base(value) for value in op.reads} for op in ops)
    return max(
        (sum(graph.values[v].bytes for v in bases if graph.values[v].kind not in RESIDENT) for bases in operands),
        default=0,
    )


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
    ``study`` is the step with ``tiles``; ``premium``: as for `Segments.tile_around`.
    """
    if budget < study.least_peak(settings):
        return tiles
    chosen, new_count = list(tiles), 0
    for op in over_budget_ops_of(study, settings, budget):
        index = next((index for index, tile in enumerate(chosen) if tile.first <= op.call <= tile.last), None)
        if index is not None and chosen[index] not in tiles:
            continue  # chosen for an op with a higher level
        if index is not None and op.is_tile:
            finer = _in_fewest_pieces(segments, chosen[index], op, budget)
            if op.level - op.scratch > budget:  # what is live beside a piece is too much already
                beside_piece = replace(op, level=op.level - op.scratch, scratch=0)
                wider = segments.tile_around(beside_piece, budget, chosen, premium) if new_count < AT_ONCE else None
                if wider is not None:
                    chosen, new_count = _in_place_of_contained(chosen, wider), new_count + 1
                    continue
            if finer is not None:
                chosen[index] = finer
                continue
        if new_count < AT_ONCE:
            around_op = segments.tile_around(op, budget, chosen, premium)
            if around_op is not None:
                chosen, new_count = _in_place_of_contained(chosen, around_op), new_count + 1
    return tuple(sorted(chosen, key=lambda tile: tile.first))


def _in_fewest_pieces(segments: Segments, tile: Tile, op: OverBudgetOp, budget: int) -> Tile | None:
    """Return the tile in more pieces, as many as its op may need to fit; None if no more are possible.

    The op's workspace falls with the size of a piece at most, so that fewer would only need another capture. Where it
    is not what exceeds the budget, the pieces are halved.
    """
    finer, beside_piece = segments.tile_in_more_pieces(tile), op.level - op.scratch
    while finer is not None and beside_piece <= budget < beside_piece + op.scratch * tile.pieces // finer.pieces:
        further = segments.tile_in_more_pieces(finer)
        if further is None:
            break
        finer = further
    return finer


def _in_place_of_contained(tiles: Sequence[Tile], wider: Tile) -> list[Tile]:
    """Return ``wider`` and those of the tiles that it does not contain."""
    return [*(tile for tile in tiles if not wider.first <= tile.first <= wider.last), wider]


def over_budget_ops_of(study: Study, settings: Settings, budget: int) -> list[OverBudgetOp]:
    """Return the ops that exceed the budget in the plan that comes nearest to it, the most live bytes first."""
    search = study.search(settings)
    nearest = schedule(search.graph, search.nearest(budget, STEEP).choices)
    return over_budget_ops(search.graph, nearest, search.outside_memory, budget)
