"""Ctrl-C while something is replaced or put back: that comes to its end first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch_state import kept

import memplan
from memplan import _interrupts
from memplan._interrupts import held_off
from memplan.trace.recording.ledger import Ledger


@pytest.fixture(autouse=True)
def python_hears_of_it() -> Iterator[None]:
    """Where a shell started the tests in the background, SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.02)


@contextmanager
def replaced(log: list[str], *, entering: bool) -> Iterator[None]:
    if entering:
        interrupt()
    log.append("replaced")
    try:
        yield
    finally:
        if not entering:
            interrupt()
        log.append("put back")


@pytest.mark.parametrize("entering", [True, False])
def test_replacing_and_putting_back_come_to_their_end(entering: bool) -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), held_off():  # noqa: PT012
        with replaced(log, entering=entering):
            pass
        time.sleep(1)
        log.append("went on")
    assert log == ["replaced", "put back"]


def test_a_recording_is_not_interrupted_where_a_storage_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised there: Ctrl-C would be lost, and the storage would never die."""
    on_death = Ledger._on_death
    deaths = list[int]()

    def _on_death(ledger: Ledger, reference: Any) -> None:
        deaths.append(len(deaths))
        if len(deaths) == 5:
            interrupt()
        on_death(ledger, reference)

    def build() -> Callable[[], None]:
        model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), torch.randn(4, 8)
        return lambda: model(x).sum().backward()

    monkeypatch.setattr(Ledger, "_on_death", _on_death)
    with pytest.raises(KeyboardInterrupt):
        memplan.record(build, steps=50, device="cpu")
    assert len(deaths) > 5


def test_without_it_they_do_not() -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), replaced(log, entering=False):
        pass
    assert log == ["replaced"]


def test_a_finally_comes_to_its_end() -> None:
    log = list[str]()

    def work() -> None:
        try:
            log.append("begun")
        finally:
            interrupt()
            log.append("ended")

    with pytest.raises(KeyboardInterrupt), held_off():  # noqa: PT012
        work()
        time.sleep(1)
    assert log == ["begun", "ended"]


def test_elsewhere_it_comes_at_once() -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), held_off():  # noqa: PT012
        interrupt()
        log.append("went on")
    assert log == []


def test_what_the_caller_puts_back_is_no_reason_to_wait() -> None:
    log = list[str]()

    def called() -> None:
        with held_off():
            interrupt()
            log.append("went on")

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        try:
            pass
        finally:
            called()
    assert log == []


def test_what_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupts, "_LONGEST", 0.2)

    class Endless:
        def __enter__(self) -> None:
            while True:
                interrupt()

        def __exit__(self, *_: object) -> None: ...

    with pytest.raises(KeyboardInterrupt), held_off(), Endless():
        pass


def test_one_that_comes_at_the_very_end_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), held_off(), replaced([], entering=False):
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_are_as_before_and_one_set_inside_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    with held_off(), held_off():
        pass
    assert signal.getsignal(signal.SIGINT) is before
    own: Callable[..., Any] = lambda *_: None  # noqa: E731
    try:
        with held_off():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_signals() -> None:
    found = list[object]()

    def run() -> None:
        with held_off():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("verb", ["record", "measure"])
def test_ctrl_c_in_a_step(verb: str) -> None:
    def build() -> Callable[[], None]:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)

        def step() -> None:
            layer(x).sum().backward()
            interrupt()

        return step

    with kept(), pytest.raises(KeyboardInterrupt):
        getattr(memplan, verb)(build)
