"""The book of a recording: which storages there are, when each was born and when it died."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.trace.records import HOST, ON_CARD, Phase
from memplan.trace.semantics.kinds import Asked


@dataclass(slots=True)
class Entry:
    """A storage while the recording runs."""

    id: int
    bytes: int
    born: int
    op: int | None
    dtype: str
    shape: tuple[int, ...]
    died: int | None = None
    key: int = 0
    address: int = 0
    """Of the data, where the allocation is a real one."""
    foreign: bool = False
    """Memory that torch's allocator does not know, such as numpy's; it counts for 0 bytes."""
    device: str = HOST
    stream: int = 0
    used_on: tuple[int, ...] = ()
    low: int | None = None
    companions: tuple[Entry, ...] = ()
    """Storages that no tensor shows and that die with this one, such as a reserve that a library keeps."""
    asked: Asked | None = None
    """What a library is asked for its size when the recording is over."""
    reference: Any = None


@dataclass(slots=True)
class Note:
    """An op while the recording runs."""

    name: str
    phase: Phase
    step: int
    module: int
    frame: tuple[str, int] | None
    start: int
    end: int
    reads: list[tuple[str, int]]
    writes: list[int]
    needs_grad: tuple[str, ...]
    sequence: int | None
    """For a backward op, the sequence number of the node that runs it."""
    grad_enabled: bool
    stream: int = 0
    """Number of the card's stream that it runs on."""


class _Reference(weakref.ref[Any]):
    """A weak reference that knows its entry; its callback runs the moment C++ frees the storage."""

    __slots__ = ("entry",)

    entry: Entry


class Ledger:
    """Births and deaths of storages on a clock of allocator events."""

    def __init__(self, *, real: bool, card: bool = False) -> None:
        self.real = real
        self.card = card
        """Whether real storages may lie on a card."""
        self.clock = 0
        self.entries: list[Entry] = []
        self._live: dict[int, Entry] = {}
        self._closed = False
        self.device = HOST
        """Where a storage that is born now lies, and the stream it is made on."""
        self.stream = 0
        self.before = 0
        """Bytes of tensors that were there before."""
        self.level = self.most = 0
        """Bytes on the card now and at most, in blocks of 512."""

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """Return the entry of the tensor's storage, if it is known."""
        if tensor.layout != torch.strided:
            tensor = _torch.sparse_parts(tensor)[-1]
        elif not _torch.has_shape(tensor):
            return None
        return self._live.get(_torch.storage_key(_torch.unwrapped(tensor).untyped_storage()))

    def entry(self, tensor: torch.Tensor, op: int | None) -> Entry:
        """Return the entry of the tensor's storage; a storage never seen before is born now, in ``op``.

        Of a sparse tensor, the entry is that of its values; its indices get one of their own.
        """
        if tensor.layout != torch.strided:
            return self.parts(tensor, op)[-1]
        storage = tensor.untyped_storage()
        key = _torch.storage_key(storage)
        entry = self._live.get(key)
        return entry if entry is not None else self._born(storage, key, tensor, op)

    def parts(self, tensor: torch.Tensor, op: int | None) -> list[Entry]:
        """Return the entries of all that a tensor is made of: of a sparse one its indices, then its values."""
        if tensor.layout == torch.strided:
            return [self.entry(tensor, op)]
        return [self.entry(part, op) for part in _torch.sparse_parts(tensor)]

    def resized(self, tensor: torch.Tensor, op: int) -> None:
        """Note a storage that was resized in place as another allocation: the new one is made, then the old one
        freed."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(_torch.storage_key(storage))
        if entry is None or entry.foreign or entry.bytes == storage.nbytes():
            return
        entry.reference = None
        self._born(storage, entry.key, tensor, op)
        self.end(entry)

    def foreign(self, tensor: torch.Tensor, op: int | None) -> None:
        """Note a tensor over memory that torch's allocator did not give."""
        entry = self.entry(tensor, op)
        entry.bytes, entry.foreign = 0, True

    def outside(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Note a tensor that was there before the recording, and what stands for it: neither counts."""
        real = [entry for entry in self.parts(tensor, None) if entry.op is None]
        self.before += sum(entry.bytes for entry in real)
        for entry in (*real, *self.parts(fake, None)):
            if entry.op is None:
                entry.bytes, entry.foreign = 0, True

    def lifted(self, source: torch.Tensor, result: torch.Tensor, op: int) -> None:
        """Note what `torch.tensor` copies, whose result counts, or what `torch.from_numpy` reads, in numpy's memory."""
        self.foreign(source, op)
        if not source.untyped_storage().resizable():
            self.foreign(result, op)

    def take_to(self, device: str) -> None:
        """Put every storage on a device, and every one to come."""
        self.device = device
        for entry in self.entries:
            if entry.died is None and entry.device == HOST:
                entry.device = device
                self._changed(entry.bytes)
            entry.device = device

    def hidden(
        self,
        size: int,
        op: int,
        *,
        low: int | None = None,
        owner: torch.Tensor | None = None,
        asked: Asked | None = None,
    ) -> Entry:
        """Return a storage that no tensor shows: it dies with ``owner``'s, or when `end` says so, or never."""
        entry = self._add(size, op, "", ())
        entry.low, entry.asked = low, asked
        if owner is not None:
            self.entry(owner, op).companions += (entry,)
        return entry

    def end(self, entry: Entry) -> None:
        """Free a hidden storage."""
        if entry.device != HOST:
            self._changed(-entry.bytes)
        self.clock += 1
        entry.died = self.clock

    def close(self) -> None:
        """Stop recording deaths."""
        self._closed = True
        for entry in self.entries:
            entry.reference = None

    def _add(self, size: int, op: int | None, dtype: str, shape: tuple[int, ...]) -> Entry:
        self.clock += 1
        entry = Entry(len(self.entries), size, self.clock, op, dtype, shape, device=self.device, stream=self.stream)
        self.entries.append(entry)
        if entry.device != HOST:
            self._changed(entry.bytes)
        return entry

    def _changed(self, size: int) -> None:
        self.level += round_to_blocks(size) if size > 0 else -round_to_blocks(-size)
        self.most = max(self.most, self.level)

    def _born(self, storage: torch.UntypedStorage, key: int, tensor: torch.Tensor, op: int | None) -> Entry:
        entry = self._add(storage.nbytes(), op, str(tensor.dtype)[6:], tuple(tensor.shape))
        reference = _Reference(storage, self._on_death)
        reference.entry = entry
        entry.reference, entry.key = reference, key
        traced = self.real and isinstance(tensor, _torch.FakeTensor)  # by what the step itself compiles or plans
        if traced or tensor.device.type == "meta":  # sizes without memory
            entry.bytes, entry.foreign = 0, True
        elif self.real:
            if tensor.is_cuda:
                entry.device = ON_CARD
            if _torch.is_zero(tensor):  # a gradient of which torch knows that it is zero has no memory
                entry.bytes, entry.foreign = 0, True
            elif "" in _torch.inner_tensors(tensor):
                entry.address = storage.data_ptr()
            else:  # all of its memory is that of the tensors that it is made of
                entry.bytes, entry.foreign = 0, True
        self._live[key] = entry
        return entry

    def _on_death(self, reference: Any) -> None:
        entry = reference.entry
        if self._closed or entry.reference is not reference:
            return
        if entry.device != HOST:
            self._changed(-entry.bytes)
        self.clock += 1
        entry.died = self.clock
        entry.reference = None
        if self._live.get(entry.key) is entry:
            del self._live[entry.key]
        for companion in entry.companions:
            self.end(companion)
