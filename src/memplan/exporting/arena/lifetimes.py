"""Find the buffers of a schedule: bytes, and first and last action of each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.exporting.lowering.device_graph import rounded_to_words
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that is live from action `first` to action `last`, both included."""

    bytes: int
    first_action: int
    last_action: int

    def overlaps(self, other: Buffer) -> bool:
        """Return whether both are live during some action."""
        return self.first_action <= other.last_action and other.first_action <= self.last_action


@dataclass(frozen=True)
class Lifetimes:
    """Buffers of a schedule, and the values that lie in them."""

    buffers: tuple[Buffer, ...]
    buffer_of: tuple[Mapping[int, int], ...]
    """For each action: by live value that owns memory, the index of its buffer."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are live at once: no arena can be smaller."""
        changes = dict[int, int]()  # action -> bytes allocated in it minus bytes freed before it
        for buffer in self.buffers:
            changes[buffer.first_action] = changes.get(buffer.first_action, 0) + buffer.bytes
            changes[buffer.last_action + 1] = changes.get(buffer.last_action + 1, 0) - buffer.bytes
        return max(itertools.accumulate(changes[time] for time in sorted(changes)), default=0)


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
        self.buffer_bytes: list[int] = []
        """By index of a buffer."""

    def follow(self, actions: Sequence[Action]) -> Lifetimes:
        """Return the buffers of a schedule; an action's index is the time."""
        buffer_of_by_action = list[Mapping[int, int]]()
        spans = dict[int, tuple[int, int]]()  # index of a buffer -> its first and last action
        for time, action in enumerate(actions):
            unread = self._allocate(time, action)
            buffer_of_by_action.append(dict(self.buffer_of))
            for value in (*action.frees, *unread):
                buffer = self.buffer_of.pop(value, -1)
                if buffer >= 0:
                    spans[buffer] = (self.first_action.pop(buffer), time)
            if action.overwritten is not None:  # overwritten: the buffer is the result's
                self.buffer_of.pop(action.overwritten, None)
        spans |= {buffer: (first, len(actions)) for buffer, first in self.first_action.items()}  # live at the end
        buffers = tuple(Buffer(size, *spans[buffer]) for buffer, size in enumerate(self.buffer_bytes))
        return Lifetimes(buffers, tuple(buffer_of_by_action))

    def _allocate(self, time: int, action: Action) -> list[int]:
        """Allocate the results of an action. Return its op's results that nothing reads: they are live only during this
        action."""
        values = self.graph.values
        for position, value in enumerate(action.makes):
            if value in self.buffer_of:
                continue
            if position == 0 and action.overwritten is not None:  # an op in place writes its first result there
                self.buffer_of[value] = self.buffer_of[action.overwritten]
            else:
                self.buffer_of[value] = self._open(values[value].bytes, time)
        if action.kind != "run" or action.op is None:
            return []
        unread = [v for v in action.called_op(self.graph).makes if v not in action.makes and v not in self.buffer_of]
        for value in unread:
            self.buffer_of[value] = self._open(values[value].bytes, time)
        return unread

    def _open(self, size: int, time: int) -> int:
        """Add a buffer of `size` bytes that begins at action `time`, and return its index; -1 for no bytes."""
        if not size:
            return -1
        buffer = len(self.buffer_bytes)
        self.buffer_bytes.append(rounded_to_words(size))
        self.first_action[buffer] = time
        return buffer
