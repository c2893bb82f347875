"""Max pools under memplan's names: torch's kernels, whatever they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan._torch import inductor
from memplan.planning.inductor.max_pool import POOLS, decompositions

_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


@given(st.sampled_from([2, 3]), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_the_same_bits_and_layout_as_torchs(
    dims: int, kernel: int, stride: int, last: bool, ceil: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 3, *[7] * dims)
    x = x.contiguous(memory_format=_FORMATS[dims]) if last else x
    window = ([kernel] * dims, [stride] * dims, [kernel // 2] * dims, [1] * dims, ceil)
    forward: Any = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices").default
    backward: Any = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices_backward").default
    results, expected = POOLS[forward](x, *window), forward(x, *window)
    gradient = torch.randn_like(expected[0])
    results += (POOLS[backward](gradient, x, *window, results[1]),)
    expected += (backward(gradient, x, *window, expected[1]),)
    for one, other in zip(results, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("dims", [2, 3])
def test_without_data_as_with(dims: int) -> None:
    x = torch.randn(2, 3, *[8] * dims).contiguous(memory_format=_FORMATS[dims])
    forward: Any = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices").default
    real = POOLS[forward](x, [2] * dims, [2] * dims)
    with FakeTensorMode() as mode:
        fake = POOLS[forward](mode.from_tensor(x), [2] * dims, [2] * dims)
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize(
    ("dims", "kernel", "last", "ours"),
    [
        *[(2, 3, False, False), (2, 5, False, True), (2, 3, True, True)],
        *[
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((2, 2, False, False), (3, 2, False, False), (3, 3, False, True), (3, 2, True, True))
        ],
    ],
)
def test_inductor_writes_small_windows_in_the_order_of_dimensions(
    dims: int, kernel: int, last: bool, ours: bool
) -> None:
    x = torch.randn(2, 3, *[8] * dims)
    x = x.contiguous(memory_format=_FORMATS[dims]) if last else x
    forward: Any = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices").default
    window = [kernel] if last else [kernel] * dims  # either form
    found, results = lowered(lambda one: forward(one, window, [2]), x)
    assert (POOLS[forward] in found) == ours
    assert forward not in found  # the kernel for that goes through a window as through a sum of thousands
    for one, other in zip(results, forward(x, window, [2]), strict=True):
        assert torch.equal(one, other)


def lowered(pool: Callable[..., Any], x: Tensor) -> tuple[list[Any], Sequence[Tensor]]:
    """The ops that a pool is traced into, and what the kernels that are made of them give."""
    mode = inductor.fake_mode()
    like = inductor.fake_tensor(x.shape, x.stride(), x.dtype, mode)

    def run(one: Tensor) -> list[Tensor]:
        return list(pool(one))

    traced = inductor.traced(run, [like], mode, decompositions())
    _, nodes, results = inductor.inputs_ops_results(traced)
    kernels = inductor.kernels_of(inductor.lowerable(traced, nodes, results, backward=False))
    return [node.target for node in nodes], kernels([x])
