"""A share of benchmarks/faults.py: calls in which an op raises, memory runs out, Ctrl-C comes, or a thread trains."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import faults


@pytest.fixture(scope="module")
def user() -> faults.User:
    return faults.User()


@pytest.fixture(scope="module")
def alone(user: faults.User) -> faults.Alone:
    return faults.Alone(user)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked for here alone: other tests make some at the same time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def only_own_callbacks() -> Iterator[None]:
    """hypothesis leaves one for the garbage collector, in which an interrupt is printed and lost."""
    before = gc.callbacks[:]
    gc.callbacks[:] = [callback for callback in before if not callback.__module__.startswith("hypothesis")]
    yield
    gc.callbacks[:] = before


QUICK = {2: "record, error", 20: "measure, interrupt"}
"""Numbers of faults of two calls that take a second each."""


@pytest.mark.parametrize(
    "number", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in [*range(20), 22, 31] if one not in QUICK)]
)
def test_all_is_as_before(number: int, user: faults.User, alone: faults.Alone) -> None:
    assert faults.fault(number, user, alone)["wrong"] == []


def test_what_is_left_changed_is_seen(user: faults.User, alone: faults.Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that spoil something: an environment variable, a gradient, a file, a signal."""

    def spoil() -> int:
        os.environ["SPOILT"] = "yes"
        user.model[0][0].bias.grad = None  # pyright: ignore[reportIndexIssue]
        Path("spoilt").touch()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        return 1

    grads = [one.grad for one in user.model.parameters()]
    monkeypatch.setattr(faults, "calls", lambda user: {"spoil": spoil})
    try:
        row = faults.fault(2, user, {"spoil": (1, 1, 1.0)})  # pyright: ignore[reportArgumentType]
    finally:
        del os.environ["SPOILT"]
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        for parameter, grad in zip(user.model.parameters(), grads, strict=True):
            parameter.grad = grad
    said = "\n".join(row["wrong"])
    assert all(word in said for word in ("environment", "gradients of the user", "file spoilt", "signals"))
