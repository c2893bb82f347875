"""Ranks that do the same, found from few of them: beside all ranks, sharded by `torch.chunk` itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import InputError
from memplan.studies.roles.grouping import ALL, MOST, group_ranks
from memplan.trace.records import RankGroup

Role = tuple[tuple[int, ...], ...]


def shards(size: int, ranks: int) -> list[int]:
    """Elements of each rank, as torch shards ``size`` of them; the last ranks can have none."""
    parts = [len(part) for part in torch.arange(size).chunk(ranks)]
    return parts + [0] * (ranks - len(parts))


def groups_of(mesh: Sequence[int], piped: Sequence[int] = ()) -> list[RankGroup]:
    """The groups of rank 0 along each dimension of a mesh."""
    found = []
    for index, size in enumerate(mesh):
        stride = math.prod(mesh[index + 1 :])
        if size > 1:
            found.append(RankGroup(tuple(range(0, size * stride, stride)), index in piped))
    return found


def brute_force(world: int, what: dict[int, object]) -> Role:
    alike = defaultdict(list)
    for rank in range(world):
        alike[what[rank]].append(rank)
    return tuple(sorted(map(tuple, alike.values())))


MESHES = st.sampled_from([(16,), (8, 2), (2, 12), (4, 2, 4), (64,), (3, 5, 2), (2, 8, 8), (11,), (128,)])


@settings(max_examples=200, deadline=None)
@given(mesh=MESHES, data=st.data())
def test_uneven_shards_and_stages_are_all_found(mesh: tuple[int, ...], data: st.DataObject) -> None:
    """Weights are sharded along dimensions of a mesh; along one of them ranks may be stages, with any weights."""
    world = math.prod(mesh)
    piped = data.draw(st.sampled_from([None, *(index for index, size in enumerate(mesh) if size <= 8)]))
    sizes = data.draw(st.lists(st.tuples(st.integers(0, len(mesh) - 1), st.integers(1, 300)), max_size=2))
    stages = data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))
    first_alone = data.draw(st.booleans())
    what: dict[int, object] = {}
    for rank, place in enumerate(product(*map(range, mesh))):
        held = tuple(shards(size, mesh[index])[place[index]] for index, size in sizes if index != piped)
        what[rank] = held, None if piped is None else stages[place[piped]], first_alone and rank == 0
    found = group_ranks(world, 1, groups_of(mesh, [] if piped is None else [piped]), what.__getitem__)
    if found.unsettled:
        assert len(found.recorded) >= MOST
    else:
        assert found.roles == brute_force(world, what)


def test_few_of_many_ranks_are_recorded() -> None:
    """512 ranks of 4 stages, sharded by 16 and in tensors by 8: two corners of each stage."""
    even = group_ranks(512, 8, groups_of((4, 16, 8), [0]), lambda rank: rank // 128)
    assert len(even.recorded) == 8
    assert [len(ranks) for ranks in even.roles] == [128] * 4
    # a vocabulary of 1001 by 8: whole shards of 126, one of 119
    uneven = group_ranks(512, 8, groups_of((64, 8)), lambda rank: shards(1001, 8)[rank % 8])
    assert uneven.roles == brute_force(512, {rank: shards(1001, 8)[rank % 8] for rank in range(512)})
    assert len(uneven.recorded) <= 12


def test_what_the_first_rank_of_each_machine_does() -> None:
    found = group_ranks(64, 8, groups_of((64,)), lambda rank: rank % 8 == 0)
    assert found.roles == (tuple(range(0, 64, 8)), tuple(rank for rank in range(64) if rank % 8))
    assert len(found.recorded) <= 10


def test_of_few_ranks_all_are_recorded() -> None:
    """Also those between that ask for their number."""
    found = group_ranks(ALL, ALL, groups_of((ALL,)), lambda rank: rank == 3)
    assert found.roles == ((0, 1, 2, 4, 5, 6, 7), (3,))
    assert found.recorded == tuple(range(ALL))


def test_ranks_that_all_differ_are_not_all_recorded() -> None:
    found = group_ranks(512, 8, groups_of((512,)), lambda rank: rank)
    assert MOST <= len(found.recorded) <= MOST + 3
    assert len(found.unsettled) == 512 - len(found.recorded)
    assert sorted(rank for ranks in found.roles for rank in ranks) == list(range(512))


def test_more_stages_than_can_be_recorded_are_refused() -> None:
    with pytest.raises(InputError, match="128 stages"):
        group_ranks(128, 8, groups_of((128,), [0]), lambda rank: rank)


@pytest.mark.parametrize("ranks", [(0, 1, 8, 9), (0, 3, 4)])
def test_groups_of_no_mesh(ranks: tuple[int, ...]) -> None:
    found = group_ranks(16, 8, [RankGroup(ranks)], lambda rank: rank == 0)
    assert found.roles == ((0,), tuple(range(1, 16)))
    everyone = group_ranks(16, 8, [RankGroup(ranks, piped=True)], lambda rank: rank == 5)
    assert everyone.roles == (tuple(r for r in range(16) if r != 5), (5,))
