"""Private random generators for recordings, so that these leave the process's generators alone.

Fake tensors draw nothing, but a step also seeds, reads and sets torch's generator, and draws from those of Python and
numpy. Saving and restoring the process's generators would rewind what other threads draw meanwhile.
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
"""Threads that draw from the recording's generators: recording threads, and threads that they start."""


@contextmanager
def recording_thread() -> Iterator[None]:
    """Within this context, this thread draws from the recording's generators."""
    _threads.append(threading.get_ident())
    try:
        yield
    finally:
        _threads.remove(threading.get_ident())


@contextmanager
def own_streams() -> Iterator[None]:
    """Within this context, this thread has private random generators, which start in the state of the process's.

    A function imported from its module (``from random import random``) still draws from the process's generator. Its
    state is restored only if there are no other threads, which may have drawn from it, too.
    """
    states, nested = _generator_states(), _is_recording_thread()  # nested: within a recording, which replaced them
    try:
        with nullcontext() if nested else _generators_replaced():
            yield
    finally:
        if nested or threading.active_count() == 1:
            for get, put, state in states:
                if not same_state(get(), state):
                    put(state)


@contextmanager
def _generators_replaced() -> Iterator[None]:
    """Redirect this thread's random functions of torch, Python and numpy to private generators."""
    with ExitStack() as stack:
        stack.enter_context(recording_thread())
        stack.enter_context(_torch.generator_replaced(_is_recording_thread))
        stack.enter_context(_replaced(random, random._inst, random.Random(), {}))  # pyright: ignore[reportAttributeAccessIssue]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            shared: Any = numpy.random.get_state.__self__
            own = numpy.random.RandomState()
            others = {"seed": own.seed, "ranf": own.random_sample, "sample": own.random_sample}
            stack.enter_context(_replaced(numpy.random, shared, own, others))
        yield


def _is_recording_thread() -> bool:
    return threading.get_ident() in _threads


def _generator_states() -> list[tuple[Callable[[], Any], Callable[[Any], None], Any]]:
    """Return (getter, setter, current state) of each random generator of the process: torch's, Python's, numpy's."""
    accessors: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        accessors.append((numpy.random.get_state, numpy.random.set_state))
    return [(get, put, get()) for get, put in accessors]


def same_state(state: Any, other: Any) -> bool:
    """Return whether two states of a random generator are equal."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, tuple):
        return all(map(same_state, state, other))
    return bool((state == other).all()) if hasattr(state, "all") else state == other


@contextmanager
def _replaced(module: Any, shared: Any, own: Any, others: dict[str, Any]) -> Iterator[None]:
    """Within this context, functions of ``module`` (`random`, `numpy.random`) draw from ``own`` in recording threads.

    Args:
        module: with functions that are bound methods of ``shared``.
        shared: the process's generator.
        own: a generator of the same kind; it starts in the state of ``shared``.
        others: further functions of the module -> their replacements.
    """
    names = [name for name, value in vars(module).items() if getattr(value, "__self__", None) is shared]
    if module is random:
        own.setstate(module.getstate())
    else:
        own.set_state(module.get_state())

    def redirect(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``method`` in recording threads, else the module's function ``name``."""
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (method if _is_recording_thread() else function)(*args, **kwargs)

        return call

    methods = {name: getattr(own, name) for name in names} | others
    with _torch.patched(module, **{name: redirect(name, method) for name, method in methods.items()}):
        yield
