"""Sizes of views of tensors that have grown, against views of the tensors themselves."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.checks.mended.changed_step import ChangeError
from memplan.checks.rerun.sizes import viewed_size

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(sizes, st.data())
def test_whole_dimensions_stay_together(old: list[int], data: st.DataObject) -> None:
    """Neighbours are flattened at random: the view of the grown tensor flattens the same ones."""
    cuts = sorted({0, len(old), *data.draw(st.lists(st.integers(0, len(old))))})
    new = [size * data.draw(st.integers(1, 3)) if size > 1 else 1 for size in old]
    wanted, expected = ([math.prod(shape[a:b]) for a, b in itertools.pairwise(cuts)] for shape in (old, new))
    assert viewed_size(old, wanted, new) == tuple(expected)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(2, 4), st.integers(2, 4)), min_size=1, max_size=3), st.data())
def test_the_outer_part_of_a_split_dimension_grows(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    times = [data.draw(st.integers(1, 3)) for _ in parts]
    old = [outer * inner for outer, inner in parts]
    new = [size * more for size, more in zip(old, times, strict=True)]
    wanted = [size for pair in parts for size in pair]
    expected = [size for (a, b), more in zip(parts, times, strict=True) for size in (a * more, b)]
    assert viewed_size(old, wanted, new) == tuple(expected)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(sizes, st.data())
def test_a_tensor_that_has_not_grown_is_viewed_as_it_was(old: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.permutations(old))
    assert viewed_size(old, wanted, old) == tuple(wanted)


def test_a_size_of_one_that_grows_is_nobodys() -> None:
    with pytest.raises(ChangeError, match="leaves a size out"):
        viewed_size((2, 1), (2,), (2, 3))


def test_a_split_that_no_longer_comes_out_even() -> None:
    with pytest.raises(ChangeError, match="splits a size"):
        viewed_size((6,), (2, 3), (7,))
