"""Measure the memory of calls: by allocator events for real runs, by recording for runs without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.semantics.cpu import table as cpu
from memplan.trace.semantics.kinds import Semantics
from memplan.trace.semantics.traced_results import INSTEAD, RESULTS


class Allocations:
    """Allocations within this context, to be queried by span after it.

    Real runs are measured by torch's profiler (only one can be active), which also sees allocations inside of the ops
    of other libraries. Tensors without data are counted as in a recording.

    Args:
        real: whether tensors have data. If not, tensors created in this context have none.

    Example:
        >>> with Allocations(real=True) as allocations, allocations.span("call"):
        ...     y = x.exp().sum()
        >>> allocations.peak_bytes("call"), allocations.remaining_bytes("call")
    """

    def __init__(self, *, real: bool) -> None:
        self._profile = _torch.memory_profile()
        """torch's profiler, used if tensors have data."""
        self._observer = None if real else Observer(Place(), real=False, semantics=_SEMANTICS)
        """Counts tensors without data; None if the profile measures."""
        self._stack = ExitStack()
        self._ranges: dict[str, tuple[int, int]] = {}
        """Start and end of each span, by name: ns of a profile, or ticks of a ledger."""
        self._events: list[tuple[int, int]] = []
        """(time, bytes: negative for a free), in order of time."""
        self._lifetimes: list[tuple[int, int, int]] = []
        """(time of the allocation, of the free, bytes) of memory without data that was freed, in order."""

    def __enter__(self) -> Allocations:
        if self._observer is None:
            self._stack.enter_context(self._profile)
        else:
            self._stack.enter_context(_torch.untraced())
            self._stack.enter_context(_torch.FakeMode(self._observer.dispatch).recording())
            self._observer.calibrate()
        return self

    def __exit__(self, *error: object) -> None:
        if self._observer is None:
            self._stack.close()
            self._read(_torch.Profile.of(self._profile))
            return
        ledger = self._observer.ledger
        ledger.close()
        self._stack.close()
        allocations = [(entry.born, entry.bytes) for entry in ledger.entries]
        frees = [(entry.died, -entry.bytes) for entry in ledger.entries if entry.died is not None]
        self._events = sorted(allocations + frees)
        self._lifetimes = [
            (entry.born, entry.died, entry.bytes)
            for entry in ledger.entries
            if entry.died is not None
            and entry.shape != ()  # numbers that torch wraps are in host memory on a card, too
        ]

    def _read(self, profile: _torch.Profile) -> None:
        """Copy spans and events from torch's profile, without frees of memory allocated before this context."""
        self._ranges = profile.ranges
        allocated = set[int]()
        for address, signed_bytes, when, *_ in profile.events:
            if signed_bytes > 0:
                allocated.add(address)
            elif address in allocated:
                allocated.remove(address)
            else:
                continue  # allocated before this context
            self._events.append((when, signed_bytes))

    def span(self, name: str) -> AbstractContextManager[None]:
        """Attribute allocations and frees within this context to a name."""
        return _torch.marker(name) if self._observer is None else self._span(name, self._observer.ledger)

    @contextmanager
    def _span(self, name: str, ledger: Ledger) -> Iterator[None]:
        """Record the ticks of a ledger's clock between which this context runs, under a name."""
        start = ledger.clock + 1
        yield
        self._ranges[name] = start, ledger.clock

    def peak_bytes(self, name: str) -> int:
        """Return the peak of a span in bytes, relative to its start."""
        return max(self._levels(name))

    def remaining_bytes(self, name: str) -> int:
        """Return the bytes at the end of a span, relative to its start."""
        return self._levels(name)[-1]

    def temporaries(self, name: str) -> tuple[int, ...]:
        """Return the requests for memory without data that a span allocates and frees, in order: a number above 0 of
        bytes, or below 0 to free the memory of the request with that number, from 1."""
        start, end = self._ranges[name]
        in_span = [(born, died, size) for born, died, size in self._lifetimes if start <= born and died <= end and size]
        timed_requests = [(born, size) for born, _, size in in_span]
        timed_requests += [(died, -number) for number, (_, died, _) in enumerate(in_span, start=1)]
        return tuple(request for _, request in sorted(timed_requests))

    def _levels(self, name: str) -> list[int]:
        """Return the allocated bytes relative to the start of a span: 0 first, then after each event in it."""
        start, end = self._ranges[name]
        in_span = (signed_bytes for when, signed_bytes in self._events if start <= when <= end)
        return list(accumulate(in_span, initial=0))


_SEMANTICS = Semantics(cpu.SEMANTICS.temporaries, RESULTS, INSTEAD)
