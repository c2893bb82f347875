"""What a step prints while it is recorded: held back and counted; shown where that is asked for, and with an error."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from truth.torch_state import kept

import memplan


def printing(*texts: str, then: Callable[[], Any] = lambda: None) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)

        def step() -> None:
            layer(x).sum().backward()
            for text in texts:
                print(text)
            then()

        return step

    return build


def told(trace: memplan.Trace) -> list[str]:
    return [note for note in trace.notes if "printed" in note]


def test_prints_are_held_back_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    with kept():
        trace = memplan.record(printing("loss 1.0", "", "step"), device="cpu")
    assert capsys.readouterr() == ("", "")
    assert told(trace) == [
        "4 lines that it printed are not shown: values are stand-ins (--show-output, show_output=True)"
    ]


@pytest.mark.parametrize("verb", ["record", "explain"])
def test_they_are_shown_where_that_is_asked_for(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = getattr(memplan, verb)(printing("loss"), device="cpu", show_output=True)
    assert capsys.readouterr().out == "loss\n" * 2
    assert not told(found)


def test_nothing_is_told_of_nothing() -> None:
    assert not told(memplan.record(printing(), device="cpu"))


def test_a_progress_bar_is_a_line() -> None:
    bar = pytest.importorskip("tqdm").tqdm
    trace = memplan.record(printing(then=lambda: list(bar(range(100), mininterval=0))), device="cpu", steps=1)
    assert told(trace)[0].startswith("1 line that it printed is")


def test_handlers_that_were_there_before(capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer's logger writes to the stream that it was made with."""
    logger, handler = logging.getLogger("trainer"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        memplan.record(printing(then=lambda: logger.warning("epoch 1")), device="cpu")
    finally:
        logger.removeHandler(handler)
    assert "epoch 1" not in capsys.readouterr().err


def test_threads_of_the_step_are_held_back_and_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()

    def beside() -> None:
        print("beside")
        stop.set()

    other = threading.Thread(target=beside)
    go = threading.Event()
    waiting = threading.Thread(target=lambda: (go.wait(), other.run()))
    waiting.start()

    def in_thread() -> None:
        own = threading.Thread(target=lambda: print("of the step"))
        own.start()
        own.join()
        go.set()
        assert stop.wait(60)

    memplan.record(printing(then=in_thread), device="cpu", steps=1)
    waiting.join()
    assert capsys.readouterr().out == "beside\n"


def test_an_error_brings_the_last_lines_along() -> None:
    def fail() -> None:
        sys.stdout.write("at 20")
        raise ValueError("not so")

    with kept(), pytest.raises(memplan.MemplanError) as raised:
        memplan.record(printing(*(f"at {number}" for number in range(20)), then=fail), device="cpu")
    assert raised.value.__notes__ == ["it printed last:\nat 16\nat 17\nat 18\nat 19\nat 20"]


def test_a_debugger_talks(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "pdb"}
    exec("def ask():\n    print('(Pdb)')", namespace)
    memplan.record(printing("loss", then=namespace["ask"]), device="cpu", steps=1)
    assert capsys.readouterr().out == "(Pdb)\n"
