"""Signals during calls of memplan: where their handlers run, and what is as before when they raise."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from truth.torch_state import kept

import memplan
from memplan import _interrupts
from memplan._interrupts import deferred, in_place_of, safe_point, waiting
from memplan.trace.recording.ledger import Ledger
from memplan.verification.measurement.state_copies import ModuleCopy


@pytest.fixture(autouse=True)
def python_hears_of_it() -> Iterator[None]:
    """Where a shell started the tests in the background, SIGINT is ignored."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Functions that count as a library's: nothing is raised in their lines."""
    (tmp_path / "sympy_of_test.py").write_text(
        "import os, signal, time\n"
        "def interrupt(kind=signal.SIGINT):\n"
        "    os.kill(os.getpid(), kind)\n"
        "    for _ in range(100): time.sleep(0.0002)\n"
        "def wait(seconds):\n"
        "    end = time.monotonic() + seconds\n"
        "    while time.monotonic() < end: time.sleep(0.001)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("sympy_of_test")
    vars(module)["__name__"] = "sympy.of_test"
    sys.modules.pop("sympy_of_test")
    return module


def interrupt(kind: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), kind)
    time.sleep(0.02)


def counting(kind: int) -> list[int]:
    """Install a handler that counts."""
    came = list[int]()
    signal.signal(kind, lambda *_: came.append(kind))
    return came


def test_it_waits_for_the_end_in_code_that_may_not_raise(ours: ModuleType) -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        ours.interrupt()
        log.append("went on")
    assert log == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_at_a_safe_point(ours: ModuleType) -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        ours.interrupt()
        log.append("went on")
        safe_point()
        log.append("behind it")
    assert log == ["went on"]


def test_it_comes_at_once_in_the_users_code() -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        interrupt()
        log.append("went on")
    assert log == []


def test_without_it_putting_back_is_interrupted(ours: ModuleType) -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        ours.interrupt()
        log.append("went on")
    assert log == []


def test_each_signal_is_passed_on(ours: ModuleType) -> None:
    came = counting(signal.SIGUSR1)
    with deferred():
        for _ in range(7):
            ours.interrupt(signal.SIGUSR1)
        assert came == []
        safe_point()
        assert len(came) == 7
        ours.interrupt(signal.SIGUSR1)
    assert len(came) == 8


def test_of_two_both_are_honoured(ours: ModuleType) -> None:
    came = counting(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        ours.interrupt()
        ours.interrupt(signal.SIGUSR1)
        safe_point()
    assert len(came) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_waits_too_long_comes_anyway(ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second signal, too."""
    monkeypatch.setattr(_interrupts, "LONGEST", 0.05)
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        ours.interrupt()
        ours.wait(60)
        pytest.fail("it never came")


def test_it_comes_at_once_where_a_process_is_waited_for(ours: ModuleType) -> None:
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred(), waiting():  # noqa: PT012
        ours.interrupt()
        log.append("went on")
    assert log == []


def test_an_error_of_a_handler_passes_code_that_catches_errors(ours: ModuleType) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError("the user's own")

    signal.signal(signal.SIGALRM, fail)
    log = list[str]()
    with pytest.raises(TimeoutError, match="own"), deferred():  # noqa: PT012
        ours.interrupt(signal.SIGALRM)
        try:
            safe_point()
        except Exception:
            log.append("swallowed")
    assert log == []


def test_within_the_users_code_it_is_what_the_user_catches() -> None:
    def fail(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, fail)
    log = list[str]()
    with deferred(span=True):
        try:
            interrupt(signal.SIGALRM)
        except TimeoutError:
            log.append("caught")
    assert log == ["caught"]


def test_an_import_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.02)\ndone = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt), deferred():
        importlib.import_module("slow_to_import")
    assert sys.modules.pop("slow_to_import").done


def test_handlers_are_as_before_and_one_set_inside_stays() -> None:
    before = [signal.getsignal(kind) for kind in signal.valid_signals()]
    with deferred(), deferred():
        pass
    assert [signal.getsignal(kind) for kind in signal.valid_signals()] == before
    own: Callable[..., Any] = lambda *_: None  # noqa: E731
    with deferred():
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is own


def test_signals_that_python_does_not_handle_are_left_alone() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with deferred():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_a_handler_that_was_read_inside_works_afterwards() -> None:
    came = counting(signal.SIGUSR1)
    with deferred():
        inside = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, inside)
    interrupt(signal.SIGUSR1)
    assert len(came) == 1
    with deferred():
        interrupt(signal.SIGUSR1)
    assert len(came) == 2


def test_a_process_forked_inside_has_its_signals_at_once(ours: ModuleType) -> None:
    with deferred():
        process = os.fork()
        if not process:
            try:
                ours.interrupt()
            except KeyboardInterrupt:
                os._exit(3)
            os._exit(4)
        _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 3


def test_other_threads_have_no_signals() -> None:
    found = list[object]()

    def run() -> None:
        with deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_handler_sees_what_is_the_users() -> None:
    state = ["theirs"]

    def set_to(value: str) -> Callable[[], None]:
        return lambda: state.__setitem__(0, value)

    seen = list[str]()
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(state[0]))
    with deferred(), in_place_of(set_to("ours"), set_to("theirs")):
        interrupt(signal.SIGUSR1)
        assert state == ["ours"]
    assert (seen, state) == (["theirs"], ["theirs"])


def test_a_handler_that_saves_a_model_saves_the_users() -> None:
    model = nn.Linear(3, 2)
    saved = list[dict[str, torch.Tensor]]()
    signal.signal(signal.SIGUSR1, lambda *_: saved.append({n: p.clone() for n, p in model.state_dict().items()}))
    with deferred(), ModuleCopy(model).in_place():
        with torch.no_grad():
            model.weight.add_(1)
        interrupt(signal.SIGUSR1)
        changed = model.weight.clone()
    assert torch.equal(saved[0]["weight"], model.weight)
    assert not torch.equal(changed, model.weight)


def step_of(within: Callable[[], None], layers: int = 1) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]), torch.randn(4, 8)

        def step() -> None:
            model(x).sum().backward()
            within()

        return step

    return build


def test_a_handler_within_a_recording_has_real_tensors() -> None:
    sums = list[float]()
    signal.signal(signal.SIGUSR1, lambda *_: sums.append(torch.ones(3).sum().item()))
    memplan.record(step_of(lambda: interrupt(signal.SIGUSR1)), device="cpu", steps=2)
    assert sums == [3.0, 3.0]


def test_a_recording_is_not_interrupted_where_a_storage_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised there: Ctrl-C would be lost, and the storage would never die."""
    on_death, deaths = Ledger._on_free, list[int]()

    def _on_free(ledger: Ledger, reference: Any) -> None:
        deaths.append(len(deaths))
        on_death(ledger, reference)
        if len(deaths) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.modules[__name__], "__name__", "memplan.of_test")
    monkeypatch.setattr(Ledger, "_on_free", _on_free)
    with pytest.raises(KeyboardInterrupt):
        memplan.record(step_of(lambda: None, layers=20), steps=50, device="cpu")
    assert len(deaths) > 5


def test_it_never_comes_within_torchs_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some functions of torch's end the process if they raise: C++ calls them where nothing may."""
    log, forward = list[str](), nn.Linear.forward
    torchs: dict[str, Any] = {"__name__": "torch.of_test", "os": os, "time": time, "forward": forward, "log": log}
    exec(
        "def interrupted(*args):\n"
        "    os.kill(os.getpid(), 2)\n"
        "    time.sleep(0.02)\n"
        "    log.append('went on')\n"
        "    return forward(*args)\n",
        torchs,
    )
    monkeypatch.setattr(nn.Linear, "forward", torchs["interrupted"])
    with kept(), pytest.raises(KeyboardInterrupt):
        memplan.record(step_of(lambda: None), device="cpu")
    assert log == ["went on"]


@contextmanager
def timer(seconds: float) -> Iterator[list[int]]:
    came = counting(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("call", ["record", "measure", "plan"])
def test_a_timer_that_counts_changes_nothing(call: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(16, 8)
    calls: dict[str, Callable[[], object]] = {
        "record": lambda: memplan.simulate(memplan.record(step_of(lambda: None), device="cpu")).peak_allocated,
        "measure": lambda: memplan.simulate(memplan.measure(step_of(lambda: None), device="cpu")).peak_allocated,
        "plan": lambda: memplan.plan(model, x, budget="100%", costs="roofline").peak,
    }
    expected = calls[call]()
    with timer(0.002) as came:
        assert calls[call]() == expected
    assert came


TICKS = 0


def test_what_a_handler_changes_is_nothing_that_a_planned_model_reads() -> None:
    """Handlers run between the ops of a capture, which observes the code that the model executes."""

    def tick(*_: object) -> None:
        global TICKS
        TICKS += 1

    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), torch.randn(16, 8)
    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        memplan.plan(model, x, budget="100%", costs="roofline")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert TICKS


@pytest.mark.parametrize("verb", ["record", "measure"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_step(verb: str, times: int) -> None:
    def press() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)

    guarded: AbstractContextManager[None] = kept()
    with guarded, pytest.raises(KeyboardInterrupt):
        getattr(memplan, verb)(step_of(press))


def test_ctrl_c_at_the_very_end_of_fit_leaves_nothing_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the result is there, and nobody will have it."""
    from memplan.verification.fitting import fit

    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(64, 16)
    run = fit._Fitting.run

    def run_and_press(fitting: Any) -> Any:
        done = run(fitting)
        assert done.changed
        _interrupts._signals.queue.append(signal.SIGINT)
        return done

    monkeypatch.setattr(fit._Fitting, "run", run_and_press)
    with pytest.raises(KeyboardInterrupt):
        memplan.fit(model, x, budget="90%", pairs=0)
    monkeypatch.undo()
    memplan.fit(model, x, budget="100%", pairs=0)  # it refuses a model that is planned already
