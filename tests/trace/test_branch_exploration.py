"""A branch that a value decides is recorded both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.records import loud


def branching(yes: Callable[[Tensor], Tensor], no: Callable[[Tensor], Tensor], really: float) -> Any:
    """A step that goes the first way where a value is above 0, which it is if ``really`` is."""

    def build() -> Callable[[], None]:
        net, x, decides = nn.Linear(64, 64), torch.randn(32, 64), torch.randn(1) + 10 * really

        def step() -> None:
            net.zero_grad()
            h = net(x)
            h = yes(h) if decides.item() > 1 else no(h)
            h.sum().backward()

        return step

    return build


def large(h: Tensor) -> Tensor:
    return torch.cat([h] * 20) * 2


def small(h: Tensor) -> Tensor:
    return h * 2


@pytest.mark.parametrize("ways", [(large, small), (small, large)])
def test_the_way_that_takes_more_is_shown_with_both_numbers(ways: tuple[Any, Any]) -> None:
    trace = memplan.record(branching(*ways, 0))
    peaks = [measured_peak(branching(*ways, really)) for really in (1, -1)]
    assert memplan.simulate(trace).peak_allocated == max(peaks)
    branch = trace.assumptions[0]
    assert (branch.kind, loud([branch])) == ("bound", [branch])
    assert branch.where
    assert "test_branch_exploration.py" in branch.where
    for peak in peaks:
        assert f"{peak / 1024:.1f} KiB" in branch.text


def test_where_it_makes_no_difference_it_is_a_note() -> None:
    trace = memplan.record(branching(small, lambda h: h * 3, 0))
    assert memplan.simulate(trace).peak_allocated == measured_peak(branching(small, small, 0))
    assert not [one for one in trace.assumptions if one.kind == "branch"]
    assert any("the same either way" in one.text for one in trace.assumptions)


@pytest.mark.parametrize("rounds", [1, 3])
def test_of_a_branch_in_a_loop_it_is_said_that_all_rounds_go_one_way(rounds: int) -> None:
    def build() -> Callable[[], None]:
        x, decides = torch.randn(32, 64), torch.rand(rounds)

        def step() -> None:
            for one in decides:
                large(x) if one > 0.5 else small(x)

        return step

    (said,) = (one for one in memplan.record(build).assumptions if one.kind in ("branch", "bound"))
    assert ("decided 3 times in a step, which are all taken to go the same way" in said.text) is (rounds == 3)
    assert said.kind == ("branch" if rounds == 3 else "bound")


def test_a_way_that_ends_in_an_exception_is_a_note() -> None:
    def refuse(h: Tensor) -> Tensor:
        raise ValueError("no such value")

    trace = memplan.record(branching(refuse, small, 0))
    assert memplan.simulate(trace).peak_allocated == measured_peak(branching(refuse, small, -1))
    assert not [one for one in trace.assumptions if one.kind == "branch"]


def test_a_loop_that_a_value_ends_is_not_followed_for_ever() -> None:
    def build() -> Callable[[], None]:
        x = torch.randn(64)

        def step() -> None:
            total = x.sum()
            while True:
                total = total + x.max()
                if total > 100:
                    break

        return step

    trace = memplan.record(build, steps=1)
    (loop,) = loud(trace.assumptions)
    assert "WHETHER A LOOP GOES ON" in loop.text
    assert len(trace.ops) < 100


def test_a_loop_that_values_may_end_and_a_length_does_is_followed_to_that_length() -> None:
    """As generation does: rows are done by a token of theirs, and all of them at the largest length."""

    def build(never_done: bool = False) -> Callable[[], None]:
        weight = torch.randn(512, 512)

        def step() -> None:
            unfinished, states, done = torch.ones(4, dtype=torch.long), [], False
            x = torch.randn(4, 512)
            while not done:
                x = x @ weight
                states.append(x)
                too_long = torch.full((4,), len(states) >= 6, dtype=torch.bool)
                unfinished = unfinished & ~(too_long | (x.argmax(-1) == (-1 if never_done else 3)))
                done = bool(unfinished.max() == 0)

        return step

    trace = memplan.record(build, steps=1)
    longest = measured_peak(lambda: build(never_done=True))
    assert memplan.simulate(trace).peak_allocated == pytest.approx(longest, rel=1e-3)
    assert "one way the step takes" in trace.assumptions[0].text


def test_more_branches_than_are_explored_are_reported() -> None:
    def build() -> Callable[[], None]:
        x = torch.randn(10)

        def step() -> None:
            if x[0] > 0:
                pass
            if x[1] > 0:
                pass
            if x[2] > 0:
                pass
            if x[3] > 0:
                pass
            if x[4] > 0:
                pass
            if x[5] > 0:
                pass
            if x[6] > 0:
                pass
            if x[7] > 0:
                pass
            if x[8] > 0:
                pass
            if x[9] > 0:
                pass

        return step

    kinds = [one.kind for one in memplan.record(build).assumptions if "branch" in one.text.lower()]
    assert sorted(kinds) == [*["branch"] * 2, *["scalar"] * 8]


Body = Callable[[Tensor, Any], Tensor]


def by_number(body: Body, count: int, only: int | None = None) -> Any:
    """A step of a number that is drawn, from 0 to ``count``; ``only``: which it really is."""

    def build() -> Callable[[], None]:
        x, low, high = torch.ones(32, 64, requires_grad=True), only or 0, count if only is None else only + 1

        def step() -> None:
            body(x, torch.randint(low, high, ()).item()).relu().sum().backward()
            x.grad = None

        return step

    return build


def peaks_of(body: Body, count: int) -> list[int]:
    """What is measured of each number."""
    return [measured_peak(by_number(body, count, only)) for only in range(count)]


def elif_large(x: Tensor, number: int) -> Tensor:
    if number == 0:
        repeats = 2
    elif number == 1:
        repeats = 400
    else:
        repeats = 1
    return x.repeat(1, repeats) * 2


def elif_small(x: Tensor, number: int) -> Tensor:
    if number == 0:
        repeats = 1
    elif number == 1:
        repeats = 400
    else:
        repeats = 2
    return x.repeat(1, repeats) * 2


def match_large(x: Tensor, number: int) -> Tensor:
    match number:
        case 0:
            repeats = 2
        case 1:
            repeats = 400
        case _:
            repeats = 1
    return x.repeat(1, repeats) * 2


def elif_of_many(x: Tensor, number: int) -> Tensor:
    if number == 0:
        repeats = 2
    elif number == 1:
        repeats = 1
    elif number == 2:
        repeats = 2
    elif number == 3:
        repeats = 1
    elif number == 4:
        repeats = 400
    else:
        repeats = 1
    return x.repeat(1, repeats) * 2


@pytest.mark.parametrize("body", [elif_large, elif_small, match_large])
def test_a_branch_that_another_one_leaves_out_is_bounded(body: Body) -> None:
    trace, peaks = memplan.record(by_number(body, 3)), peaks_of(body, 3)
    assert memplan.simulate(trace).peak_allocated == max(peaks)
    shown = [one.text for one in trace.assumptions if one.kind == "bound"]
    assert any(f"{max(peaks) / 2**20:.1f} MiB" in one for one in shown)


def test_a_chain_of_branches_is_bounded_by_each_number() -> None:
    trace, peaks = memplan.record(by_number(elif_of_many, 6)), peaks_of(elif_of_many, 6)
    assert memplan.simulate(trace).peak_allocated == max(peaks)


def test_a_branch_that_is_no_longer_reached_is_not_the_same_either_way() -> None:
    """What decides is there in the first recording only."""
    built = list[int]()

    def build() -> Callable[[], None]:
        built.append(0)
        x, decides, times = torch.randn(32, 64), torch.rand(1), len(built)

        def step() -> None:
            if times == 1 and decides.item() > 0.5:
                small(x)

        return step

    trace = memplan.record(build)
    assert not any("the same either way" in one.text for one in trace.assumptions)
    assert any("IS NOT BOUNDED" in one.text for one in trace.assumptions if one.kind == "branch")
