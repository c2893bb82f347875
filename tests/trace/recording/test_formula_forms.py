"""Steps whose formulas compute otherwise under a mode: the predicted peak beside what the profiler saw without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import TORCH, thinned
from torch import Tensor
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan


def other() -> Tensor:
    return torch.rand(64, 64)


def classes() -> Tensor:
    return torch.zeros(64, dtype=torch.int64)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda x: x.clamp(-other(), other()),
    "clamp from below": lambda x: x.clamp_min(other()),
    "clamp from above": lambda x: x.clamp_max(other()),
    "clamp by numbers": lambda x: x.clamp(-0.5, 0.5),
    "larger of two": lambda x: torch.maximum(x, other()),
    "smaller of two": lambda x: torch.minimum(x, x * 2),
    "larger of two but for nan": lambda x: torch.fmax(x, other()),
    "atan2": lambda x: torch.atan2(x, other()),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, other()),
    "its sum": lambda x: F.binary_cross_entropy_with_logits(x, other(), reduction="none").sum(),
    "with weights of the positive": lambda x: F.binary_cross_entropy_with_logits(x, other(), pos_weight=other()),
    "with weights": lambda x: F.binary_cross_entropy_with_logits(x, other(), weight=other()),
    "of the targets": lambda x: F.binary_cross_entropy(other(), x.sigmoid()),
    # torch 2.11 cannot differentiate it
    **({"smallest and largest": lambda x: sum(one.sum() for one in torch.aminmax(x))} if TORCH > (2, 11) else {}),
    "largest": lambda x: x.max(),
    "smallest": lambda x: x.min(),
    "median": lambda x: x.median(),
    "median but for nan": lambda x: x.nanmedian(),
    "largest of each row": lambda x: x.max(1)[0],
    "median of each row": lambda x: x.median(1)[0],
    "product": lambda x: x.prod(),
    "product of each row": lambda x: x.prod(1),
    "product of each column": lambda x: x.prod(0),
    "running product": lambda x: x.abs().cumprod(1),
    "running product of columns": lambda x: (x.abs() + 1).cumprod(0) * 2,
    "sign": lambda x: x.sgn(),
    "running maximum": lambda x: x.cummax(1)[0],
    "gather": lambda x: x.gather(1, torch.zeros(64, 5, dtype=torch.int64)),
    "take": lambda x: x.take(torch.tensor([1, 2])),
    "trace": lambda x: x.trace(),
    "rows": lambda x: x.index_select(0, torch.tensor([0, 1])),
    "most common": lambda x: x.mode()[0],
    "the largest three": lambda x: x.topk(3)[0],
    "what is read twice": lambda x: (x * x).exp() + x.exp().sin() + x.tanh(),
    "a square": lambda x: x * x,
    "a row beside another": lambda x: x[1:] * x[:-1],
    "variance": lambda x: x.var(),
    "variance and mean": lambda x: sum(torch.var_mean(x)),
    "deviation and mean": lambda x: sum(one.sum() for one in torch.std_mean(x, 1)),
    "group norm": lambda x: F.group_norm(x[None], 4),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.T + 64 * torch.eye(64)),
    "smoothed labels": lambda x: F.cross_entropy(x, classes(), label_smoothing=0.1),
    "masked attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], torch.zeros(64, 64)),
}


def step_of(op: Callable[[Tensor], Any]) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        x = torch.randn(64, 64, requires_grad=True)

        def step() -> None:
            x.grad = None
            result = op(x)
            result.sum().backward()

        return step

    return build


@pytest.mark.parametrize("name", thinned(OPS, 4))
def test_the_peak_is_that_of_the_form_without_a_mode(name: str) -> None:
    build = step_of(OPS[name])
    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


def test_of_a_mask_everything_counts_as_selected() -> None:
    def masked(share: float) -> Callable[[], Callable[[], None]]:
        return step_of(lambda x: x.masked_fill(other() < share, x.sum()))

    trace = memplan.record(masked(0.5), device="cpu")
    assert any("every element was taken as filled" in assumption.text for assumption in trace.assumptions)
    predicted = memplan.simulate(trace).peak_allocated
    measured = [measured_peak(masked(share)) for share in (0.1, 0.5, 2.0)]
    assert measured == sorted(measured)
    assert measured[-1] <= predicted <= 1.01 * measured[-1]
