from __future__ import annotations

import pytest
import torch
from torch import nn
from truth.cpu_allocator import allocations, peak_of

from memplan.verification.measurement.peak_and_time import Meter, compare_times, measure_step, storage_bytes, timed

MIB = 1 << 20


def test_a_step_of_known_size() -> None:
    def step() -> torch.Tensor:
        kept = torch.empty(MIB // 4)
        passing = torch.empty(MIB // 2)
        del passing
        return kept

    kept: list[torch.Tensor] = []
    measured = measure_step(lambda: kept.append(step()))
    assert (measured.growth_peak, measured.growth_end) == (3 * MIB, MIB)


def test_memory_from_before_that_is_freed_is_not_seen() -> None:
    kept = [torch.empty(MIB)]

    def step() -> None:
        kept.clear()
        torch.empty(MIB // 4)

    assert measure_step(step).growth_peak == MIB


def test_memory_that_an_earlier_profile_saw_allocated_is_not_subtracted() -> None:
    """The profiler knows its size: garbage of an earlier step would make this one smaller than it is."""
    kept: list[torch.Tensor] = []
    measure_step(lambda: kept.append(torch.empty(MIB)))

    def step() -> None:
        kept.clear()
        torch.empty(MIB // 4)

    assert -4 * MIB in allocations(step)
    measure_step(lambda: kept.append(torch.empty(MIB)))
    assert measure_step(step).growth_peak == MIB


def test_a_training_step_as_the_allocator_counts_it() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(32, 64)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    def again() -> None:
        step()
        step()

    expected = peak_of(allocations(again))
    model.zero_grad()
    assert measure_step(again).growth_peak == expected
    assert expected > 2 * 32 * 256 * 4


def test_two_by_turns_are_counted_apart() -> None:
    held: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    with Meter() as meter:
        for size in (1, 2):
            for name, factor in (("a", 1), ("b", 10)):
                held[name].clear()  # outside: what a has made before ends for it, all the same
                torch.empty(100 * MIB)  # outside: counts for nobody
                with meter.counting(name):
                    held[name].append(torch.empty(size * factor * MIB // 4))
    assert meter.measured("a").growth_peak == 2 * MIB
    assert meter.measured("b").growth_peak == 20 * MIB
    assert meter.measured("b").growth_end == 20 * MIB


def test_what_one_allocates_and_the_other_frees_is_the_firsts() -> None:
    held: list[torch.Tensor] = []
    with Meter() as meter:
        with meter.counting("a"):
            held.append(torch.empty(MIB))
        with meter.counting("b"):
            held.clear()
            held.append(torch.empty(MIB // 4))
    a, b = meter.measured("a"), meter.measured("b")
    assert (a.growth_peak, a.growth_end) == (4 * MIB, 0)
    assert (b.growth_peak, b.growth_end) == (MIB, MIB)


def test_storages_are_counted_once() -> None:
    one, other = torch.empty(10), torch.empty(5, dtype=torch.uint8)
    assert storage_bytes([one, one[2:], one.view(2, 5), other]) == 45


def test_times_are_medians_of_the_ratios_of_pairs() -> None:
    first, second = iter([1.0, 2.0, 4.0, 1.0, 1.0]), iter([1.5, 2.0, 20.0, 1.0, 3.0])
    times = compare_times(lambda: next(first), lambda: next(second), pairs=5)
    # ratios 1.5, 1, 5, 1, 3
    assert (times.ratio, times.quartiles) == (1.5, (1.0, 3.0))
    assert (times.before, times.after, times.pairs) == (1.0, 2.0, 5)


def test_pairs_alternate_who_comes_first() -> None:
    order = []
    compare_times(lambda: order.append("a") or 1.0, lambda: order.append("b") or 1.0, pairs=3)
    assert "".join(order) == "abbaab"


def test_known_pairs_are_not_run_again() -> None:
    """Of three pairs two are known, with the ratios 2 and 4: the third has the ratio 3."""
    first, second = iter([5.0]), iter([15.0])
    times = compare_times(lambda: next(first), lambda: next(second), pairs=3, known=[(1.0, 2.0), (2.0, 8.0)])
    assert (times.pairs, times.ratio, times.before, times.after) == (3, 3.0, 2.0, 8.0)


def test_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [3.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def step() -> None:
        clock[0] += 0.25

    assert timed(step) == 0.25
