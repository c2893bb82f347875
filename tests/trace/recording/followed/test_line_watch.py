"""Lines on a clock that the test turns: what runs when, without any tensor."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memplan.errors import InputError
from memplan.trace.recording.followed.line_watch import (
    Followed,
    code_of,
    decorate,
    following,
    is_watched,
    start_watch,
    unwatched,
    watching,
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


CLOCK = Clock()


def tick(count: int = 1) -> int:
    CLOCK.now += count
    return count


def straight() -> None:
    tick()
    tick(
        2,
    )
    tick(3)


def loop() -> None:
    for number in range(3):
        tick(number)


def inner() -> None:
    tick(5)


def outer() -> None:
    inner()
    tick()


def fails() -> None:
    tick(2)
    raise KeyError


def numbers() -> Iterator[int]:
    for number in range(2):
        yield tick(number + 1)


def reads() -> None:
    for _ in numbers():
        tick(10)


def down(count: int) -> None:
    if count:
        tick()
        down(count - 1)


async def waits() -> None:
    tick()
    await asyncio.sleep(0)
    tick(2)


Spans = list[tuple[int, int, int, int]]


def spans(functions: list[Callable[..., Any]], run: Callable[[], object]) -> dict[str, Spans]:
    """Each function's runs of lines: line counted from its first, start, end, hits."""
    CLOCK.now = 0
    with following((), [code_of(one, "") for one in functions]), watching(CLOCK) as watch:
        run()
    return {
        one.name: [(span.line - one.source[0][0], span.start, span.end, span.hits) for span in one.spans]
        for one in watch.rows()
    }


def test_a_line_runs_until_the_next_begins_and_a_statement_is_one_line() -> None:
    assert spans([straight], straight) == {"straight": [(1, 0, 1, 1), (2, 1, 3, 1), (5, 3, 6, 1)]}


def test_each_round_of_a_loop_is_a_hit() -> None:
    found = spans([loop], loop)["loop"]
    assert [one for one in found if one[0] == 2] == [(2, 0, 0, 1), (2, 0, 1, 1), (2, 1, 3, 1)]
    assert sum(hits for line, _, _, hits in found if line == 1) == 4  # the last finds no more


def test_lines_that_take_no_time_on_the_clock_are_one_span() -> None:
    def still() -> None:
        for _ in range(1000):
            pass

    found = spans([still], still)["test_lines_that_take_no_time_on_the_clock_are_one_span.still"]
    assert found == [(1, 0, 0, 1001), (2, 0, 0, 1000)]


def test_what_a_line_calls_belongs_to_it() -> None:
    assert spans([outer, inner], outer) == {"outer": [(1, 0, 5, 1), (2, 5, 6, 1)], "inner": [(1, 0, 5, 1)]}


def test_an_exception_ends_the_line() -> None:
    def run() -> None:
        with pytest.raises(KeyError):
            fails()
        tick(7)

    assert spans([fails], run) == {"fails": [(1, 0, 2, 1), (2, 2, 2, 1)]}


def test_a_generator_runs_only_between_its_yields() -> None:
    found = spans([numbers], reads)["numbers"]
    assert [one for one in found if one[0] == 2 and one[3]] == [(2, 0, 1, 1), (2, 11, 13, 1)]
    assert all(start == end for _, start, end, hits in found if not hits)


def test_each_call_of_a_function_that_calls_itself_counts() -> None:
    found = spans([down], lambda: down(2))["down"]
    assert [one for one in found if one[0] == 3] == [(3, 2, 2, 1), (3, 1, 2, 1)]


def test_a_coroutine_does_not_run_while_it_waits() -> None:
    async def both() -> None:
        await asyncio.gather(waits(), asyncio.sleep(0), other())

    async def other() -> None:
        tick(100)

    found = spans([waits], lambda: asyncio.run(both()))["waits"]
    assert [(line, end - start) for line, start, end, hits in found if hits] == [(1, 1), (2, 0), (3, 2)]


def test_a_file_has_its_functions_and_its_own_lines() -> None:
    this = code_of(straight, "")
    lambda_, comprehension = (lambda: 0).__code__, compile("[x for x in y]", __file__, "exec")
    everything, one = Followed(__file__), Followed(__file__, "straight")
    assert everything.has(this, __file__)
    assert everything.has(comprehension, __file__)
    assert not everything.has(lambda_, __file__)
    assert not everything.has(this, __file__ + "x")
    assert one.has(this, __file__)
    assert not one.has(code_of(outer, ""), __file__)
    assert Followed(__file__, "Clock.__call__").has(code_of(Clock.__call__, ""), __file__)


def test_what_runs_when_it_is_stopped_is_cut() -> None:
    def ends() -> None:
        tick(2)
        stop()
        tick(3)

    CLOCK.now = 0
    with following((), [code_of(ends, "")]), watching(CLOCK) as watch:
        stop = watch.stop
        ends()
    (found,) = watch.rows()
    assert [(span.start, span.end, span.hits, span.cut) for span in found.spans] == [(0, 2, 1, False), (2, 2, 1, True)]


def test_the_tracer_that_was_there_is_back() -> None:
    before = sys.gettrace()
    spans([straight], straight)
    assert sys.gettrace() is before
    assert not is_watched()
    with unwatched():
        assert is_watched()


@pytest.mark.parametrize("what", [len, 3, int])
def test_what_has_no_lines_is_refused(what: Any) -> None:
    with pytest.raises(InputError, match=r"memplan.profile: .* Expected a function or a method written in Python"):
        code_of(what, "memplan.profile")


def test_where_no_decorated_function_is_called_nothing_is_traced() -> None:
    def decorated() -> None:
        tick()

    decorate(code_of(decorated, ""))
    before = sys.gettrace()
    with watching(CLOCK) as watch:
        assert sys.gettrace() is before
        beside = threading.Thread(target=start_watch)
        beside.start()
        beside.join()
        assert sys.gettrace() is before, "another thread starts no watch of this one"
        start_watch()
        assert sys.gettrace() is not before
        decorated()
    assert sys.gettrace() is before
    assert [row.name.rpartition(".")[2] for row in watch.rows()] == ["decorated"]
