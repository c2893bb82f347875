"""The ledger of a recording: every storage with the ticks of its allocation and free."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.trace.records import HOST, ON_CARD, Phase
from memplan.trace.semantics.kinds import WorkspaceQuery


@dataclass(slots=True)
class Entry:
    """A storage during a recording."""

    id: int
    """Its index among all storages."""
    bytes: int
    born: int
    """Tick of its allocation."""
    op: int | None
    """Index of the op that allocated it; None for no op."""
    dtype: str
    shape: tuple[int, ...]
    died: int | None = None
    """Tick of its free; None while it is alive."""
    key: int = 0
    """Identifies the storage while it is alive (`_torch.storage_key`)."""
    address: int = 0
    """Address of the data of a real storage."""
    foreign: bool = False
    """Whether the memory is not from torch's allocator, such as numpy's; ``bytes`` is 0 then."""
    device: str = HOST
    stream: int = 0
    """Number of the CUDA stream that allocated it."""
    pool: int = 0
    """Number of its memory pool; 0 for the default pool."""
    used_on: tuple[int, ...] = ()
    """Other streams that it was used on (`torch.Tensor.record_stream`)."""
    low: int | None = None
    """The least bytes, if the size is only known as an interval."""
    companions: tuple[Entry, ...] = ()
    """Storages without a tensor that are freed with this storage, such as a library's reserve space."""
    query: WorkspaceQuery | None = None
    """Query to cuDNN about the size, sent after the recording."""
    reference: Any = None


@dataclass(slots=True)
class Note:
    """An op during a recording."""

    name: str
    phase: Phase
    step: int
    module: int
    """id() of the module that runs; 0 for none."""
    frame: tuple[str, int] | None
    """File and line of the user's code."""
    start: int
    end: int
    """Ticks of the ledger before and after the op."""
    reads: list[tuple[str, int]]
    """(name of the argument, storage)."""
    writes: list[int]
    """Storages that it allocates or changes."""
    needs_grad: tuple[str, ...]
    """Names of the arguments that require a gradient."""
    sequence: int | None
    """For a backward op, the sequence number of its autograd node."""
    grad_enabled: bool
    stream: int = 0
    """Number of the CUDA stream on which it runs."""


class _Reference(weakref.ref[Any]):
    """A weak reference to a storage, with its entry. The callback runs when C++ frees the storage."""

    __slots__ = ("entry",)

    entry: Entry


class Ledger:
    """Records each storage's allocation and free, in ticks of a clock that counts allocator events.

    Storages enter by their tensors (`entry`), or without one (`allocate_hidden`); a weak reference notes the free.
    """

    def __init__(self, *, real: bool, card: bool = False) -> None:
        self.real = real
        """Whether storages have memory, as in a measurement; a recording's are fake."""
        self.card = card
        """Whether real storages may be on a card."""
        self.clock = 0
        """Allocations and frees so far."""
        self.entries: list[Entry] = []
        """All storages in the order of their allocation."""
        self._live: dict[int, Entry] = {}
        """Storage key -> entry, of live storages with a tensor."""
        self._closed = False
        """Whether the recording has ended: frees no longer count."""
        self.device = HOST
        """Device of new storages."""
        self.stream = 0
        """CUDA stream of new storages."""
        self.pool = 0
        """Private memory pool of a CUDA graph that is captured; 0 outside of a capture."""
        self.outside_bytes = 0
        """Bytes of tensors that existed before the recording."""
        self.level = self.peak = 0
        """Current and peak bytes on the card, in blocks of 512."""
        self._reordered: list[Entry] | None = None
        """Storages freed so far within `freed_in_order`; None outside of it."""

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """Return the entry of the tensor's storage, or None."""
        if tensor.layout != torch.strided:
            tensor = _torch.sparse_parts(tensor)[-1]
        elif not _torch.has_shape(tensor):
            return None
        return self._live.get(_torch.storage_key(_torch.unwrapped(tensor).untyped_storage()))

    def entry(self, tensor: torch.Tensor, op: int | None) -> Entry:
        """Return the entry of the tensor's storage; a new storage is allocated now, by ``op``.

        For a sparse tensor it is the entry of the values; the indices get an entry, too.
        """
        tensor = _torch.unwrapped(tensor)
        if tensor.layout != torch.strided:
            return self.parts(tensor, op)[-1]
        storage = tensor.untyped_storage()
        key = _torch.storage_key(storage)
        entry = self._live.get(key)
        return entry if entry is not None else self._allocate(storage, key, tensor, op)

    def parts(self, tensor: torch.Tensor, op: int | None) -> list[Entry]:
        """Return the entries of a tensor's storages: for a sparse tensor those of its indices, then of its values."""
        if tensor.layout == torch.strided:
            return [self.entry(tensor, op)]
        return [self.entry(part, op) for part in _torch.sparse_parts(tensor)]

    def reallocate_resized(self, tensor: torch.Tensor, op: int) -> None:
        """If the tensor's storage was resized in place, record an allocation of the new size, and a free of the old."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(_torch.storage_key(storage))
        if entry is None or entry.foreign or entry.bytes == storage.nbytes():
            return
        entry.reference = None
        self._allocate(storage, entry.key, tensor, op)
        self.free(entry)

    def resize(self, storage: torch.UntypedStorage, size: int, resize: Callable[..., Any]) -> Any:
        """Return ``resize(storage, size)``, and record an allocation of the new size, then a free of the old. Sharded
        parameters free their gathered weights in this way."""
        key = _torch.storage_key(storage)
        entry = self._live.get(key)
        if entry is None or entry.foreign or entry.bytes == size:
            return resize(storage, size)
        entry.reference = None
        result = resize(storage, size)
        device, stream = self.device, self.stream
        self.device, self.stream = entry.device, entry.stream
        self._watch(self._add(size, entry.op, entry.dtype, entry.shape), storage, key)
        self.device, self.stream = device, stream
        self.free(entry)
        return result

    def register_foreign(self, tensor: torch.Tensor, op: int | None) -> None:
        """Register a tensor whose memory is not from torch's allocator."""
        entry = self.entry(tensor, op)
        entry.bytes, entry.foreign = 0, True

    def register_outside(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Register a tensor that existed before the recording, and its fake tensor: neither counts."""
        real = [entry for entry in self.parts(tensor, op=None) if entry.op is None]
        self.outside_bytes += sum(entry.bytes for entry in real)
        for entry in (*real, *self.parts(fake, op=None)):
            if entry.op is None:
                entry.bytes, entry.foreign = 0, True

    def register_lifted(self, source: torch.Tensor, result: torch.Tensor, op: int) -> None:
        """Register the tensors of ``aten.lift_fresh``. The source, memory of Python or numpy, does not count. The
        result counts for `torch.tensor`, but not for `torch.from_numpy`, where it shares the source's memory."""
        self.register_foreign(source, op)
        if not source.untyped_storage().resizable():
            self.register_foreign(result, op)

    def move_all(self, device: str) -> None:
        """Move all storages to a device, which is also the device of new storages."""
        self.device = device
        for entry in self.entries:
            if entry.died is None and entry.device == HOST:
                entry.device = device
                self._change_level(entry.bytes)
            entry.device = device

    def allocate_hidden(
        self,
        size: int,
        op: int | None,
        *,
        low: int | None = None,
        owner: torch.Tensor | None = None,
        query: WorkspaceQuery | None = None,
    ) -> Entry:
        """Record a storage without a tensor, freed with the storage of ``owner``, by `free`, or never."""
        entry = self._add(size, op, "", ())
        entry.low, entry.query = low, query
        if owner is not None:
            self.entry(owner, op).companions += (entry,)
        return entry

    def free(self, entry: Entry) -> None:
        """Record the free of a storage."""
        if entry.device != HOST:
            self._change_level(-entry.bytes)
        self.clock += 1
        entry.died = self.clock
        if self._reordered is not None:
            self._reordered.append(entry)

    @contextmanager
    def freed_in_order(self) -> Iterator[None]:
        """Record storages freed in this context in the order of their allocation, since torch's own order is arbitrary.
        Nothing may be allocated in the context."""
        self._reordered = freed = []
        try:
            yield
        finally:
            self._reordered = None
            ticks = sorted(entry.died for entry in freed if entry.died is not None)
            for entry, tick in zip(sorted(freed, key=lambda entry: entry.id), ticks, strict=True):
                entry.died = tick

    def close(self) -> None:
        """Stop recording frees: live storages stay live to the end of the trace."""
        self._closed = True
        for entry in self.entries:
            entry.reference = None

    def _add(self, size: int, op: int | None, dtype: str, shape: tuple[int, ...]) -> Entry:
        """Add an entry for a new storage on the ledger's current device and stream."""
        self.clock += 1
        entry = Entry(
            id=len(self.entries), bytes=size, born=self.clock, op=op, dtype=dtype, shape=shape,
            device=self.device, stream=self.stream, pool=self.pool,
        )  # fmt: skip
        self.entries.append(entry)
        if entry.device != HOST:
            self._change_level(entry.bytes)
        return entry

    def _change_level(self, size: int) -> None:
        """Add bytes that were allocated on the card to the level; ``size`` is negative for bytes that were freed."""
        self.level += round_to_blocks(size) if size > 0 else -round_to_blocks(-size)
        self.peak = max(self.peak, self.level)

    def _allocate(self, storage: torch.UntypedStorage, key: int, tensor: torch.Tensor, op: int | None) -> Entry:
        """Add an entry for a new storage and watch for its free. Storages without memory of their own get 0 bytes."""
        entry = self._add(storage.nbytes(), op, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self._watch(entry, storage, key)
        is_traced = self.real and isinstance(tensor, _torch.FakeTensor)  # the step itself compiles or plans
        if is_traced or tensor.device.type == "meta":  # tensors without memory
            entry.bytes, entry.foreign = 0, True
        elif self.real:
            if tensor.is_cuda:
                entry.device = ON_CARD
            if _torch.is_zero(tensor):  # a gradient known to be zero has no memory
                entry.bytes, entry.foreign = 0, True
            elif "" in _torch.inner_tensors(tensor):  # the tensor itself: it is no wrapper subclass
                entry.address = storage.data_ptr()
            else:  # a wrapper subclass: its memory is that of its inner tensors
                entry.bytes, entry.foreign = 0, True
        return entry

    def _watch(self, entry: Entry, storage: torch.UntypedStorage, key: int) -> None:
        """Make an entry that of a storage until C++ frees the storage."""
        reference = _Reference(storage, self._on_free)
        reference.entry = entry
        entry.reference, entry.key = reference, key
        self._live[key] = entry

    def _on_free(self, reference: Any) -> None:
        """Record that C++ freed a storage, and its companions."""
        entry = reference.entry
        if self._closed or entry.reference is not reference:
            return
        self.free(entry)
        entry.reference = None
        if self._live.get(entry.key) is entry:
            del self._live[entry.key]
        for companion in entry.companions:
            self.free(companion)
