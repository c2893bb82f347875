"""Leak detection: storages allocated at the same place of several steps that are not freed after their step."""

from __future__ import annotations

import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memplan import _torch
from memplan.integrations.watching.holding import NOBODY, Owner, Owners, tensors_on
from memplan.integrations.watching.rows import Leak
from memplan.integrations.watching.window import OBSERVED, Subject, Window
from memplan.trace.recording.ledger import Entry
from memplan.trace.records import Op

_Place = tuple[str | None, str, str]
"""Line, layer and op."""


@dataclass(slots=True)
class _Group:
    """Storages allocated at the same place that outlived their step."""

    alive: list[Entry] = field(default_factory=list[Entry])
    """Not freed yet."""
    collected: list[Entry] = field(default_factory=list[Entry])
    """Freed by the garbage collector, so they were part of a reference cycle."""
    bounded: bool = False
    """Whether a storage was freed after more than one further step, as in a list of bounded length: no leak."""

    @property
    def entries(self) -> list[Entry]:
        return [*self.alive, *self.collected]


@dataclass(frozen=True, slots=True)
class DetectedLeak:
    """A leak, with weak references to its storages."""

    leak: Leak
    storages: tuple[weakref.ref[Any], ...]

    @property
    def is_over(self) -> bool:
        """Whether all its storages have been freed by now. Always False for a reference cycle."""
        return not self.leak.cycle and all(storage() is None for storage in self.storages)


def find_leaks(window: Window, subject: Subject) -> list[DetectedLeak]:
    """Return the leaks of a window; [] before the step after its observed ones has ended."""
    if window.recorded is None or window.ended <= OBSERVED:
        return []
    groups = {
        place: group for place, group in _groups(window, subject).items()
        if not group.bounded and len({window.step_of(entry) for entry in group.entries}) > 1
    }  # fmt: skip
    if not groups:
        return []
    owners = _owners(groups, subject)
    before_collection = window.observer.ledger.clock
    gc.collect()
    saved = [place for place in groups if owners[place].owner is NOBODY]  # by autograd graphs
    with_graph = [place for place in groups if owners[place].has_graph and place not in saved]
    leaks = list[DetectedLeak]()
    for place, group in groups.items():
        if place in saved and with_graph:
            continue  # counted with the tensors whose graphs save these
        saved_groups = [groups[saved_place] for saved_place in saved] if place in with_graph[:1] else []
        leaks.append(_detected(window, place, group, owners[place].owner, saved_groups, before_collection))
    return leaks


def _groups(window: Window, subject: Subject) -> dict[_Place, _Group]:
    """Return the storages allocated in the observed steps that outlived their step, by where they were allocated."""
    assert window.recorded is not None
    ops, marks = window.recorded.ops, window.observer.ownership
    resident = {
        _torch.storage_key(tensor.untyped_storage()) for tensor in subject.resident() if tensor.layout == torch.strided
    }
    readers = _first_readers(ops)
    groups: dict[_Place, _Group] = defaultdict(_Group)
    for entry in window.observer.ledger.entries:
        step = window.step_of(entry)
        is_state = entry.id in marks.weights or entry.id in marks.buffers or entry.id in marks.states
        if not 0 <= step < OBSERVED or is_state or (entry.died is None and entry.key in resident) or not entry.key:
            continue
        op_index = entry.op if entry.op is not None else readers.get(entry.id)
        op = None if op_index is None else ops[op_index]
        place = ("", "", "") if op is None else (op.where, op.layer, op.name)
        if entry.died is None:
            groups[place].alive.append(entry)
        elif any(begin < entry.died <= end for begin, end in window.collected):
            groups[place].collected.append(entry)
        elif entry.died > window.bounds[step + 2]:  # the end of the step after it
            groups[place].bounded = True
    return groups


def _first_readers(ops: Iterable[Op]) -> dict[int, int]:
    """Map each storage to the index of the first op that reads it: it stands for the op of storages that none
    allocated."""
    readers: dict[int, int] = {}
    for op in ops:
        for operand in op.reads:
            readers.setdefault(operand.storage, op.index)
    return readers


class _FoundOwner(NamedTuple):
    """The owner of a storage, and whether a tensor on the storage has a ``grad_fn``."""

    owner: Owner
    has_graph: bool


def _owners(groups: dict[_Place, _Group], subject: Subject) -> dict[_Place, _FoundOwner]:
    """Return the owner of each place's oldest storage."""
    oldest = {place: group.alive[0].key for place, group in groups.items() if group.alive}
    tensors = tensors_on(set(oldest.values()))
    owners = Owners(subject.models)
    by_place: dict[_Place, _FoundOwner] = {}
    for place in groups:
        aliases = tensors.get(oldest.get(place, 0), [])
        no_tensor = NOBODY if place in oldest else Owner("a reference cycle")
        owner = owners.of(aliases) if aliases else no_tensor
        by_place[place] = _FoundOwner(owner, any(tensor.grad_fn is not None for tensor in aliases))
    return by_place


def _detected(
    window: Window, place: _Place, group: _Group, owner: Owner, saved_groups: list[_Group], before_collection: int
) -> DetectedLeak:
    """Return the leak at a place. What the autograd graphs of its tensors save (``saved_groups``) counts as its bytes.
    What was freed after the tick ``before_collection``, at which garbage was collected, was in a reference cycle."""
    entries = group.entries
    steps = sorted({window.step_of(entry) for entry in entries})
    cycle = all(entry.died is not None and entry.died > before_collection for entry in group.alive)
    size = sum(entry.bytes for counted in (group, *saved_groups) for entry in counted.entries)
    text = f"a reference cycle, by {owner.text}" if cycle and group.alive else owner.text
    where, layer, op = place
    leak = Leak(
        where, layer, op, entries[0].shape, entries[0].dtype, math.ceil(len(entries) / len(steps)), size // len(steps),
        tuple(window.first + step for step in steps), text, owner.stored_at, window.first + OBSERVED, cycle,
    )  # fmt: skip
    storages = (entry.reference() for entry in group.alive if entry.reference is not None)
    return DetectedLeak(leak, tuple(weakref.ref(storage) for storage in storages if storage is not None))
