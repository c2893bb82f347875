"""How far a function's values and gradients are from float64's, beside plain torch's in the same dtype."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Function = Callable[..., Any]


def values_and_gradients(function: Function, operands: Sequence[Tensor]) -> list[Tensor]:
    """Results of a function and its gradients for random, but always the same, gradients of its results; float64."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    results = function(*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    generator = torch.Generator().manual_seed(7)
    # exact in every dtype, so that both sides get the same
    given = [torch.randint(-8, 9, x.shape, generator=generator).to(x) / 8 for x in results]
    torch.autograd.backward(results, given)
    return [x.detach().double() for x in (*results, *(x.grad for x in leaves if x.grad is not None))]


def assert_as_exact(
    ours: Function, plain: Function, operands: Sequence[Tensor], dtype: torch.dtype, few: bool = False
) -> None:
    """Hold that each value and gradient of `ours` is at most twice as far from float64's as plain torch's, in the
    Euclidean norm.

    Of a single number, or where operands are `few`, errors are chance: a rounding of the dtype is let pass. Of float64,
    in which plain torch is the truth, 64. Triton's interpreter cuts float32 to bfloat16 instead of rounding it (3.6 to
    3.9), which is twice as far and always towards zero: there three times more passes.
    """
    factor = 2.0
    if INTERPRETED and dtype == torch.bfloat16:
        factor *= 3
    rounded = [x.to(dtype) if x.is_floating_point() else x for x in operands]
    exact = [x.double() if x.is_floating_point() else x for x in rounded]
    truths = values_and_gradients(plain, exact)
    columns = values_and_gradients(ours, rounded), values_and_gradients(plain, rounded)
    for position, (truth, mine, theirs) in enumerate(zip(truths, *columns, strict=True)):
        assert mine.shape == truth.shape
        error, allowed = (mine - truth).norm(), factor * (theirs - truth).norm()
        if few or truth.numel() == 1:
            allowed += truth.norm() * torch.finfo(dtype).eps
        if dtype == torch.float64:
            allowed = 64 * truth.norm() * torch.finfo(dtype).eps
        assert error <= allowed, f"result or gradient {position}: {error:.3g}, allowed {allowed:.3g}"
