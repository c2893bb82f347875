"""`memplan.profile` where functions run by themselves, and where somebody records them."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from truth.fresh_process import run_fresh

import memplan
from memplan.errors import InputError
from memplan.integrations.line_profiles import decorator

KIB = 1024
MODEL = nn.Linear(256, 256, bias=False)  # 256 KiB
KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True, scope="module")
def _unfrozen(_older_objects_frozen: None) -> None:
    """A session finds the tensors that Python's collector knows: frozen ones are unknown to it."""
    MODEL.weight = nn.Parameter(MODEL.weight.detach().clone())


@memplan.profile
def forward_and_back(x: torch.Tensor) -> None:
    y = MODEL(x)
    y.sum().backward()
    MODEL.zero_grad()


@memplan.profile
def drops() -> None:
    KEPT.clear()


class Worker:
    @memplan.profile
    def method(self, size: int) -> torch.Tensor:
        return torch.ones(size)

    @memplan.profile
    @staticmethod
    def static(size: int) -> torch.Tensor:
        return torch.ones(size)

    @classmethod
    @memplan.profile
    def of_class(cls, size: int) -> str:
        one = torch.ones(size)
        return f"{cls.__name__} {len(one)}"


@memplan.profile
def blocks(count: int) -> Iterator[torch.Tensor]:
    got = 0
    try:
        for _ in range(count):
            got = yield torch.ones(256)
    finally:
        KEPT.append(torch.zeros(got or 1))
    return got


@memplan.profile
async def waits() -> int:
    one = torch.ones(512)
    await asyncio.sleep(0)
    return len(one)


@memplan.profile
def fails() -> None:
    one = torch.ones(512)
    raise KeyError(len(one))


@memplan.profile
def calls_another() -> torch.Tensor:
    return Worker().method(1024)


@pytest.fixture(autouse=True)
def _as_if_no_test_had_run() -> Iterator[None]:
    """Each test has all of the seconds to measure, and what it measures is not printed at the end."""
    for function in vars(sys.modules[__name__]).values():
        if isinstance(function, decorator.Profiled):
            function._seconds_left = decorator._SECONDS
    yield
    decorator.forget()


def rows(function: Any) -> dict[int, Any]:
    """By the line within the function, decorators counted."""
    return {row.line - function.lines.rows[0].line: row for row in function.lines.rows if row.hits}


def test_a_function_is_measured_and_does_the_same() -> None:
    forward_and_back(torch.ones(64, 256))
    found = rows(forward_and_back)
    assert (found[2].added, found[2].freed, found[2].hits) == (64 * KIB, 0, 1)
    assert (found[3].added, found[3].freed) == (256 * KIB, 0)
    # beside the gradient of the weight there are that of y, expanded from one number, and copied for the kernel
    assert found[3].peak - found[2].held >= 256 * KIB
    assert (found[4].added, found[4].freed) == (0, 256 * KIB)
    assert found[2].held >= 256 * KIB + 2 * 64 * KIB
    assert forward_and_back.lines.origin == "measured"
    before = found[2].hits
    forward_and_back(torch.ones(64, 256))
    assert rows(forward_and_back)[2].hits == before + 1


def test_what_was_there_before_is_held_and_freed() -> None:
    KEPT.extend([torch.ones(1024), torch.ones(1024)[:5]])
    drops()
    row = rows(drops)[2]
    assert (row.freed, row.added) == (8 * KIB, 0)
    assert row.peak - row.held == 8 * KIB


def test_methods_are_bound_and_counted() -> None:
    assert len(Worker().method(1024)) == 1024
    assert rows(Worker.method)[2].added == 4 * KIB
    assert Worker().method.lines is not None
    assert len(Worker.static(512)) == 512
    assert Worker.of_class(3) == "Worker 3"


def test_a_generator_gives_takes_and_ends_as_before() -> None:
    generator = blocks(2)
    assert len(next(generator)) == 256
    KEPT.append(torch.ones(4096))  # not its own
    assert len(generator.send(7)) == 256
    with pytest.raises(StopIteration) as ended:
        generator.send(9)
    assert (ended.value.value, len(KEPT[-1])) == (9, 9)
    found = rows(blocks)
    assert (found[4].hits, found[5].hits, found[5].added) == (3, 2, KIB)
    thrown = blocks(2)
    next(thrown)
    with pytest.raises(OSError, match="thrown"):
        thrown.throw(OSError("thrown"))
    closed = blocks(2)
    next(closed)
    count = len(KEPT)
    closed.close()
    assert len(KEPT) == count + 1
    KEPT.clear()


def test_a_coroutine_is_measured() -> None:
    assert asyncio.run(waits()) == 512
    assert rows(waits)[2].added == 2 * KIB


def test_an_exception_goes_on_and_what_ran_is_known() -> None:
    with pytest.raises(KeyError, match="512"):
        fails()
    assert rows(fails)[2].added == 2 * KIB


def test_a_function_within_another_is_known_too() -> None:
    before = rows(Worker.method)[2].hits if Worker.method.lines else 0
    calls_another()
    assert rows(calls_another)[2].added == 4 * KIB
    assert rows(Worker.method)[2].hits == before + 1


def test_within_a_recording_it_is_predicted_and_not_measured() -> None:
    @memplan.profile
    def step(model: nn.Module, x: torch.Tensor) -> None:
        model(x).sum().backward()

    def build() -> Callable[[], None]:
        model, x = nn.Linear(256, 256, bias=False), torch.ones(64, 256)
        return lambda: step(model, x)

    explained = memplan.explain(build)
    assert [one.function.rpartition(".")[2] for one in explained.lines] == ["step"]
    assert explained.lines[0].origin == "recorded"
    assert step.lines is None
    measured = memplan.explain(memplan.measure(build))
    assert [one.rows for one in measured.lines] == [one.rows for one in explained.lines]
    assert step.lines is None


def test_it_steps_aside_for_another_profiler() -> None:
    @memplan.profile
    def run() -> torch.Tensor:
        return torch.ones(3)

    with torch.profiler.profile(profile_memory=True, acc_events=True):
        assert len(run()) == 3
    assert run.lines is None


def test_it_ends_after_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    @memplan.profile(seconds=5)
    def run() -> None:
        for number in range(4):
            KEPT.append(torch.ones(256))
            if number == 1:
                clock[0] += 10

    clock = [0.0]
    monkeypatch.setattr("time.thread_time", lambda: clock[0])
    run()
    run()
    KEPT.clear()
    assert rows(run)[3].hits == 2
    assert run.lines.notes == ("it ran on after 10 s, the rest was not measured (memplan.profile(seconds=...))",)


def test_time_in_which_others_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    @memplan.profile
    def run() -> None:
        KEPT.append(torch.ones(256))
        clock[0] += 1000

    clock, real = [0.0], time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: real() + clock[0])
    run()
    run()
    KEPT.clear()
    assert rows(run)[2].hits == 2


def test_the_first_call_is_predicted_for_a_card() -> None:
    @memplan.profile(device="h100")
    def run(x: torch.Tensor) -> torch.Tensor:
        y = MODEL(x)
        KEPT.append(y)
        return y

    x = torch.ones(64, 256)
    y = run(x)
    run(x)
    assert torch.equal(y, MODEL(x))
    assert len(KEPT) == 2
    KEPT.clear()
    assert (run.lines.origin, run.lines.device) == ("recorded", "h100")
    (made,) = [row for row in run.lines.rows if "MODEL(x)" in row.source]
    assert made.hits == 1
    # the result, and cuBLAS's workspace on an H100, which some releases of torch keep
    assert made.added in (64 * KIB, 64 * KIB + 32 * KIB * KIB)
    assert made.peak == 256 * KIB + 2 * 64 * KIB + 32 * KIB * KIB
    assert made.held == made.added + 256 * KIB + 64 * KIB


def test_a_call_that_cannot_be_predicted_runs(capsys: pytest.CaptureFixture[str]) -> None:
    @memplan.profile(device="h100")
    def run(x: torch.Tensor) -> int:
        return len(x.view(int(x.sum())))

    assert run(torch.ones(3)) == 3
    assert "run is not predicted for h100: " in capsys.readouterr().err
    assert run.lines is None
    run.print()
    assert "has not run by itself yet" in capsys.readouterr().out


def test_it_looks_like_the_function_and_pickles() -> None:
    assert drops.__name__ == "drops"
    assert pickle.loads(pickle.dumps(drops)) is drops


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: memplan.profile(nn.Linear), "memplan.profile: <class"),
        (lambda: memplan.profile(torch.relu), "memplan.profile: <built-in method relu"),
        (lambda: memplan.profile(seconds=0)(drops), "memplan.profile(seconds=0). Expected a number above 0"),
    ],
)
def test_what_it_cannot_follow_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value).startswith(said)


SCRIPT = """\
import torch
import memplan

@memplan.profile
def make(size):
    a = torch.ones(size)
    b = a.clone()
    return b

@memplan.profile
def never():
    pass

if __name__ == "__main__":
    kept = [make(1024) for _ in range(2)]
    print("done")
"""

PRINTED = """\
done
make (script.py), line by line, measured on cpu
line  hits      held    added  freed      peak  code
────────────────────────────────────────────────────────────────────────
   4                                            @memplan.profile
   5                                            def make(size):
   6     2   8.0 KiB  4.0 KiB      -   8.0 KiB      a = torch.ones(size)
   7     2  12.0 KiB  4.0 KiB      -  12.0 KiB      b = a.clone()
   8     2  12.0 KiB        -      -  12.0 KiB      return b

held: allocated after the line. added, freed: what it leaves, and what it ends,
of that. peak: the most while it ran. Of several hits, the most of any.
"""


def test_a_script_under_python_prints_the_table_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    start = f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.stdout.reconfigure(encoding='utf-8')\n"
    done = run_fresh(f"{start}runpy.run_path('script.py', run_name='__main__')")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == PRINTED
