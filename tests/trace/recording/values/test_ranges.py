"""What an op with a rule really gives lies within the range that the rule says, and no rule fails on its op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.trace.recording.values.ranges import (
    RULES,
    Call,
    Range,
    _stored,  # pyright: ignore[reportPrivateUsage]
    rule_of,
)

N, X = torch.tensor([3, -7, 5, 0, 9, 2]), torch.tensor([0.5, -2.5, 3.25, -0.5, 1.0, 7.0])
M, AT, P = N > 2, torch.tensor([1, 1, 5, 0]), torch.tensor([3, 7, 5])
SAMPLES: Mapping[str, Callable[[], Any]] = {
    "kept": lambda: [
        N.clone(), X.to(torch.long), X.to(torch.int8), torch.cat([N, N - 9]), torch.stack([N, N]), N[M], N[AT],
        N.index_select(0, AT), N.gather(0, AT), N.repeat(2), N.flip(0), N.roll(1), N.masked_select(M), N.take(AT),
        N.max(), N.min(), N.amax(), N.amin(), N.median(), N.max(0), N.min(0), N.median(0),
    ],
    "filled": lambda: [
        torch.full((3,), 4), torch.full_like(N, 2.7), N.new_full((2,), -3), torch.zeros(2), N.new_zeros(2),
        torch.zeros_like(N), N.clone().zero_(), torch.ones(2), torch.ones_like(N), N.new_ones(2), N.clone().fill_(3),
        N.clone().copy_(X), torch.scalar_tensor(3.5), torch.where(M, N, 4), torch.constant_pad_nd(P, (1, 2)),
        torch.constant_pad_nd(P, (1, 2), -4), N.view(2, 3).tril(), N.view(2, 3).triu(), N.masked_fill(M, 30),
        N.clone().masked_fill_(M, -30), N.masked_scatter(M, N * 2), N.index_put((AT,), AT * 9),
        N.clone().index_put_((AT,), AT * 9), N.scatter(0, AT, AT * 8), N.scatter(0, AT, 77),
        N.clone().scatter_(0, AT, AT * 8),
        N.scatter(0, AT, 8, reduce="add"),
        N.index_copy(0, AT, AT * 8), N.clone().index_copy_(0, AT, AT * 8), N.index_fill(0, AT, 50),
        N.clone().index_fill_(0, AT, 50),
    ],
    "summed": lambda: [
        N.scatter_add(0, AT, AT * 7), N.clone().scatter_add_(0, AT, AT * 7), N.index_add(0, AT, AT * 7, alpha=-3),
        N.index_add(0, AT, AT * 7, alpha=5), N.clone().index_add_(0, AT, -AT), N.sum(), N.view(2, 3).sum(1), X.mean(),
        N.cumsum(0), torch.cumsum(N, 0, out=torch.zeros_like(N)), N.count_nonzero(), torch.bincount(P),
    ],
    "computed": lambda: [
        N + N, N.clone().add_(N, alpha=-2), torch.add(N, P.sum(), alpha=3), N - X, N.clone().sub_(4), 5 - N,
        torch.rsub(N, 3, alpha=2), N * N, N.clone().mul_(-3), X / 4, X.clone().div_(2),
        torch.div(N, 4, rounding_mode="floor"),
        torch.div(X, 4, rounding_mode="trunc"), torch.floor_divide(N, 4), N.clone().floor_divide_(4), N % 4, N % 2.5,
        X % 3, N.clone().remainder_(4), N.clamp(0, 4), N.clamp(max=2), N.clamp(torch.full_like(N, 20), N - 30),
        N.clone().clamp_(min=8), N.clamp_min(1), N.clone().clamp_min_(1), torch.maximum(N, P.sum()), N.clamp_max(1),
        N.clone().clamp_max_(1), torch.minimum(N, P.sum()), torch.max(N, N - 8), torch.min(N, N - 8), X.floor(),
        X.clone().floor_(), X.ceil(), X.clone().ceil_(), X.round(), X.clone().round_(), X.round(decimals=1), X.trunc(),
        N.abs(), P.neg(), torch.max(N, N - 8, out=torch.zeros_like(N)),
    ],
    "compared": lambda: [
        op(a, b)
        for op in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
        for a, b in ((N, 4), (N, 9), (N, 10), (N, -7), (N, -8), (N, N), (N, N + 17), (N, X), (P * 0, 0), (P * 0 + 3, 3))
    ] + [
        a & b for a in (M, M | True, M & False, N - N.min(), N * 0) for b in (M, M | True, M & False)
    ] + [
        M | ~M, M | False, ~M, ~(M | True), M.logical_not(), torch.full((3,), True), torch.full((3,), False),
        (~M).any(0), M.all(0), M.any(), (M & False).all(), M[:0].any(), torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.bool), N.to(torch.bool), (N + 9).to(torch.bool), (N * 0).to(torch.bool),
        (M & False).max() == 0, M.clone().fill_(True), M.clone().logical_and_(~M),
    ],
    "indices": lambda: [
        N.argmax(), N.view(2, 3).argmin(1), N.argsort(), N.view(2, 3).argsort(0), N.sort(), N.view(2, 3).sort(0),
        torch.sort(N, stable=True), torch.argsort(N, stable=True), N.cummax(0), N.cummin(0), N.topk(2), N.kthvalue(2),
        N.nonzero(), torch.searchsorted(P.sort()[0], N), torch.bucketize(N, P.sort()[0]), torch.unique(N),
        torch.unique(N.view(2, 3), dim=0), torch.unique_consecutive(N), torch.unique_consecutive(N.view(2, 3), dim=0),
        torch.repeat_interleave(P),
    ],
    "drawn": lambda: [
        torch.randperm(9), torch.randint(4, (50,)), torch.randint(-4, 9, (50,)), torch.arange(9), torch.arange(3, 9),
        torch.arange(9, 3, -2), torch.rand(50).multinomial(20), torch.rand(50), torch.rand_like(X), X.sigmoid(),
        X.softmax(0), torch.bernoulli(torch.rand(50)), X.clone().bernoulli_(), torch.empty(50).uniform_(-1),
        torch.empty(50).uniform_(-1, 5), torch.empty(50).uniform_(), torch.empty(50).random_(9),
        torch.empty(50).random_(5, 9),
    ],
}  # fmt: skip
NOT_DISPATCHED = {
    "scatter.reduce",
    "contiguous",
    "_unsafe_index",
    "take_along_dim",
    "lift_fresh",
    "lift_fresh_copy",
    "argsort",
    "unique_dim_consecutive",
}
"""Decomposed before, made by a compiler, or without a name in Python."""


def ends(value: torch.Tensor) -> Range | None:
    return (value.min().item(), value.max().item()) if value.numel() else None


class Checked(TorchDispatchMode):
    """Holds each op's result against its rule."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(one): ends(one) for one in _tensors((args, tuple((kwargs or {}).values())))}
        result = func(*args, **(kwargs or {}))
        rule = rule_of(str(func))
        if rule is not None:
            call = Call(args, kwargs or {}, result, lambda one: known[id(one)])
            _, base, overload = str(func).split(".")
            self.seen |= {base.rstrip("_"), f"{base.rstrip('_')}.{overload}"}
            said = rule(call)  # raises where it is not made for the form of the arguments
            several = said if isinstance(said, list) else [said]
            for one, values in zip(_tensors(result), several, strict=False):
                if values is not None and one.dtype is torch.bool:
                    values = _stored(values, one.dtype)
                if values is not None and one.numel() and not one.is_complex():
                    low, high = one.min().item(), one.max().item()
                    assert values[0] - 1 < low if one.dtype is torch.long else values[0] <= low + 1e-6, (func, said)
                    assert high < values[1] + 1 if one.dtype is torch.long else high <= values[1] + 1e-6, (func, said)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for one in value for x in _tensors(one)] if isinstance(value, (list, tuple)) else []


def test_every_rule_holds() -> None:
    with Checked() as checked:
        for sample in SAMPLES.values():
            sample()
    assert set(RULES) - checked.seen - NOT_DISPATCHED == set()


@pytest.mark.parametrize("weights", [None, torch.full((3,), 9.0)])
def test_weights_of_bins_are_no_counts(weights: torch.Tensor | None) -> None:
    rule = rule_of("aten.bincount.default")
    assert rule is not None
    args = (P,) if weights is None else (P, weights)
    said = rule(Call(args, {}, torch.bincount(P, weights), ends))
    assert said == ((0, 3) if weights is None else None)
