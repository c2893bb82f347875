"""Group ranks that allocate the same, from recordings of a few of them.

The memory of ranks differs for three reasons, which determine the ranks to record:

- Shards. `torch.chunk` gives the first ranks of a mesh dimension full shards, the next rank a smaller shard and the
  last ranks nothing: sizes never grow along a dimension. In a box of ranks (a range in each dimension), the first rank
  has the largest shards and the last the smallest. If these two are equal, so are all ranks between them.
- Stages of a pipeline, which can all differ: along a dimension whose ranks send to single other ranks, all are
  recorded.
- Code that depends on the rank. The comparison of the first and last rank shows what only the first rank does, of all
  or of a machine; not what only a rank in between does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from memplan.errors import InputError
from memplan.trace.records import RankGroup

ALL = 8
"""Number of ranks up to which all are recorded."""
MOST = 64
"""Number of ranks to record at most."""


@dataclass(frozen=True)
class Grouping:
    """Ranks grouped by equal recordings."""

    roles: tuple[tuple[int, ...], ...]
    """Groups of equal ranks, in the order of their first ranks."""
    recorded: tuple[int, ...]
    """Ranks that were recorded."""
    unsettled: tuple[int, ...] = ()
    """Ranks between two different ranks that were not recorded, as there are too many; grouped with the first."""


def group_ranks(world: int, per_node: int, groups: Sequence[RankGroup], key_of: Callable[[int], Hashable]) -> Grouping:
    """Group ranks that allocate the same, from the recordings of a few.

    A box is a range of ranks in each dimension of the process groups. If its first and last rank are equal, and any
    that were recorded between, all of it counts as equal (see the module's docstring); else its halves are compared.

    Args:
        world: number of ranks.
        per_node: ranks of a machine.
        groups: process groups of rank 0.
        key_of: records a rank, and returns a key that is equal for ranks that allocate the same.

    Raises:
        InputError: more than `MOST` boxes: pipeline stages, each of which can differ.
    """
    boxes = list(_boxes(world, per_node, groups))
    if len(boxes) > MOST:
        raise InputError(
            f"{len(boxes)} stages, of which each can differ", expected=f"at most {MOST}", do="Record single ranks"
        )
    keys: dict[int, Hashable] = {}  # by recorded rank
    unsettled: list[int] = []  # ranks between two different ranks, of which no more are recorded

    def key(rank: int) -> Hashable:
        """Record a rank unless it is recorded already, and return its key."""
        if rank not in keys:
            keys[rank] = key_of(rank)
        return keys[rank]

    def equal_ranks(box: _Box) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (a recorded rank, the ranks equal to it)."""
        first, last = box.rank(0), box.rank(-1)
        if all(key(rank) == key(first) for rank in box.ranks if rank in keys or rank == last):
            yield first, box.ranks
        elif len(keys) >= MOST:  # no more recordings
            unsettled.extend(set(box.ranks) - keys.keys())
            yield first, box.ranks
        else:
            for half in box.halves(lambda rank: key(rank) == key(first)):
                yield from equal_ranks(half)

    roles: dict[Hashable, list[int]] = {}
    for box in boxes:
        for recorded, ranks in equal_ranks(box):
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
        """All ranks of the box."""
        coordinates = product(*self.ranges)
        return tuple(sum(s * index for s, index in zip(self.strides, rank, strict=True)) for rank in coordinates)

    def rank(self, end: int) -> int:
        """Return the first rank (``end`` 0) or the last (-1)."""
        return sum(stride * part[end] for stride, part in zip(self.strides, self.ranges, strict=True))

    def halves(self, is_first: Callable[[int], bool]) -> tuple[_Box, _Box]:
        """Return two halves, split along a dimension whose last rank differs from the first rank, if possible:
        ``is_first(rank)`` says whether a rank allocates as the first does."""
        long = [index for index, part in enumerate(self.ranges) if len(part) > 1]
        split = long[0]
        if len(long) > 1:
            for index in long:
                extent = self.ranges[index][-1] - self.ranges[index][0]
                if not is_first(self.rank(0) + self.strides[index] * extent):  # the last rank along this dimension
                    split = index
                    break
        part = self.ranges[split]
        middle = (len(part) + 1) // 2
        return self._with(split, part[:middle]), self._with(split, part[middle:])

    def _with(self, index: int, part: range) -> _Box:
        return _Box(self.strides, (*self.ranges[:index], part, *self.ranges[index + 1 :]))


def _boxes(world: int, per_node: int, groups: Sequence[RankGroup]) -> Iterator[_Box]:
    """Yield boxes of ranks that differ at most by their shards and by code for the first rank."""
    dimensions = _dimensions(world, per_node, groups)
    strides = tuple(stride for stride, _ in dimensions)
    ranges: list[list[range]] = []
    for stride, size in dimensions:
        all_differ = world <= ALL or any(_is_along(group.ranks, stride) for group in groups if group.piped)
        ranges.append([range(index, index + 1) for index in range(size)] if all_differ else [range(size)])
    for parts in product(*ranges):
        yield _Box(strides, parts)


def _is_along(ranks: Sequence[int], stride: int) -> bool:
    """Return whether the ranks of a process group differ in the dimension with this stride; True if they have no
    stride."""
    step = _step(ranks)
    return step is None or step <= stride < step * len(ranks)


def _step(ranks: Sequence[int]) -> int | None:
    """Return the distance between consecutive ranks of a process group; None if it varies."""
    steps = {after - before for before, after in pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else None


def _dimensions(world: int, per_node: int, groups: Sequence[RankGroup]) -> list[tuple[int, int]]:
    """Return (stride, size) of each dimension of all meshes and of the machines, the largest stride first."""
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
