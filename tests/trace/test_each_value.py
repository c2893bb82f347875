"""A number that is read is recorded as what else it can be; of one that is only logged nothing is said."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import steps_by_reads
import torch
import torch.nn.functional as F
from allocator import measured_peak
from torch import Tensor, nn

import memplan
SAME = 1.01
from memplan.trace.records import loud

MANY = 12
Body = Callable[[Any], Any]
WIDTHS = (1, 4, 2, 60, 1, 2, 3, 3, 2, 1, 1, 2)


def by_number(body: Body, low: float, high: float) -> Callable[[], Callable[[], None]]:
    """A step of a number that is drawn, a whole one if its ends are; ends that differ by one draw the first."""

    def build() -> Callable[[], None]:
        def step() -> None:
            whole = isinstance(low, int) and isinstance(high, int)
            body((torch.randint(int(low), int(high), ()) if whole else torch.rand(()) * (high - low) + low).item())

        return step

    return build


def listed() -> list[Tensor]:
    return [torch.ones(16, 256) for _ in range(MANY)]


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.ones(1)


def shortened(cut: Callable[[list[Tensor], Any], Any]) -> Body:
    def body(number: Any) -> None:
        parts = listed()
        cut(parts, number)
        joined(parts)

    return body


def delete(parts: list[Tensor], number: int) -> None:
    del parts[:number]


def picked(table: Any, number: Any) -> Any:
    return table[number]


def kept(number: Any) -> Any:
    return repeated(picked((1, *WIDTHS), SimpleNamespace(number=number + 1).number))


def compared(number: Any) -> Any:
    """The comparison shows; that the number is then an index does not."""
    return repeated(picked(WIDTHS, number)) if number > -1 else None


def halved(times: Any) -> Tensor:
    x = torch.ones(64, 4096)
    for _ in range(times):
        x = x[:, ::2].clone()
    return torch.cat([x, x, x])


def counted_down(number: Any) -> Tensor:
    rest = MANY
    while rest > number:
        rest -= 1
    return torch.ones(16, 100 * (MANY - rest) + 1) * 2


def taken_next(number: Any) -> Tensor:
    parts = iter([torch.ones(16, 100 * (5 - abs(part - 4)) + 400) for part in range(MANY)])
    x = next(parts)
    for _ in range(number):
        x = next(parts)
    return x * 2


def repeated(times: Any) -> Tensor:
    return torch.ones(16, 64).repeat(1, times) * 2


def scaled(factor: Any) -> Tensor:
    return F.interpolate(torch.ones(1, 4, 64, 64), scale_factor=factor)


EXACT: dict[str, Body] = {
    "deleted until": shortened(lambda parts, n: parts.__delitem__(slice(0, n))),
    "deleted until, in a function": shortened(delete),
    "deleted from": shortened(lambda parts, n: parts.__delitem__(slice(n, None))),
    "popped": lambda n: repeated(list(WIDTHS).pop(n)),
    "a list until": lambda n: joined(listed()[:n]),
    "a list from": lambda n: joined(listed()[n:]),
    "a list from behind": shortened(lambda parts, n: parts.__setitem__(slice(None), parts[-n:])),
    "next": taken_next,
    "islice": lambda n: next(itertools.islice((torch.ones(16, 100 * (MANY - k)) for k in range(MANY)), n, None)) * 2,
    "a loop down": counted_down,
    "a loop that halves": halved,
    "one and more": kept,
    "compared, too": compared,
    "below a float": lambda n: scaled(1.0 / (1 + n)),
    "a power": lambda n: scaled(2**-n) if n < 6 else None,
    "a power of a float": lambda n: scaled(2.0**-n) if n < 6 else None,
    "exp": lambda n: scaled(math.exp(-n / 4)),
    "a whole part": lambda n: torch.ones(64, int(256 / (1 + n))) * 2,
    "a pole": lambda n: torch.ones(64, int(abs(640 / (n - 5.5)))) * 2,
    "a sine": lambda n: torch.ones(64, 1 + int(100 * abs(math.sin(n)))) * 2,
    "functions": lambda n: picked([lambda x, w=w: x.repeat(1, w) * 2 for w in WIDTHS], n)(torch.ones(16, 64)),
    "modules": lambda n: picked(nn.ModuleList([nn.Linear(9, 99 * w) for w in WIDTHS]), n)(torch.ones(500, 9)),
    "a dictionary": lambda n: repeated(dict(enumerate(WIDTHS))[n]),
    "a default": lambda n: repeated({3: 60}.get(n, 1)),
    "found in a list": lambda n: repeated(60 if n in [3, 4] else 1),
}  # fmt: skip
LOGGED: dict[str, Body] = {
    "printed": lambda n: print(n),
    "a text": lambda n: f"{n}/12, {n / 12:.2f}",
    "a percentage": lambda n: "%.1f" % (100.0 * n / MANY),
    "in a list": lambda n: [].append(n),
    "in a dictionary": lambda n: {"correct": n},
    "a sum": lambda n: [sum([n, n, n]) / 3, n + 3],
    "a best": lambda n: max(n, 5),
    "rounded": lambda n: round(n / 7, 3),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_few_numbers_decide_is_the_largest_measured(name: str) -> None:
    trace = memplan.record(by_number(EXACT[name], 0, MANY))
    peaks = [measured_peak(by_number(EXACT[name], one, one + 1)) for one in range(MANY)]
    assert max(peaks) > SAME * min(peaks)
    assert memplan.simulate(trace).peak_allocated == max(peaks)
    assert loud(trace.assumptions)
    assert not any("IS NOT BOUNDED" in one.text for one in trace.assumptions)


@pytest.mark.parametrize("name", ["deleted until", "a list from", "a list until", "a loop down", "below a float"])
def test_what_many_numbers_decide_is_bounded_at_both_ends(name: str) -> None:
    trace = memplan.record(by_number(EXACT[name], 0, 50))
    peaks = [measured_peak(by_number(EXACT[name], one, one + 1)) for one in (0, 1, 5, 11, 30, 49)]
    assert memplan.simulate(trace).peak_allocated >= max(peaks)
    assert loud(trace.assumptions)


def test_of_a_table_of_many_it_is_said_that_the_rest_is_not_bounded() -> None:
    body = lambda n: repeated(picked(list(range(1, 101)), n))  # noqa: E731
    told = [one for one in memplan.record(by_number(body, 0, 100)).assumptions if "IS NOT BOUNDED" in one.text]
    assert loud(told)
    assert "from 0 to 99" in told[0].text
    assert "test_each_value.py" in (told[0].where or "")


@pytest.mark.parametrize("high", [MANY, 100, 1.0])
@pytest.mark.parametrize("name", LOGGED)
def test_of_what_is_only_logged_nothing_is_said(name: str, high: float) -> None:
    build = by_number(lambda n: (torch.ones(64, 64) * 2, LOGGED[name](n)), 0 if isinstance(high, int) else 0.0, high)
    trace = memplan.record(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build)
    assert not loud(trace.assumptions)


@pytest.mark.parametrize("name", ["a whole part", "below a float", "a power of a float", "exp"])
def test_floats_are_bounded_at_both_ends(name: str) -> None:
    trace = memplan.record(by_number(EXACT[name], 0.0, 3.0))
    peaks = [measured_peak(by_number(EXACT[name], one, one)) for one in (0.0, 0.3, 1.5, 2.9)]
    assert memplan.simulate(trace).peak_allocated == max(peaks)
    assert loud(trace.assumptions)


def holds(build: Callable[[], Any], times: int, *, or_told: bool = False) -> None:
    """Whatever is drawn, the prediction is at least the measured peak, or it is said that it may not be."""
    trace = memplan.record(build)
    predicted = memplan.simulate(trace).peak_allocated
    told = any("IS NOT BOUNDED" in one.text for one in loud(trace.assumptions))
    for seed in range(times):
        torch.manual_seed(seed)
        assert measured_peak(build) <= predicted or (or_told and told), seed


@pytest.mark.parametrize("build", steps_by_reads.STEPS, ids=lambda one: one.__name__)
def test_a_step_that_reads_numbers_is_bounded(build: Callable[[], Any]) -> None:
    holds(build, 3)


@pytest.mark.slow
@pytest.mark.parametrize("build", steps_by_reads.STEPS, ids=lambda one: one.__name__)
def test_twenty_draws_of_each_step(build: Callable[[], Any]) -> None:
    holds(build, 20)


@pytest.mark.parametrize("build", steps_by_reads.IN_A_LOOP, ids=lambda one: one.__name__)
def test_of_a_table_in_a_loop_it_is_said_that_other_orders_are_not_bounded(build: Callable[[], Any]) -> None:
    holds(build, 10, or_told=True)


def test_a_count_that_is_logged_summed_and_kept_is_quiet() -> None:
    trace = memplan.record(steps_by_reads.logging_only)
    assert memplan.simulate(trace).peak_allocated == measured_peak(steps_by_reads.logging_only)
    assert not loud(trace.assumptions)


def test_recordings_are_bounded() -> None:
    """Five readings of sixteen values each: four are recorded one by one, of the fifth it is said that it was not."""
    built = list[int]()

    def build() -> Callable[[], None]:
        built.append(0)
        drawn = torch.randint(0, 16, (5,))

        def step() -> None:
            sizes = [picked(range(1, 17), drawn[0].item()), picked(range(1, 17), drawn[1].item())]
            sizes += [picked(range(1, 17), drawn[2].item())]
            sizes += [picked(range(1, 17), drawn[3].item()), picked(range(1, 17), drawn[4].item())]
            repeated(sum(sizes))

        return step

    trace = memplan.record(build)
    assert len(built) <= 1 + 64
    assert any("IS NOT BOUNDED" in one.text for one in loud(trace.assumptions))


def test_an_array_keeps_the_memory_of_its_tensor() -> None:
    def build() -> Callable[[], None]:
        kept = list[Any]()
        return lambda: kept.append(torch.ones(64, 64).mul(2).numpy())

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


def test_equal_layers_of_which_each_step_trains_another_are_taken_in_turn() -> None:
    """Taken as any one of these alone, the step takes the same: only two of them show the states of both."""

    def build() -> Callable[[], None]:
        heads: Any = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        x, optimizer = torch.randn(8, 64), torch.optim.Adam(heads.parameters())

        def step() -> None:
            optimizer.zero_grad()
            heads[torch.randint(0, 3, ()).item()](x).sum().backward()
            optimizer.step()

        return step

    holds(build, 5)
