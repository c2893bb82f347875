"""Random streams of a recording's own: what it draws and seeds leaves the process's streams alone.

Fake tensors draw nothing, but a step also seeds, reads and sets torch's stream, and draws from those of Python and
numpy. To save these before a recording and restore them afterwards would wind back what other threads draw meanwhile.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from memplan import _torch

_threads = list[int]()
"""Threads that draw from the recording's streams: those that record, and those that they start."""


@contextmanager
def in_thread() -> Iterator[None]:
    """Let this thread draw from the recording's streams."""
    _threads.append(threading.get_ident())
    try:
        yield
    finally:
        _threads.remove(threading.get_ident())


@contextmanager
def own_streams() -> Iterator[None]:
    """Give this thread streams of its own, in the state of the process's.

    A function that the user's code has taken out of its module (``from random import random``) still draws from the
    process's stream. That is put back only where no other thread is there that may have drawn from it.
    """
    before, within = _states(), _is_ours()
    try:
        with nullcontext() if within else _begun():
            yield
    finally:
        if within or threading.active_count() == 1:
            for get, put, state in before:
                if not same_state(get(), state):
                    put(state)


@contextmanager
def _begun() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(in_thread())
        stack.enter_context(_torch.generator_replaced(_is_ours))
        stack.enter_context(_replaced(random, random._inst, random.Random(), {}))  # pyright: ignore[reportAttributeAccessIssue]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            shared: Any = numpy.random.get_state.__self__
            own = numpy.random.RandomState()
            others = {"seed": own.seed, "ranf": own.random_sample, "sample": own.random_sample}
            stack.enter_context(_replaced(numpy.random, shared, own, others))
        yield


def _is_ours() -> bool:
    return threading.get_ident() in _threads


def _states() -> list[tuple[Callable[[], Any], Callable[[Any], None], Any]]:
    """Return how the state of each stream of the process is read and set, and what it is."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((numpy.random.get_state, numpy.random.set_state))
    return [(get, put, get()) for get, put in found]


def same_state(one: Any, other: Any) -> bool:
    """Return whether two states of a stream are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return all(map(same_state, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else one == other


@contextmanager
def _replaced(module: Any, shared: Any, own: Any, others: dict[str, Any]) -> Iterator[None]:
    """Call the methods of another generator where a module's functions are those of the shared one."""
    names = [name for name, value in vars(module).items() if getattr(value, "__self__", None) is shared]
    (own.setstate if module is random else own.set_state)((module.getstate if module is random else module.get_state)())

    def instead(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (method if _is_ours() else function)(*args, **kwargs)

        return call

    methods = {name: getattr(own, name) for name in names} | others
    with _torch.patched(module, **{name: instead(name, method) for name, method in methods.items()}):
        yield
