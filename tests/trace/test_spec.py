"""Tensors described as text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.errors import InputError
from memplan.trace.spec import batch_of, with_batch


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
)
def test_shape_and_dtype_are_as_written(shape: list[int], dtype: str) -> None:
    made = memplan.spec("x".join(map(str, shape)) + f":{dtype}").make()
    assert tuple(made.shape) == tuple(shape)
    assert made.dtype == getattr(torch, dtype)


def test_integers_lie_in_their_range() -> None:
    made = memplan.spec("1000:int64<7").make()
    assert (int(made.min()), int(made.max())) == (0, 6)
    assert torch.equal(made, memplan.spec("1000", dtype="int64", high=7).make())
    assert set(memplan.spec("50", dtype="int64", low=3, high=5).make().tolist()) == {3, 4}


def test_floats_lie_in_their_range_or_are_normal() -> None:
    bounded = memplan.spec("1000", low=2, high=3).make()
    assert 2 <= float(bounded.min()) <= float(bounded.max()) < 3
    assert abs(float(memplan.spec("10000").make().mean())) < 0.1


def test_seed_decides() -> None:
    assert torch.equal(memplan.spec("9", seed=4).make(), memplan.spec("9", seed=4).make())
    assert not torch.equal(memplan.spec("9", seed=4).make(), memplan.spec("9", seed=5).make())


@pytest.mark.parametrize("text", ["", "8,3", "8x", "x3", "8x3:float7", "8:int64<0", "-3x2", "8x3<", "8x3 y"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"Expected|Choose"):
        memplan.spec(text)


def test_batch_is_the_leading_dimension() -> None:
    inputs = (memplan.spec("8x3"), {"mask": memplan.spec("8"), "size": memplan.spec("3x3")})
    assert batch_of(*inputs) == 8
    changed = with_batch(inputs, 8, 16)
    assert (changed[0].shape, changed[1]["mask"].shape, changed[1]["size"].shape) == ((16, 3), (16,), (3, 3))
    assert batch_of(memplan.spec("scalar"), 3) is None
