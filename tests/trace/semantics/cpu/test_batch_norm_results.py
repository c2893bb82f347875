"""What batch norms make of fake tensors, held against torch's own way to find out, on any shape and layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.trace.semantics.cpu.batch_norm_results import AT_ONCE

TRAINING, FUNCTIONAL, BACKWARD = AT_ONCE
SHAPES = st.lists(st.integers(1, 3), min_size=2, max_size=5).filter(lambda shape: math.prod(shape) > shape[1])


def _told(results: Any) -> list[Any]:
    return [None if one is None else (one.shape, one.stride(), one.dtype) for one in results]


def _as_torch(name: str, args: tuple[Any, ...]) -> list[Any]:
    _, op, overload = name.split(".")
    return _told(getattr(getattr(torch.ops.aten, op), overload)(*args))


@st.composite
def _laid_out(draw: st.DrawFn) -> torch.Tensor:
    """A tensor whose dimensions follow one another in memory in any order, or with a gap."""
    shape = draw(SHAPES)
    order = draw(st.sampled_from(["in order", "channels last", "any", "gap"]))
    dims = list(range(len(shape)))
    if order == "gap":
        return torch.empty([*shape[:-1], shape[-1] + 1])[..., :-1]
    if order == "channels last":
        dims = [0, *dims[2:], 1]
    elif order == "any":
        dims = draw(st.permutations(dims))
    back = [dims.index(dim) for dim in range(len(shape))]
    return torch.empty([shape[dim] for dim in dims]).permute(back)


@settings(deadline=None)
@given(_laid_out(), st.booleans(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_norm_in_training_makes_what_torch_says(x: torch.Tensor, affine: bool, dtype: torch.dtype) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(x).to(dtype)
        one = torch.empty(x.shape[1])
        weights = (one, one) if affine else (None, None)
        args = (x, *weights, one, one, True, 0.1, 1e-5)
        for name in (TRAINING, FUNCTIONAL):
            found = AT_ONCE[name](args, {})
            if found is not NotImplemented:
                assert _told(found) == _as_torch(name, args)


@settings(deadline=None)
@given(_laid_out(), st.booleans(), st.booleans(), st.tuples(st.just(True), st.booleans(), st.booleans()))
def test_its_gradients_are_what_torch_says(
    x: torch.Tensor, affine: bool, other: bool, mask: tuple[bool, bool, bool]
) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(x)
        gradient = torch.empty(x.shape) if other else torch.empty_strided(x.shape, x.stride())
        one = torch.empty(x.shape[1])
        args = (gradient, x, one if affine else None, one, one, one, one, True, 1e-5, list(mask))
        found = AT_ONCE[BACKWARD](args, {})
        if found is not NotImplemented:
            assert _told(found) == _as_torch(BACKWARD, args)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_usual_layouts_are_answered(layout: torch.memory_format) -> None:
    x, one = torch.empty(2, 3, 4, 5).to(memory_format=layout), torch.empty(3)
    assert AT_ONCE[TRAINING]((x, one, one, one, one, True, 0.1, 1e-5), {}) is not NotImplemented
    mask = [True, True, False]
    assert AT_ONCE[BACKWARD]((x, x, one, one, one, one, one, True, 1e-5, mask), {}) is not NotImplemented


def test_what_torch_alone_knows_is_left_to_it() -> None:
    x, one = torch.empty(2, 3, 4), torch.empty(3)
    assert AT_ONCE[TRAINING]((x, one, one, one, one, False, 0.1, 1e-5), {}) is NotImplemented  # not in training
    assert AT_ONCE[TRAINING]((x.half(), one, one, one, one, True, 0.1, 1e-5), {}) is NotImplemented  # mixed
