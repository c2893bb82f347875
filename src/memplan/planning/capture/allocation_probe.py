"""Measure how much memory calls take: from the allocator's own events where they really run, else as a recording
counts."""

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
    """Record of what is allocated while it is entered. Ask for a span's bytes after it is left.

    Really run, it goes by what the CPU's allocator tells torch's profiler, of which there can be one at a time: what a
    library takes inside of an op of its own is seen, too. Tensors without data are counted as in a recording.

    Example:
        >>> with Allocations(real=True) as taken, taken.span("call"):
        ...     y = x.exp().sum()
        >>> taken.most("call"), taken.left("call")
    """

    def __init__(self, *, real: bool) -> None:
        """``real``: tensors have data. If not, those that are made while it is entered have none."""
        self._profile = _torch.memory_profile()
        self._observer = None if real else Observer(Place(), real=False, semantics=_SEMANTICS)
        self._stack = ExitStack()
        self._ranges: dict[str, tuple[int, int]] = {}
        self._events: list[tuple[int, int]] = []
        """(when, bytes; negative where they are freed), in order."""

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
        born = [(entry.born, entry.bytes) for entry in ledger.entries]
        died = [(entry.died, -entry.bytes) for entry in ledger.entries if entry.died is not None]
        self._events = sorted(born + died)

    def _read(self, record: _torch.Profile) -> None:
        self._ranges = record.ranges
        made = set[int]()
        for address, size, when, *_ in record.events:
            if size > 0:
                made.add(address)
            elif address not in made:
                continue  # it was there before
            else:
                made.remove(address)
            self._events.append((when, size))

    def span(self, name: str) -> AbstractContextManager[None]:
        """Attribute what is allocated and freed in this context to a name."""
        return _torch.marker(name) if self._observer is None else self._span(name, self._observer.ledger)

    @contextmanager
    def _span(self, name: str, ledger: Ledger) -> Iterator[None]:
        start = ledger.clock + 1
        yield
        self._ranges[name] = start, ledger.clock

    def most(self, name: str) -> int:
        """Return the most bytes at any time in a span beyond those at its start."""
        return max(self._levels(name))

    def left(self, name: str) -> int:
        """Return the bytes at a span's end beyond those at its start."""
        return self._levels(name)[-1]

    def _levels(self, name: str) -> list[int]:
        start, end = self._ranges[name]
        return list(accumulate((size for when, size in self._events if start <= when <= end), initial=0))


_SEMANTICS = Semantics(cpu.SEMANTICS.extras, RESULTS, INSTEAD)
