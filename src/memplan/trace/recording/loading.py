"""Host memory of data loaders: batches of their workers, pinned batches, arrays of their data sets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.records import HOST, HostKind, HostStorage, LoaderUse

_DEPTH = 6
"""Depth of attributes and containers to which a data set is searched for arrays."""
_MOST = 100_000
"""Most objects of a data set that are searched."""


class LoaderWatch:
    """Records passes over data loaders, and storages in pinned and shared memory."""

    def __init__(self, ledger: Ledger, *, pins: bool) -> None:
        """``pins``: whether there is a card, so that loaders with ``pin_memory=True`` pin."""
        self._ledger = ledger
        self._pins = pins
        self._is_loading = False
        """Whether a batch is being loaded: loaders within loaders are not passes of the step."""
        self._passes: list[_Pass] = []
        """All passes over loaders so far."""
        self._data_sets = ObjectNumbers()
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """By live iterator: its loader."""
        self.kinds: dict[int, HostKind] = {}
        """Storage -> the kind of its host memory, if that is not from torch's CPU allocator."""

    def mark(self, tensor: torch.Tensor, kind: HostKind) -> None:
        """Note the kind of host memory of a tensor."""
        entry = self._ledger.find(tensor)
        if entry is not None:
            self.kinds[entry.id] = kind

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        entry = self._ledger.find(tensor)
        return entry is not None and self.kinds.get(entry.id) == "pinned"

    def iterates(self, loader: Any, iterator: Any) -> None:
        """Note a new iterator over a loader."""
        self._loaders[iterator] = loader

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context, record the batches of all loaders."""

        def load(iterator: Any, fetch: Callable[[], Any]) -> Any:
            loader = self._loaders.get(iterator)
            return fetch() if loader is None else self.load(loader, fetch, iterator)

        with _torch.around_batches(load):
            yield

    def load(self, loader: Any, fetch: Callable[[], Any], iterator: Any, length: int | None = None) -> Any:
        """Return the batch that ``fetch`` returns, and record its bytes. Nested calls record nothing.

        Args:
            loader: a `DataLoader`; batches of other objects are not recorded.
            fetch: loads the batch, or raises StopIteration.
            iterator: the iterator over the loader, with which the pass ends at the latest.
            length: number of batches of the pass, if it is not the loader's.
        """
        if self._is_loading or not isinstance(loader, DataLoader):
            return fetch()
        pass_ = self._pass_of(loader, iterator)
        start, self._is_loading = self._ledger.clock, True
        try:
            batch = fetch()
        except StopIteration:
            pass_.exhausted.append(self._ledger.clock)
            if not pass_.persistent:
                pass_.end_with(self._ledger.clock)
            raise
        finally:
            self._is_loading = False
        pass_.length = pass_.length if length is None else length
        pass_.loads.append((start, self._ledger.clock))
        sizes = self._note_batch(batch, pass_, start)
        if sum(sizes) > sum(pass_.batch):
            pass_.batch = sizes
        return batch

    def _pass_of(self, loader: Any, iterator: Any) -> _Pass:
        """Return the pass of an iterator over a loader, which begins at the first batch. With persistent workers, all
        passes over the loader count as a single pass."""
        persistent = loader.num_workers > 0 and loader.persistent_workers
        source = loader if persistent else iterator
        for pass_ in self._passes:
            if pass_.source() is source and pass_.end is None:
                return pass_
        pass_ = _Pass(loader, self._data_sets.number_of(loader.dataset), self._pins, self._ledger.clock)
        pass_.persistent = persistent
        pass_.arrays, pass_.tensors = self._contents_of(loader.dataset)
        pass_.source = weakref.ref(source, lambda _: pass_.end_with(self._ledger.clock))
        self._passes.append(pass_)
        return pass_

    def _note_batch(self, batch: Any, pass_: _Pass, start: int) -> tuple[int, ...]:
        """Return the bytes of a batch's storages, and mark those allocated since the tick ``start`` as shared or pinned
        memory."""
        sizes = dict[int, int]()  # storage -> bytes
        if hasattr(batch, "keys") and not isinstance(batch, dict):
            batch = dict(batch)  # torch's pytrees know no other mapping
        for leaf in _torch.tree_leaves(batch):
            if not isinstance(leaf, torch.Tensor):
                continue
            entry = self._ledger.find(leaf)
            if entry is None:
                continue
            sizes[entry.id] = leaf.untyped_storage().nbytes()
            if entry.born > start and entry.device == HOST and (pass_.pinned or pass_.workers):
                self.kinds[entry.id] = "pinned" if pass_.pinned else "shared"
        return tuple(sizes.values())

    def _contents_of(self, data_set: Any) -> tuple[int, tuple[int, ...]]:
        """Search a data set's attributes and containers for arrays and tensors.

        Returns:
            The bytes of its numpy arrays, including tensors with an array's memory, which the ledger does not count;
            and the storages of its other tensors on the host.
        """
        seen = set[int]()
        total, storages = 0, set[int]()
        stack: list[tuple[Any, int]] = [(data_set, 0)]  # (object, depth)
        while stack and len(seen) < _MOST:
            value, depth = stack.pop()
            if id(value) in seen or depth > _DEPTH:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                entry = self._ledger.find(value)
                if entry is not None and entry.foreign:
                    total += value.untyped_storage().nbytes()
                elif entry is not None and entry.device == HOST:
                    storages.add(entry.id)
            elif isinstance(value, numpy.ndarray):
                owner = value
                while isinstance(owner.base, numpy.ndarray):  # a view
                    owner = owner.base
                if id(owner) not in seen or owner is value:
                    seen.add(id(owner))
                    total += 0 if isinstance(owner, numpy.memmap) else owner.nbytes
            elif isinstance(value, dict):
                stack += [(part, depth + 1) for part in value.values()]
            elif isinstance(value, (list, tuple)):
                stack += [(part, depth + 1) for part in value]
            elif not isinstance(value, (torch.nn.Module, type)) and hasattr(value, "__dict__"):
                stack += [(part, depth + 1) for part in vars(value).values()]
        return total, tuple(sorted(storages))

    def rows(self) -> tuple[LoaderUse, ...]:
        """Return the passes over loaders, in the order in which they began."""
        return tuple(pass_.row() for pass_ in self._passes if pass_.loads)

    def host(self) -> tuple[HostStorage, ...]:
        """Return the storages in pinned or shared memory."""
        return tuple(HostStorage(storage, kind) for storage, kind in sorted(self.kinds.items()))


class ObjectNumbers:
    """Numbers of objects, in the order in which they are first seen. The objects are not kept alive."""

    def __init__(self) -> None:
        self._identities: list[Callable[[Any], bool]] = []
        """By number: whether an object is the one with this number (`_identifies`)."""

    def number_of(self, thing: Any) -> int:
        """Return the number that identifies an object."""
        for number, is_it in enumerate(self._identities):
            if is_it(thing):
                return number
        self._identities.append(_identifies(thing))
        return len(self._identities) - 1


class _Pass:
    """A pass over a loader, so far."""

    def __init__(self, loader: Any, data_set: int, pins: bool, tick: int) -> None:
        """Begin a pass at a tick. Attributes without a description are fields of `LoaderUse`, which describes them.

        Args:
            loader: a `DataLoader`.
            data_set: number that identifies its data set.
            pins: whether there is a card, so that a loader with ``pin_memory=True`` pins.
            tick: allocations and frees before.
        """
        self.source: Callable[[], Any] = lambda: None
        """Returns the object with whose lifetime the pass ends: the iterator or, with persistent workers, the loader;
        None after the end."""
        self.persistent = False
        """Whether its workers outlive exhausted iterators."""
        self.where = format_frame(user_frame())
        self.start = tick
        self.end: int | None = None
        self.workers: int = loader.num_workers
        self.prefetch: int = (loader.prefetch_factor or 0) if self.workers else 0
        processes = loader.multiprocessing_context or torch.multiprocessing
        self.start_method = str(processes.get_start_method()) if self.workers else ""
        self.pinned = bool(loader.pin_memory) and pins
        self.data_set = data_set
        self.arrays = 0
        self.tensors: tuple[int, ...] = ()
        self.batch: tuple[int, ...] = ()
        self.loads: list[tuple[int, int]] = []
        self.exhausted: list[int] = []
        self.length = _length(loader)

    def end_with(self, tick: int) -> None:
        if self.end is None:  # a pass ends once: with its last batch, or with its iterator
            self.end = tick

    def row(self) -> LoaderUse:
        return LoaderUse(
            where=self.where, start=self.start, end=self.end, workers=self.workers, prefetch=self.prefetch,
            start_method=self.start_method, pinned=self.pinned, data_set=self.data_set, arrays=self.arrays,
            tensors=self.tensors, batch=self.batch, loads=tuple(self.loads), exhausted=tuple(self.exhausted),
            length=self.length,
        )  # fmt: skip


def _identifies(thing: Any) -> Callable[[Any], bool]:
    """Return a function that returns whether an object is this one, which it does not keep alive. Lists and other
    objects without weak references are compared by ``id()``."""
    try:
        reference = weakref.ref(thing)
    except TypeError:
        number = id(thing)
        return lambda other: id(other) == number
    return lambda other: reference() is other


def _length(loader: Any) -> int | None:
    """Return the number of batches of a loader; None if ``len()`` raises, as for a stream."""
    try:
        return len(loader)
    except Exception:
        return None
