"""Schedule -> the buffers of the arena: bytes, first and last action of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.exporting.lowering.device_graph import words
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that is taken from one action to another, both included."""

    bytes: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        """Return whether there is an action during which both are there."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Lifetimes:
    """Buffers of a schedule, and which one each value lies in."""

    buffers: tuple[Buffer, ...]
    placed: tuple[Mapping[int, int], ...]
    """For each action, the buffer of every value that owns memory and is there."""

    @property
    def peak(self) -> int:
        """Most bytes that are there at once: no arena is smaller."""
        change = dict[int, int]()
        for one in self.buffers:
            change[one.first] = change.get(one.first, 0) + one.bytes
            change[one.last + 1] = change.get(one.last + 1, 0) - one.bytes
        level = most = 0
        for at in sorted(change):
            level += change[at]
            most = max(most, level)
        return most


def lifetimes(schedule: Schedule) -> Lifetimes:
    """Follow a schedule: what is made takes memory until it is freed, or until a result takes that over."""
    return _Follower(schedule.graph).follow((*schedule.forward, *schedule.backward))


class _Follower:
    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.buffers: list[Buffer] = []
        self.of: dict[int, int] = {v.id: -1 for v in graph.values if v.kind in RESIDENT or v.kind == "tangent"}
        """Buffer of each value that is there; -1: memory of its own, outside of the arena."""
        self.opened: dict[int, int] = {}
        """First action of each buffer that is there, by its number."""
        self.sizes: list[int] = []

    def follow(self, actions: Sequence[Action]) -> Lifetimes:
        placed, closed = list[Mapping[int, int]](), dict[int, tuple[int, int]]()
        for at, action in enumerate(actions):
            passing = self._make(at, action)
            placed.append(dict(self.of))
            for value in (*action.frees, *passing):
                number = self.of.pop(value, -1)
                if number >= 0:
                    closed[number] = (self.opened.pop(number), at)
            if action.into is not None:
                self.of.pop(action.into, None)
        closed |= {number: (first, len(actions)) for number, first in self.opened.items()}
        buffers = tuple(Buffer(size, *closed[number]) for number, size in enumerate(self.sizes))
        return Lifetimes(buffers, tuple(placed))

    def _make(self, at: int, action: Action) -> list[int]:
        """Place what an action makes; return the results that nobody wants, which are there while it runs."""
        values = self.graph.values
        for position, value in enumerate(action.makes):
            if value in self.of:
                continue
            if position == 0 and action.into is not None:
                self.of[value] = self.of[action.into]
            else:
                self.of[value] = self._open(values[value].bytes, at)
        if action.kind != "run" or action.op is None:
            return []
        unwanted = [v for v in action.called(self.graph).makes if v not in action.makes and v not in self.of]
        for value in unwanted:
            self.of[value] = self._open(values[value].bytes, at)
        return unwanted

    def _open(self, size: int, at: int) -> int:
        if not size:
            return -1
        self.sizes.append(words(size))
        self.opened[len(self.sizes) - 1] = at
        return len(self.sizes) - 1
