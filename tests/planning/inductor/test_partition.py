"""Both halves as core ops: laid out as the graph has them, whatever Inductor traces in an op's place."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from environment import slow
from hypothesis import strategies as st
from torch import Tensor, nn

import memplan
from memplan import _torch
from memplan.planning.capture.flat_call import call_of
from memplan.planning.inductor.candidate_search import Fusing
from memplan.planning.inductor.partition import laid_out
from memplan.planning.planner import Planner
from memplan.planning.settings import Settings

needs_compiler = pytest.mark.skipif(
    _torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here"
)

SETTINGS = Settings(engine="inductor", costs="roofline", channels_last=False)


class Cached(nn.Module):
    """Attention as with a cache that is empty: `cat` lays its result out in order, Inductor's `cat` of one tensor
    as that tensor, and then heads and batch cannot be seen as one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 64), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (one.view(2, 8, 4, 8).transpose(1, 2) for one in self.into(x).split(32, 2))
        key = torch.cat([torch.empty(0), key], -2)
        scores = (query @ (key * 0.5).transpose(-2, -1)).softmax(-1)
        return self.out((scores @ query).transpose(1, 2).reshape(2, 8, 32)).square().mean()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("share", [1.0, *slow(0.0)])
def test_a_cat_that_inductor_lays_out_otherwise(share: float) -> None:
    torch.manual_seed(0)
    model, x = Cached(), torch.randn(2, 8, 32)
    model(x).backward()
    eager = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    plan = memplan.plan(model, x, budget="1GB", costs="roofline")
    budget = int(plan.floor + share * (plan.eager_peak - plan.floor)) + 4096
    fitted = memplan.fit(model, x, budget=budget, engine="inductor", pairs=0)
    assert fitted.proof.ok
    model.zero_grad()
    model(x).backward()
    ours = [one.grad for one in model.parameters() if one.grad is not None]
    assert len(ours) == len(eager) == 4
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other)


@st.composite
def laid(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A shape, and two orders of its dimensions in memory."""
    shape = draw(st.lists(st.integers(1, 4), max_size=5))
    has, wanted = (draw(st.permutations(range(len(shape)))) for _ in range(2))
    return shape, list(has), list(wanted)


def tensor_of(shape: list[int], order: list[int]) -> Tensor:
    return torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


@hypothesis.given(laid())
def test_any_order_of_dimensions(given: tuple[list[int], list[int], list[int]]) -> None:
    shape, has, wanted = given
    x, like = tensor_of(shape, has).normal_(), tensor_of(shape, wanted)
    made = laid_out(x, like.stride(), x.dtype)
    assert torch.equal(made, x)
    alike = zip(shape, made.stride(), like.stride(), strict=True)
    assert all(size == 1 or one == other for size, one, other in alike)


def test_what_is_wider_than_in_the_graph_is_narrowed() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(laid_out(x, (1, 3), torch.bfloat16), x.bfloat16())
    assert laid_out(x, (1, 3), torch.bfloat16).stride() == (1, 3)


def test_what_leaves_gaps_or_overlaps_stays() -> None:
    x = torch.randn(3, 4)
    assert laid_out(x, (8, 1), x.dtype) is x
    assert laid_out(x, (0, 1), x.dtype) is x
    assert laid_out(x, (4, 1), x.dtype) is x


class Residual(nn.Module):
    """A bottleneck beside a stream of many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(32, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


@pytest.mark.slow
@needs_compiler
def test_a_sum_that_is_read_again_takes_the_place_of_what_it_is_made_of() -> None:
    """Else the gradients of a residual stream wait in pieces, and the least is far above what a step takes op by op."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(Residual() for _ in range(4)), nn.AdaptiveAvgPool2d(1))
    call = call_of((torch.randn(2, 3, 32, 32),), {})
    search = Planner(model).study(call, SETTINGS).search(SETTINGS)
    one = Fusing(search).candidate(search.floor().choices)
    assert one.peak <= 1.02 * search.floor_peak
    fitted = memplan.fit(model, torch.randn(2, 3, 32, 32), budget=int(1.01 * one.peak), engine="inductor", pairs=1)
    assert fitted.proof.peak is not None
    assert fitted.proof.peak <= 1.01 * one.peak
