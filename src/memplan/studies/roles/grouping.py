"""Which ranks do the same, from recordings of few of them.

What ranks hold differs for three reasons, and each says which recordings are enough:

- Shards. `torch.chunk` gives the first ranks of a mesh dimension whole shards, one rank the rest, and the last ones
  nothing: sizes never grow along a dimension. Of a box of ranks (a range in each dimension), the first holds the
  largest shards and the last the smallest. Where these two are equal, all between them are.
- Stages of a pipeline, of which any can differ: along a dimension whose ranks send to single others, all are recorded.
- Code that asks for the rank. What the first rank alone does, of all or of a machine, is seen by the same comparison;
  what a rank between does is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from memplan.errors import InputError
from memplan.trace.records import RankGroup

ALL = 8
"""Of so many ranks, all are recorded."""
MOST = 64
"""Ranks that are recorded at most."""


@dataclass(frozen=True)
class Grouping:
    """Ranks that do the same."""

    roles: tuple[tuple[int, ...], ...]
    """Ranks with equal recordings, or taken to have them; in the order of their first ranks."""
    recorded: tuple[int, ...]
    unsettled: tuple[int, ...] = ()
    """Ranks between two that differ, which were not recorded as there are too many: in the role of the first one."""


def group_ranks(world: int, per_node: int, groups: Sequence[RankGroup], key_of: Callable[[int], Hashable]) -> Grouping:
    """Group the ranks of a world by what a recording of each is.

    Args:
        world: number of ranks.
        per_node: ranks of a machine.
        groups: the process groups of rank 0.
        key_of: records a rank, and returns what is equal for ranks that do the same.

    Raises:
        InputError: any of more than `MOST` ranks can differ, as they send to single others.
    """
    boxes = list(_boxes(world, per_node, groups))
    if len(boxes) > MOST:
        raise InputError(
            f"{len(boxes)} stages, of which each can differ", expected=f"at most {MOST}", do="Record single ranks"
        )
    keys: dict[int, Hashable] = {}
    unsettled: list[int] = []

    def key(rank: int) -> Hashable:
        if rank not in keys:
            keys[rank] = key_of(rank)
        return keys[rank]

    def same(box: _Box) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield ranks that are equal, after the one of them that was recorded."""
        first, last = box.rank(0), box.rank(-1)
        if all(key(rank) == key(first) for rank in box.ranks if rank in keys or rank == last):
            yield first, box.ranks
        elif len(keys) >= MOST:
            unsettled.extend(set(box.ranks) - keys.keys())
            yield first, box.ranks
        else:
            for half in box.halves(lambda rank: key(rank) == key(first)):
                yield from same(half)

    roles: dict[Hashable, list[int]] = {}
    for box in boxes:
        for recorded, ranks in same(box):
            for rank in ranks:
                roles.setdefault(key(rank if rank in keys else recorded), []).append(rank)
    ordered = sorted(tuple(sorted(ranks)) for ranks in roles.values())
    return Grouping(tuple(ordered), tuple(sorted(keys)), tuple(sorted(unsettled)))


@dataclass(frozen=True)
class _Box:
    """Ranks whose coordinates lie in a range in each dimension; the last dimension is that of consecutive ranks."""

    strides: tuple[int, ...]
    ranges: tuple[range, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all of them, in order."""
        return tuple(sum(map(math.prod, zip(self.strides, place, strict=True))) for place in product(*self.ranges))

    def rank(self, end: int) -> int:
        """Return the first rank (0) or the last one (-1)."""
        return sum(stride * part[end] for stride, part in zip(self.strides, self.ranges, strict=True))

    def halves(self, is_first: Callable[[int], bool]) -> tuple[_Box, _Box]:
        """Return two halves, along a dimension at whose end a rank differs from the first one if there is one.

        Args:
            is_first: whether a rank is equal to the first one.
        """
        long = [index for index, part in enumerate(self.ranges) if len(part) > 1]
        ends = {
            index: self.rank(0) + self.strides[index] * (self.ranges[index][-1] - self.ranges[index][0])
            for index in long
        }
        index = next((index for index in long if len(long) > 1 and not is_first(ends[index])), long[0])
        part = self.ranges[index]
        middle = (len(part) + 1) // 2
        return self._with(index, part[:middle]), self._with(index, part[middle:])

    def _with(self, index: int, part: range) -> _Box:
        return _Box(self.strides, (*self.ranges[:index], part, *self.ranges[index + 1 :]))


def _boxes(world: int, per_node: int, groups: Sequence[RankGroup]) -> Iterator[_Box]:
    """Yield boxes of ranks that can only differ by their shards and by what a first rank does."""
    dimensions = _dimensions(world, per_node, groups)
    strides = tuple(stride for stride, _ in dimensions)
    ranges = [
        [range(index, index + 1) for index in range(size)]
        if world <= ALL or any(_is_along(group.ranks, stride) for group in groups if group.piped)
        else [range(size)]
        for stride, size in dimensions
    ]
    for parts in product(*ranges):
        yield _Box(strides, parts)


def _is_along(ranks: Sequence[int], stride: int) -> bool:
    """Return whether the ranks of a group differ in the dimension of a stride."""
    step = _step(ranks)
    return step is None or step <= stride < step * len(ranks)


def _step(ranks: Sequence[int]) -> int | None:
    """Return the distance between the ranks of a group; None if it is not the same everywhere."""
    steps = {after - before for before, after in pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else None


def _dimensions(world: int, per_node: int, groups: Sequence[RankGroup]) -> list[tuple[int, int]]:
    """Return stride and size of each dimension of all meshes and of the machines; the longest stride first."""
    ends = {per_node, world}
    for group in groups:
        step = _step(group.ranks)
        if step is not None:
            ends |= {step, step * len(group.ranks)}
    dimensions: list[tuple[int, int]] = []
    stride = 1
    for end in sorted(ends):
        if end > stride and end % stride == 0 and world % end == 0:
            dimensions.insert(0, (stride, end // stride))
            stride = end
    return dimensions or [(1, 1)]
