"""Memory line by line against two independent sources: torch's profiler between the lines, and numbers by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.explanation.by_line import profiles_of
from memplan.explanation.line_profile import LineProfile, LineRow, merge_profiles
from memplan.trace.recording.followed.line_watch import code_of, following
from memplan.trace.records import FunctionLines, LineSpan

KIB = 1024


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 16 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.norm(h)
        h = F.gelu(h)
        return self.last(h.flatten(1))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    out = net(x)
    loss = F.cross_entropy(
        out,
        y,
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del out
    mean = x.mean(0)
    mean = None  # noqa: F841


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    net = Net()
    return net, torch.optim.AdamW(net.parameters()), torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64)


def build() -> Callable[[], None]:
    made = parts()
    return lambda: train(*made)


def followed(run: Callable[[], Any], *functions: Any) -> Any:
    with following((), [code_of(one, "") for one in functions]):
        return run()


def between_lines(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[int, int, int]]:
    """(line, net bytes, most above what was there before it) of each line event, by a tracer and a profiler of the
    test's own."""
    code, lines = function.__code__, list[int]()

    def mark(number: int) -> None:
        with torch.profiler.record_function(f"line {len(lines)}"):
            lines.append(number)

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event in ("line", "return"):
            mark(frame.f_lineno)
        return tracer

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        sys.settrace(tracer)
        try:
            function(*arguments)
        finally:
            sys.settrace(None)
    inner: Any = profile.profiler
    events = inner.kineto_results.events()
    sizes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    marks = {one.name(): one.start_ns() for one in events if one.name().startswith("line ")}
    found: list[tuple[int, int, int]] = []
    for number, line in enumerate(lines[:-1]):
        level = most = 0
        for time, size in sizes:
            if marks[f"line {number}"] < time < marks[f"line {number + 1}"]:
                level += size
                most = max(most, level)
        found.append((line, level, most))
    return found


def test_predicted_lines_are_those_that_torchs_profiler_sees() -> None:
    made = parts()
    train(*made)  # the optimizer has made its state
    events = between_lines(train, made)
    net: dict[int, int] = {}
    most: dict[int, int] = {}
    first = train.__code__.co_firstlineno
    for line, level, peak in events:
        line = first + 2 if first + 2 <= line <= first + 5 else line  # the statement over several lines
        most[line] = max(most.get(line, 0), net.get(line, 0) + peak)
        net[line] = net.get(line, 0) + level
    (profile,) = followed(lambda: memplan.explain(memplan.record(build, steps=1)), train).lines
    (second,) = followed(lambda: memplan.explain(memplan.record(build, steps=2)), train).lines
    rows = {row.line: row for row in second.rows if row.hits}
    assert set(rows) == set(net)
    optimizer_line = first + 7
    for line, row in rows.items():
        before = row.held - row.added + row.freed
        if line == optimizer_line:  # its first step makes the state: the most of both
            continue
        assert (line, row.added - row.freed, row.peak - before) == (line, net[line], most[line])
    assert net[optimizer_line] == 0
    assert profile.rows[7].added > 2 * sum(p.nbytes for p in parts()[0].parameters())


def test_predicted_is_measured_to_the_byte() -> None:
    predicted = followed(lambda: memplan.explain(memplan.record(build)), train, Net.forward)
    measured = followed(lambda: memplan.explain(memplan.measure(build)), train, Net.forward)
    assert len(predicted.lines) == 2
    assert [one.rows for one in predicted.lines] == [one.rows for one in measured.lines]
    assert [one.origin for one in (*predicted.lines, *measured.lines)] == ["recorded"] * 2 + ["measured"] * 2
    assert predicted.lines[0].peak == memplan.simulate(memplan.record(build)).steps[1].peak_allocated


def blocks(count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield torch.ones(256)


def by_hand() -> None:
    a = torch.ones(1024)
    b = a.clone()
    a = None
    kept: list[torch.Tensor] = []
    for one in blocks(3):
        kept.append(one.clone())
    one = None
    c = kept[0].sum() if kept else b
    if c is None:
        print("never")


def build_by_hand() -> Callable[[], None]:
    return by_hand


def test_numbers_by_hand() -> None:
    explained = followed(lambda: memplan.explain(memplan.record(build_by_hand, steps=1)), by_hand, blocks)
    rows = {row.line - by_hand.__code__.co_firstlineno: row for row in explained.lines[0].rows}
    # held, added, freed, peak
    assert _sizes(rows[1]) == (4 * KIB, 4 * KIB, 0, 4 * KIB)
    assert _sizes(rows[2]) == (8 * KIB, 4 * KIB, 0, 8 * KIB)
    assert _sizes(rows[3]) == (4 * KIB, 0, 4 * KIB, 8 * KIB)
    # the next block is made while the one before is there; three copies are kept
    assert _sizes(rows[5]) == (8 * KIB, KIB, KIB, 8 * KIB)  # when there is no next, three copies and the last block
    assert _sizes(rows[6]) == (8 * KIB, KIB, 0, 8 * KIB)
    assert _sizes(rows[7]) == (7 * KIB, 0, KIB, 8 * KIB)
    assert _sizes(rows[8]) == (7 * KIB + 4, 4, 0, 7 * KIB + 4)
    assert [rows[line].hits for line in (4, 5, 6, 7, 9, 10)] == [1, 4, 3, 1, 1, 0]
    assert rows[10].peak == 0
    generated = {row.line - blocks.__code__.co_firstlineno: row for row in explained.lines[1].rows}
    assert (generated[1].hits, generated[2].hits) == (4, 3)
    assert generated[2].added == KIB


def _sizes(row: LineRow) -> tuple[int, int, int, int]:
    return row.held, row.added, row.freed, row.peak


def test_on_a_card_bytes_are_those_of_blocks() -> None:
    explained = followed(lambda: memplan.explain(memplan.record(build_by_hand, steps=1, device="h100")), by_hand)
    rows = {row.line - by_hand.__code__.co_firstlineno: row for row in explained.lines[0].rows}
    assert _sizes(rows[1]) == (4 * KIB, 4 * KIB, 0, 4 * KIB)
    assert rows[8].added == 512
    assert explained.lines[0].device == "h100"


@pytest.mark.parametrize("seed", range(20))
def test_spans_by_a_slow_second_way(seed: int) -> None:
    """Random lives and spans: every storage is asked at every tick."""
    import random

    draw = random.Random(seed)
    ticks = iter(draw.sample(range(1, 81), 60))
    lives: list[tuple[int, int | None, int]] = []
    for _ in range(30):
        born, died = sorted((next(ticks), next(ticks)))
        lives.append((born, died if draw.random() < 0.8 else None, draw.randrange(1, 1000)))
    level, levels = 0, list[tuple[int, int]]()
    for tick in range(1, 81):
        change = sum(size for born, _, size in lives if born == tick) - sum(s for _, died, s in lives if died == tick)
        if change:
            level += change
            levels.append((tick, level))
    pairs = [sorted((draw.randrange(81), draw.randrange(81))) for _ in range(5)]
    spans = [LineSpan(1, start, end, 1) for start, end in pairs]
    function = FunctionLines("f", "f.py", ((1, "f()"),), tuple(spans))
    (profile,) = profiles_of([function], levels, [life[:2] for life in lives], device="cpu", origin="recorded")

    def alive(tick: int) -> list[int]:
        return [
            number for number, (born, died, _) in enumerate(lives) if born <= tick and (died is None or died > tick)
        ]

    def size(numbers: Any) -> int:
        return sum(lives[number][2] for number in numbers)

    held = max(size(alive(span.end)) for span in spans)
    added = max(size(set(alive(span.end)) - set(alive(span.start))) for span in spans)
    freed = max(size(set(alive(span.start)) - set(alive(span.end))) for span in spans)
    peak = max(size(alive(tick)) for span in spans for tick in range(span.start, span.end + 1))
    assert _sizes(profile.rows[0]) == (held, added, freed, peak)
    assert profile.rows[0].hits == 5


def test_a_profile_goes_through_json_and_the_trace_keeps_its_lines() -> None:
    trace = followed(lambda: memplan.record(build), train)
    assert memplan.Trace.from_json(trace.to_json()) == trace
    (profile,) = memplan.explain(trace).lines
    assert LineProfile.from_json(profile.to_json()) == profile
    assert profile.to_dict()["rows"][1]["source"].strip() == "out = net(x)"
    assert memplan.explain(trace).to_dict()["lines"][0]["function"] == "train"


def test_runs_of_several_sessions_are_one_profile() -> None:
    one = LineProfile("f", "f.py", "cpu", "measured", (LineRow(3, 2, 10, 5, 1, 20, "f()"),))
    two = LineProfile("f", "f.py", "cpu", "measured", (LineRow(3, 1, 12, 4, 2, 15, "f()"),), ("said",))
    assert merge_profiles([one, two, one])[0].rows == (LineRow(3, 5, 12, 5, 2, 20, "f()"),)
    assert merge_profiles([one, two])[0].notes == ("said",)


def test_nothing_is_followed_that_nobody_asks_for() -> None:
    assert memplan.record(build).lines == ()
    assert '"lines"' not in memplan.record(build_by_hand).to_json()
