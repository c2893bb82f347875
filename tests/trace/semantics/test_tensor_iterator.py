"""Strides of results, beside those that torch's kernels give them on real tensors."""

from __future__ import annotations

import torch
from environment import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tensor_layouts import laid_out, shapes, strides

from memplan.trace.semantics.tensor_iterator import (
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    preserved_strides,
)

KERNELS = {1: torch.neg, 2: torch.add, 3: torch.addcmul}
"""By the number of operands."""


@settings(deadline=None, max_examples=examples(300))
@given(st.data(), shapes(1), st.integers(1, 3))
def test_an_elementwise_result_is_laid_out_by_its_operands(data: st.DataObject, shape: list[int], many: int) -> None:
    operands = list[torch.Tensor]()
    for _ in range(many):
        broadcast = [
            data.draw(st.sampled_from([1, size])) for size in shape[data.draw(st.integers(0, len(shape) - 1)) :]
        ]
        own = data.draw(st.sampled_from([shape, broadcast]))
        operands.append(laid_out(own, data.draw(strides(own))))
    real = KERNELS[many](*operands)
    assert elementwise_strides(operands, real.shape) == real.stride()


@settings(deadline=None)
@given(st.data(), shapes(1))
def test_a_number_is_an_operand_without_dimensions(data: st.DataObject, shape: list[int]) -> None:
    x = laid_out(shape, data.draw(strides(shape)))
    for real in (x * 2, 1 - x, x > 0, torch.mul(x, 2)):
        assert elementwise_strides([x], x.shape, with_scalar=True) == real.stride()


@settings(deadline=None)
@given(st.data(), shapes(1), st.booleans())
def test_empty_like_keeps_what_is_dense(data: st.DataObject, shape: list[int], gap: bool) -> None:
    whole = [*shape, 2]
    x = laid_out(whole, data.draw(strides(whole)))[..., 0] if gap else laid_out(shape, data.draw(strides(shape)))
    assert preserved_strides(x) == torch.empty_like(x).stride()


@given(shapes(4))
def test_the_two_formats(shape: list[int]) -> None:
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert channels_last_strides(shape) == torch.empty(shape, memory_format=form).stride()
