"""Which storages of a window outlive their steps, one step after another: what is alive at one place of two steps."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from memplan import _torch
from memplan.integrations.watching.holding import NOBODY, Holder, Holders, tensors_on
from memplan.integrations.watching.rows import Leak
from memplan.integrations.watching.window import OBSERVED, Subject, Window
from memplan.trace.recording.ledger import Entry
from memplan.trace.records import Op

_Place = tuple[str | None, str, str]
"""Line, layer and op."""


@dataclass(slots=True)
class _Group:
    """Storages that were born at one place."""

    alive: list[Entry] = field(default_factory=list[Entry])
    """Born in a step before the last one, and still there."""
    collected: list[Entry] = field(default_factory=list[Entry])
    """Freed by the garbage collector: a cycle held them."""
    bounded: bool = False
    """Whether one outlived two steps and was freed then, so that no more than a few are ever held."""


@dataclass(frozen=True, slots=True)
class Found:
    """A leak, and the storages that show it."""

    leak: Leak
    witnesses: tuple[weakref.ref[Any], ...]

    @property
    def is_over(self) -> bool:
        """Return whether all of them are gone by now."""
        return not self.leak.cycle and all(witness() is None for witness in self.witnesses)


def find_leaks(window: Window, subject: Subject) -> list[Found]:
    """Return what leaks in a window, once the step after the observed ones has ended."""
    if window.parts is None or window.ended <= OBSERVED:
        return []
    groups = {
        place: group for place, group in _groups(window, subject).items()
        if not group.bounded and len({window.step_of(entry) for entry in (*group.alive, *group.collected)}) > 1
    }  # fmt: skip
    if not groups:
        return []
    held = _holders(groups, subject)
    before = window.observer.ledger.clock
    gc.collect()
    found = list[Found]()
    graphs = [place for place in groups if held[place][0] is NOBODY]
    owners = [place for place in groups if held[place][1] and place not in graphs]
    for place, group in groups.items():
        if place in graphs and owners:
            continue  # what these graphs hold is counted with the tensors whose graphs they are
        beside = [groups[one] for one in graphs if owners and place == owners[0]]
        found.append(_found(window, place, group, held[place][0], beside, before))
    return found


def _groups(window: Window, subject: Subject) -> dict[_Place, _Group]:
    """Return the storages of the observed steps that outlived one, by where they were born."""
    assert window.parts is not None
    ops, marks = window.parts.ops, window.observer.ownership
    owned = {_torch.storage_key(one.untyped_storage()) for one in subject.resident() if one.layout == torch.strided}
    readers = _first_readers(ops)
    groups: dict[_Place, _Group] = defaultdict(_Group)
    for entry in window.observer.ledger.entries:
        step = window.step_of(entry)
        kept = entry.id in marks.weights or entry.id in marks.buffers or entry.id in marks.states
        if not 0 <= step < OBSERVED or kept or (entry.died is None and entry.key in owned) or not entry.key:
            continue
        number = entry.op if entry.op is not None else readers.get(entry.id)
        op = None if number is None else ops[number]
        place = ("", "", "") if op is None else (op.where, op.layer, op.name)
        if entry.died is None:
            groups[place].alive.append(entry)
        elif any(begin < entry.died <= end for begin, end in window.collected):
            groups[place].collected.append(entry)
        elif entry.died > window.bounds[step + 2]:
            groups[place].bounded = True
    return groups


def _first_readers(ops: Iterable[Op]) -> dict[int, int]:
    """Return the first op that reads each storage: of what no op made, the place where it was met."""
    found: dict[int, int] = {}
    for op in ops:
        for operand in op.reads:
            found.setdefault(operand.storage, op.index)
    return found


def _holders(groups: dict[_Place, _Group], subject: Subject) -> dict[_Place, tuple[Holder, bool]]:
    """Return who holds the oldest storage of each place, and whether that has a graph."""
    oldest = {place: group.alive[0].key for place, group in groups.items() if group.alive}
    tensors = tensors_on(set(oldest.values()))
    holders = Holders(subject.models)
    answers: dict[_Place, tuple[Holder, bool]] = {}
    for place in groups:
        known = tensors.get(oldest.get(place, 0), [])
        nobody = NOBODY if place in oldest else Holder("a reference cycle")
        answers[place] = (holders.of(known) if known else nobody, any(one.grad_fn is not None for one in known))
    return answers


def _found(
    window: Window, place: _Place, group: _Group, holder: Holder, beside: list[_Group], before: int
) -> Found:  # fmt: skip
    entries = [*group.alive, *group.collected]
    steps = sorted({window.step_of(entry) for entry in entries})
    cycle = all(entry.died is not None and entry.died > before for entry in group.alive)
    sizes = sum(entry.bytes for one in (group, *beside) for entry in (*one.alive, *one.collected))
    text = f"a reference cycle, by {holder.text}" if cycle and group.alive else holder.text
    where, layer, op = place
    leak = Leak(
        where, layer, op, entries[0].shape, entries[0].dtype, -(-len(entries) // len(steps)), sizes // len(steps),
        tuple(window.first + step for step in steps), text, holder.kept_at, window.first + OBSERVED, cycle,
    )  # fmt: skip
    return Found(leak, tuple(weakref.ref(one) for entry in group.alive if (one := _storage(entry)) is not None))


def _storage(entry: Entry) -> torch.UntypedStorage | None:
    return None if entry.reference is None else entry.reference()


def ended(leak: Leak, step: int) -> Leak:
    """Return a leak whose tensors were gone by the end of a step."""
    return dataclasses.replace(leak, ended=step)
