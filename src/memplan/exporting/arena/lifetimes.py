"""Find the buffers of a schedule: bytes, and first and last action of each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.exporting.lowering.device_graph import words
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that is live from action `first` to action `last`, both included."""

    bytes: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        """Return whether both are live during some action."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Lifetimes:
    """Buffers of a schedule, and the values that lie in them."""

    buffers: tuple[Buffer, ...]
    buffer_of: tuple[Mapping[int, int], ...]
    """For each action: by live value that owns memory, the index of its buffer."""

    @property
    def peak(self) -> int:
        """Most bytes that are live at once: no arena can be smaller."""
        change = dict[int, int]()  # action -> bytes allocated in it minus bytes freed before it
        for buffer in self.buffers:
            change[buffer.first] = change.get(buffer.first, 0) + buffer.bytes
            change[buffer.last + 1] = change.get(buffer.last + 1, 0) - buffer.bytes
        return max(itertools.accumulate(change[time] for time in sorted(change)), default=0)


def lifetimes(schedule: Schedule) -> Lifetimes:
    """Return the buffers of a schedule. An op that runs in place writes its result to its operand's buffer."""
    return _LifetimeTracker(schedule.graph).follow((*schedule.forward, *schedule.backward))


class _LifetimeTracker:
    """Opens a buffer for each value that a schedule's actions allocate, and closes it where the value is freed."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[int, int] = {v.id: -1 for v in graph.values if v.kind in RESIDENT or v.kind == "tangent"}
        """Live value -> index of its buffer; -1: memory outside of the arena."""
        self.first_action: dict[int, int] = {}
        """Index of a live buffer -> its first action."""
        self.sizes: list[int] = []
        """Bytes of each buffer."""

    def follow(self, actions: Sequence[Action]) -> Lifetimes:
        """Return the buffers of a schedule; an action's index is the time."""
        by_action = list[Mapping[int, int]]()
        spans = dict[int, tuple[int, int]]()  # index of a buffer -> its first and last action
        for time, action in enumerate(actions):
            unread = self._allocate(time, action)
            by_action.append(dict(self.buffer_of))
            for value in (*action.frees, *unread):
                number = self.buffer_of.pop(value, -1)
                if number >= 0:
                    spans[number] = (self.first_action.pop(number), time)
            if action.into is not None:
                self.buffer_of.pop(action.into, None)
        spans |= {number: (first, len(actions)) for number, first in self.first_action.items()}
        buffers = tuple(Buffer(size, *spans[number]) for number, size in enumerate(self.sizes))
        return Lifetimes(buffers, tuple(by_action))

    def _allocate(self, time: int, action: Action) -> list[int]:
        """Allocate the results of an action. Return its op's results that nothing reads: they are live only during this
        action."""
        values = self.graph.values
        for position, value in enumerate(action.makes):
            if value in self.buffer_of:
                continue
            if position == 0 and action.into is not None:
                self.buffer_of[value] = self.buffer_of[action.into]
            else:
                self.buffer_of[value] = self._open(values[value].bytes, time)
        if action.kind != "run" or action.op is None:
            return []
        unread = [v for v in action.called(self.graph).makes if v not in action.makes and v not in self.buffer_of]
        for value in unread:
            self.buffer_of[value] = self._open(values[value].bytes, time)
        return unread

    def _open(self, size: int, time: int) -> int:
        """Add a buffer of `size` bytes that begins at action `time`, and return its index; -1 for no bytes."""
        if not size:
            return -1
        self.sizes.append(words(size))
        self.first_action[len(self.sizes) - 1] = time
        return len(self.sizes) - 1
