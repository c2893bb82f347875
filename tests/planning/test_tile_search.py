"""Tiles are added until a step fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.skip_levels import Levels
from tests.truth.cpu_allocator import allocations, peak_of
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import BudgetError
from memplan.planning import tile_search
from memplan.planning.capture.flat_call import call_of
from memplan.planning.planner import Planner
from memplan.planning.segments import OverBudgetOp, Segments
from memplan.planning.settings import Settings
from memplan.planning.study import Planned, Study
from memplan.planning.tile_search import over_budget_ops_of, planned_in_tiles
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Axis, Tile

STEP = {"loss": F.cross_entropy, "costs": "roofline", "allow": "reordered"}


def network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return two stages of convolutions that both exceed small budgets, and a batch."""
    torch.manual_seed(0)
    stage = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), *stage, nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return model, torch.randn(8, 3, 32, 32), torch.arange(8) % 4


@pytest.mark.slow
def test_a_smaller_budget_has_more_tiles_or_pieces_until_none_helps() -> None:
    """Every plan keeps its budget; the smallest that an error names has a plan."""
    model, images, labels = network()
    with pytest.raises(BudgetError) as exact:
        memplan.plan(model, images, targets=labels, budget=1, loss=F.cross_entropy, costs="roofline")
    floor, before = exact.value.smallest_budget, 0
    for share in (1.0, 0.85, 0.7):
        plan = memplan.plan(model, images, targets=labels, budget=int(share * floor), **STEP)
        assert plan.peak <= share * floor
        pieces = sum(tile.pieces for tile in plan.tiles)
        assert (pieces == 0) == (share == 1.0)
        assert pieces >= before
        before = pieces
    with pytest.raises(BudgetError) as caught:
        memplan.plan(model, images, targets=labels, budget=int(0.2 * floor), **STEP)
    smallest = caught.value.smallest_budget
    assert smallest <= floor


class Asking(nn.Module):
    """Two stages that exceed small budgets, of which the first asks whether its result needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AvgPool2d(4))
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.first[1](self.first[0](x))
        return self.last(self.second(torch.relu(x) if x.requires_grad else x))


@pytest.mark.slow
def test_a_segment_that_the_trace_refuses_is_left_out_and_named() -> None:
    """The other stage still runs piece by piece."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    with pytest.raises(BudgetError) as exact:
        memplan.plan(Asking(), images, targets=labels, budget=1, loss=F.cross_entropy, costs="roofline")
    with pytest.raises(BudgetError, match=r"first\.[01]: requires_grad of a tensor of the segment") as caught:
        memplan.plan(Asking(), images, targets=labels, budget=int(0.5 * exact.value.smallest_budget), **STEP)
    assert caught.value.smallest_budget < exact.value.smallest_budget


def test_what_is_live_between_the_passes_is_in_no_piece(caplog: pytest.LogCaptureFixture) -> None:
    """With the loss outside: weights, input, scores and their gradient. No segment is tried for less than these."""
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 4, 3)), torch.randn(8, 3, 36, 36)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    between = weights + x.numel() * 4 + 2 * (8 * 4 * 32 * 32) * 4
    with caplog.at_level("INFO", logger="memplan"), pytest.raises(BudgetError) as caught:
        memplan.plan(model, x, budget=between - 1, allow="reordered", costs="roofline")
    assert caught.value.smallest_budget >= between
    assert "piece by piece" not in caplog.text
    with caplog.at_level("INFO", logger="memplan"):
        plan = memplan.plan(model, x, budget=caught.value.smallest_budget - 1, allow="reordered", costs="roofline")
    assert between <= plan.peak < caught.value.smallest_budget
    assert "piece by piece" in caplog.text


class UNet(nn.Module):
    """A U-Net of two levels, the outer of which takes most of the memory. ``turned``: so is the inner level, which can
    then be in no segment."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Softplus())
        self.inner, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, 2)
        self.join = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Softplus())
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of each pixel."""
        first = self.down(x)
        second = F.softplus(self.inner(F.avg_pool2d(first, 2)))
        second = second.flip(2, 3) if self.turned else second
        return self.head(self.join(torch.cat((first, self.up(second)), 1)))


@pytest.mark.parametrize("piece_share", [0.0, 1.0])
def test_a_tile_is_laid_wider_where_more_pieces_cannot_help(
    piece_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is live beside a piece is too much where the piece takes nothing; where it takes all, more pieces may do."""
    study = Planner(UNet()).study(call_of((torch.randn(1, 1, 64, 64),), {}), settings := Settings(costs="roofline"))
    budget = int(0.7 * study.search(settings).floor().peak)
    segments = Segments(study.captured.graph, study.captured.in_place_calls)
    over = next(
        op for op in over_budget_ops_of(study, settings, budget)
        if op.in_backward and segments.segment(op.call, op.call, Axis(2), 2) is not None
    )  # fmt: skip
    narrow = Tile(over.call, over.call, Axis(2), 2)
    in_tile = replace(over, is_tile=True, scratch=int(piece_share * over.level))
    monkeypatch.setattr(tile_search, "over_budget_ops_of", lambda *of: [in_tile])
    (changed,) = tile_search._more_tiles(segments, study, settings, budget, (narrow,), 2.0)
    if piece_share:
        assert changed == replace(narrow, pieces=4)
    else:
        assert (changed.first, changed.last) != (narrow.first, narrow.last)
        assert changed.first <= narrow.first <= narrow.last <= changed.last


def test_a_tile_around_an_op_with_its_scratch_is_laid_where_none_lowers_the_rest() -> None:
    """Of 100 bytes, 30 are a piece's, and 60 are the budget. No segment lowers the other 70, none can have more pieces;
    one lowers the whole."""
    over = OverBudgetOp(call=4, level=100, live=(), scratch=30, in_backward=True, is_tile=True)
    narrow, wide = Tile(4, 4, Axis(2), 2), Tile(3, 5, Axis(2), 2)
    asked = list[int]()

    def tile_around(op: OverBudgetOp, *_: Any) -> Tile | None:
        asked.append(op.level)
        return wide if op.level == 100 and op.scratch == 30 else None

    segments: Any = SimpleNamespace(tile_around=tile_around, tile_in_more_pieces=lambda tile: None)
    study: Any = SimpleNamespace(least_peak=lambda settings: 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_search, "over_budget_ops_of", lambda *of: [over])
        assert tile_search._more_tiles(segments, study, Settings(), 60, (narrow,), 2.0) == (wide,)
    assert asked == [70, 100]


@pytest.mark.parametrize(("budget_share", "count"), [(1.05, 2), (1.3, 1)])
def test_of_some_tiles_those_stay_that_the_budget_needs(budget_share: float, count: int) -> None:
    """The plan is the fastest of those that fit among all subsets of three segments. Budgets are shares of the smallest
    peak with all three."""
    model, images, _ = network()
    planner, call, settings = Planner(model), call_of((images,), {}), Settings(costs="roofline", allow="reordered")
    study, by_samples = planner.study(call, settings), Axis(0, samples=8)
    tiles = Tile(0, 5, by_samples, 8), Tile(6, 9, by_samples, 4), Tile(10, 11, by_samples, 4)
    by_subset = {
        subset: planner._rewritten(study, call, settings, subset)
        for size in range(1, 4) for subset in combinations(tiles, size)
    }  # fmt: skip
    budget = int(by_subset[tiles].search(settings).floor().peak * budget_share)
    fitting = dict[tuple[Tile, ...], Planned]()
    for subset, study_in_tiles in by_subset.items():
        with suppress(BudgetError):
            fitting[subset] = study_in_tiles.planned(settings, budget)
    fastest = min(fitting.values(), key=lambda planned: planned.plan.seconds)
    assert len(fastest.plan.tiles) == count
    with pytest.raises(BudgetError) as without_tiles:
        study.planned(settings, budget)
    tried = list[tuple[Tile, ...]]()

    def captured(chosen: Sequence[Tile]) -> Study:
        """Return the study of a subset."""
        tried.append(tuple(chosen))
        return by_subset[tried[-1]]

    search = tile_search._TileSearch(study, settings, budget, captured, without_tiles.value)
    assert search.in_less_time(fitting[tiles]).plan.tiles == fastest.plan.tiles
    assert all(tiles[0] in subset for subset in tried)  # an op of it reads more at once than the budget


@pytest.mark.parametrize("needed", [2, 4])
def test_pieces_are_as_few_as_the_budget_allows(needed: int) -> None:
    """Borders of three convolutions cost time: of 16, 8, 4 and 2 pieces, the fewest that fit are the fastest."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 5, padding=2), nn.ReLU())]
    planner, call = Planner(nn.Sequential(*layers, nn.AvgPool2d(2))), call_of((torch.randn(1, 4, 256, 64),), {})
    study = planner.study(call, settings := Settings(costs="roofline", allow="reordered"))
    by_pieces = {
        pieces: planner._rewritten(study, call, settings, [Tile(0, 6, Axis(2), pieces)]) for pieces in (16, 8, 4, 2)
    }
    floors = {pieces: study_in_tiles.search(settings).floor().peak for pieces, study_in_tiles in by_pieces.items()}
    assert floors[16] < floors[8] < floors[4] < floors[2]
    budget = floors[needed]
    with pytest.raises(BudgetError) as without_tiles:
        study.planned(settings, budget)
    fitting = {pieces: by_pieces[pieces].planned(settings, budget) for pieces in by_pieces if floors[pieces] <= budget}
    assert min(fitting, key=lambda pieces: fitting[pieces].plan.seconds) == needed

    def captured(chosen: Sequence[Tile]) -> Study:
        """Return the study of a number of pieces; a whole segment is not asked for."""
        (tile,) = chosen
        return by_pieces[tile.pieces]

    search = tile_search._TileSearch(study, settings, budget, captured, without_tiles.value)
    (tile,) = search.in_less_time(fitting[16]).plan.tiles
    assert tile.pieces == needed


@pytest.mark.parametrize(("scratch", "budget", "pieces"), [(80, 60, 8), (80, 40, 16), (80, 19, 8), (80, 21, 64)])
def test_a_tile_has_as_many_pieces_as_its_workspace_may_need(scratch: int, budget: int, pieces: int) -> None:
    """Of 100 bytes, 80 are those of one of four pieces. By hand: 20 and half of 80 are 60, 20 and a quarter are 40; for
    21 bytes the pieces are the most that are possible. The 20 fit no budget of 19, however many pieces there are."""
    over = OverBudgetOp(call=4, level=100, live=(), scratch=scratch, in_backward=True, is_tile=True)

    def doubled(tile: Tile) -> Tile | None:
        return replace(tile, pieces=2 * tile.pieces) if tile.pieces < 64 else None

    segments: Any = SimpleNamespace(tile_in_more_pieces=doubled)
    finer = tile_search._in_fewest_pieces(segments, Tile(4, 4, Axis(2), 4), over, budget)
    assert finer == Tile(4, 4, Axis(2), pieces)
    assert tile_search._in_fewest_pieces(segments, Tile(4, 4, Axis(2), 64), over, budget) is None


def in_tiles(captured: Callable[[Sequence[Tile]], Any]) -> Planned:
    """Search tiles of a U-Net for less than half of the floor without. ``captured``: as for `planned_in_tiles`."""
    study = Planner(Levels()).study(call_of((torch.randn(1, 1, 64, 64),), {}), settings := Settings(costs="roofline"))
    budget = int(0.45 * study.search(settings).floor().peak)
    with pytest.raises(BudgetError) as exact:
        study.planned(settings, budget)
    return planned_in_tiles(study, settings, budget, captured, exact.value)


def test_levels_go_on_without_a_segment_that_the_trace_refuses() -> None:
    """The error names it, and why."""
    tried: list[Sequence[Tile]] = []

    def captured(tiles: Sequence[Tile]) -> Any:
        tried.append(tiles)
        reason = NotTileable("it is refused" if len(tried) == 1 else "another reason, of no segment")
        reason.at = 1 if len(tried) == 1 else None
        raise reason

    with pytest.raises(BudgetError, match=r"up\.0: it is refused"):
        in_tiles(captured)
    first, second = tried[:2]
    assert first[1].repeats == second[1].repeats == (first[0].first,)
    assert (first[0], first[1].first) == (second[0], second[1].first)
    assert second[1].last < first[1].last


@pytest.mark.parametrize(("by_levels", "around_ops"), [(1.0, 2.0), (2.0, 1.0)])
def test_levels_are_taken_unless_segments_around_ops_are_faster(by_levels: float, around_ops: float) -> None:
    """Seconds as given; whatever is tried fits."""

    def captured(tiles: Sequence[Tile]) -> Any:
        seconds = by_levels if any(tile.repeats for tile in tiles) else around_ops
        plan = SimpleNamespace(seconds=seconds, step_seconds=1.0, tiles=(), decisions=())
        return SimpleNamespace(planned=lambda *of: SimpleNamespace(plan=plan))

    assert in_tiles(captured).plan.seconds == 1


@pytest.mark.slow
def test_the_outer_level_of_a_u_net_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of two of its tensors, where its skip, the gradient of that and a piece would take more. The allocator's
    peak keeps it, and gradients are held against float64 by the proof. Segments around ops, which are faster here, are
    not tried."""
    monkeypatch.setattr(tile_search, "FEW", 0)
    torch.manual_seed(0)
    model, images, classes = UNet(turned=True), torch.randn(1, 1, 256, 256), torch.randint(2, (1, 256, 256))
    level = 16 * 256 * 256 * 4
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    budget = 2 * level + 2 * weights + images.numel() * 4 + classes.numel() * 8
    fitted = memplan.fit(model, images, targets=classes, budget=budget, loss=F.cross_entropy, allow="reordered")
    assert any(tile.repeats for tile in fitted.plan.tiles)
    assert fitted.proof.ok
    assert fitted.loss is not None
    loss = fitted.loss

    def step() -> None:
        model.zero_grad()
        loss(images, classes).backward()

    step()
    model.zero_grad()
    there = weights + images.numel() * 4 + classes.numel() * 8
    assert there + peak_of(allocations(step)) <= budget * 1.001
    fitted.undo()
