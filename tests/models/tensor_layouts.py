"""Tensors in any layout: dimensions in any order in memory, and of size 1 with any stride."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st


@st.composite
def strides(draw: st.DrawFn, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps: contiguous, channels last, or permuted."""
    dims = list(range(len(shape)))
    order = draw(st.sampled_from([dims, [*dims[:1], *dims[2:], *dims[1:2]]]) | st.permutations(dims))
    found, step = [0] * len(shape), 1
    for dim in reversed(order):
        found[dim] = step
        step *= shape[dim]
    odd = draw(st.none() | st.sampled_from([1, 7, math.prod(shape)]))
    return tuple(
        odd if odd is not None and n == 1 and draw(st.booleans()) else s for n, s in zip(shape, found, strict=True)
    )


def laid_out(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros in this layout."""
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()


def shapes(least: int = 2, most: int = 5) -> st.SearchStrategy[list[int]]:
    """Shapes with many dimensions of size 1."""
    return st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=least, max_size=most)
