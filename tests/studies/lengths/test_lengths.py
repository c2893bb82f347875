"""What is said of a sequence of batches is what its trace takes, one allocator event after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.decoders import Decoder

from memplan.errors import InputError
from memplan.reports import terminal
from memplan.reports.lengths import report
from memplan.studies.axes.axes import Length
from memplan.studies.axes.subject import Subject
from memplan.studies.lengths import lengths as study
from memplan.studies.lengths.distribution import draw
from memplan.studies.lengths.lengths import Lengths, lengths_of
from memplan.trace.record import record_for
from memplan.trace.recording.session import Target, choose_target
from memplan.trace.step import StepOptions

SHARES = {64: 0.5, 128: 0.4, 250: 0.1}
OPTIONS = StepOptions(inputs=("4x32:int64<257",), optimizer="adamw")


def subject() -> Subject:
    return Subject(Decoder, OPTIONS.checked())


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "BATCHES", 40)
    monkeypatch.setattr(study, "COMPARED", 30)
    monkeypatch.setattr(study, "EPOCH", 10)
    monkeypatch.setattr(study, "_MOMENTS", (1, 10))


def alone(length: int, device: str) -> int:
    from memplan.simulation.simulate import simulate

    step = Length().at(subject(), length)
    return simulate(record_for(step.build(on_card=device != "cpu"), choose_target(device))).peak_allocated


def test_the_worst_batch_is_the_first_of_the_longest() -> None:
    result = lengths_of(subject(), SHARES, choose_target("h100"))
    order = draw(SHARES, 40, seed=0)
    assert (result.worst_length, order[result.worst_batch - 1]) == (250, 250)
    assert {one.length: one.batches for one in result.lengths} == {length: order.count(length) for length in SHARES}
    assert [one.allocated for one in result.lengths] == [alone(length, "h100") for length in SHARES]
    assert result.allocated >= alone(250, "h100")
    assert result.reserved >= result.allocated
    assert list(dict(result.moments).values()) == sorted(dict(result.moments).values())
    assert all(change.fits for change in result.changes)
    assert result.ran_out == 0
    by_change = {change.change: change for change in result.changes}
    assert by_change["expandable"].reserved < by_change["as drawn"].reserved
    assert Lengths.from_json(result.to_json()) == result


def test_on_the_cpu_there_is_nothing_reserved_beside() -> None:
    result = lengths_of(subject(), SHARES, choose_target("cpu"))
    assert result.reserved == result.allocated
    assert (result.capacity, result.epochs) == (None, 0)
    assert "reserved" not in terminal.text_of(report(result))


def card_of(extra: int, needed: int) -> Target:
    """A card with ``extra`` bytes beyond its context and what a step needs."""
    target = choose_target("h100")
    assert target.card is not None
    everything = lengths_of(subject(), {64: 1.0}, target)
    assert everything.capacity is not None
    context = target.card.capacity - everything.capacity
    return replace(target, card=replace(target.card, capacity=context + needed + extra))


@pytest.mark.slow
def test_epochs_run_out_where_the_longest_does_not_fit() -> None:
    needed = alone(128, "h100")
    small = lengths_of(subject(), SHARES, card_of(8 << 20, needed))
    drawn = [draw(SHARES, 10, seed) for seed in range(1, study.EPOCHS + 1)]
    assert small.ran_out == sum(250 in order for order in drawn) > 0
    assert not any(change.fits for change in small.changes)
    text = terminal.text_of(report(small))
    assert f"{small.ran_out} of 20 epochs of 10 batches run out of the card's" in text
    assert "runs out" in text


def test_many_lengths_are_interpolated_and_checked() -> None:
    shares = dict.fromkeys(range(100, 300, 5), 1 / 40)
    result = lengths_of(subject(), shares, choose_target("h100"))
    between = [one for one in result.lengths if not one.recorded]
    assert len(between) >= 30
    for one in between[5::15]:
        assert one.allocated == pytest.approx(alone(one.length, "h100"), rel=0.001)
    assert result.checked is not None
    assert abs(result.off) < 0.001
    assert result.larger == 0
    assert f"at {result.checked}, recorded as a check" in " ".join(terminal.text_of(report(result)).split())


def test_a_step_without_such_an_axis_is_refused() -> None:
    from torch import nn

    step = Subject(lambda: nn.Linear(4, 4), StepOptions(inputs=("8x4",)).checked())
    with pytest.raises(InputError, match="has neither a sequence nor an image"):
        lengths_of(step, SHARES, choose_target("cpu"))


@pytest.mark.slow
def test_images_of_several_sizes_are_an_axis_too() -> None:
    from torch import nn

    step = Subject(lambda: nn.Conv2d(3, 4, 3), StepOptions(inputs=("2x3x32x32",)).checked())
    result = lengths_of(step, {32: 0.5, 64: 0.5}, choose_target("cpu"))
    assert (result.axis, result.worst_length) == ("size", 64)
