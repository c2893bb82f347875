"""The largest batch on each card is that of a search for each card alone, and a shared recording that of each card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import memplan
from memplan.devices import Device, catalogue, find
from memplan.errors import InputError, StepError
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.on_cards import OnCards, largest_on_cards, step_on_cards, tried_values
from memplan.trace.recording.session import Target, choose_target
from memplan.trace.step import StepOptions

CARDS = [find(name) for name in ("t4", "rtx4060", "rtx4090", "a100-40gb", "a100-80gb", "h100")]
Step = Callable[[], object]


def target_of(card: Device) -> Target:
    return choose_target(card.name, cudnn=False)


def build(batch: int = 1) -> Step:
    weight = torch.zeros(1 << 28, device="cuda", requires_grad=True)

    def step() -> None:
        (weight[: 1 << 20] * torch.zeros(batch, 1 << 20, device="cuda")).square().sum().backward()
        weight.grad = None

    return step


def huge(batch: int = 1) -> Step:
    weight = torch.zeros(batch << 32, device="cuda")
    return lambda: weight.add_(1)


def of(step: Callable[..., Step]) -> Subject:
    return Subject(step, StepOptions())


def test_tried_values_are_powers_of_two_three_between_and_the_last() -> None:
    assert tried_values("batch", 11) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert tried_values("sequence", 400) == [128, 160, 192, 224, 256, 320, 384, 400]
    assert tried_values("sequence", 100) == [100]


def test_each_card_has_the_answer_of_its_own_search() -> None:
    found = largest_on_cards(of(build), "batch", CARDS, target_of)
    values = tried_values("batch")
    assert [row.name for row in found.rows] == ["rtx4060", "t4", "rtx4090", "a100-40gb", "a100-80gb", "h100"]
    assert found.recordings < 8 * len(CARDS)
    for row in found.rows:
        most = memplan.largest(build, "batch", device=row.name, cudnn=False)
        assert row.value == max(value for value in values if value <= most)
        assert row.end == min(value for value in values if value > most)
        assert row.value is not None
        trace = memplan.record(partial(build, row.value), device=row.name, cudnn=False)
        assert row.peak == memplan.simulate(trace).peak_allocated
    assert OnCards.from_json(found.to_json()) == found


def test_a_card_on_which_nothing_fits_and_values_that_all_fit() -> None:
    cards = [find("rtx4060"), find("b200")]
    found = largest_on_cards(of(build), "batch", cards, target_of, most=4)
    assert [(row.value, row.end) for row in found.rows] == [(4, None), (4, None)]
    found = largest_on_cards(of(huge), "batch", cards, target_of)
    assert [(row.value, row.end, row.peak) for row in found.rows] == [(0, None, 16 << 30), (10, 12, 160 << 30)]


def test_a_step_on_all_cards_has_the_figures_of_a_recording_for_each() -> None:
    found = step_on_cards(of(lambda: build(64)), catalogue(), target_of)
    assert [row.name for row in found.rows] == [card.name for card in catalogue()]
    for row in found.rows:
        use = memplan.explain(lambda: build(64), device=row.name, cudnn=False).card
        assert use is not None
        assert (row.need, row.fits) == (use.verdict.high, use.verdict.answer == "fits")
    assert found.recordings < len(catalogue())


def test_values_from_one_on_that_cannot_be_recorded_end_the_search() -> None:
    def up_to_five(batch: int = 1) -> Step:
        if batch > 5:
            raise ValueError("six is too much")
        return build(batch)

    found = largest_on_cards(of(up_to_five), "batch", CARDS, target_of)
    assert {(row.value, row.end, row.end_peak) for row in found.rows} == {(5, 6, None)}
    assert "six is too much" in found.failed


def test_what_has_no_such_axis_or_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(InputError, match="Expected batch or sequence"):
        largest_on_cards(of(build), "size", CARDS, target_of)

    def broken(batch: int = 1) -> Step:
        raise ValueError("no data")

    with pytest.raises(StepError, match="no data"):
        largest_on_cards(of(broken), "batch", CARDS, target_of)
