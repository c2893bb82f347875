"""What convolutions and products in fewer bits hold: as the allocator's own events say, read by other code."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from environment import needs_avx512, slow, thinned
from torch import Tensor, nn
from truth.cpu_allocator import allocations, peak_of

import memplan
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost import cpu_workspace
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES, overload
from memplan.planning.graph.precision import Precision

aten = torch.ops.aten
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def held(call: Any) -> int:
    """Bytes beyond the results at the highest moment."""
    results: list[Any] = []
    sizes = allocations(lambda: results.append(call()))
    return peak_of(sizes) - sum(sizes)


def convolution(dims: int, channels: int, stride: int, last: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    x, w = torch.randn(2, channels, *[10] * dims).to(dtype), torch.randn(12, channels, *[3] * dims).to(dtype)
    if last:
        x = x.to(memory_format=LAST[dims + 2])
    return x, w, None, [stride] * dims, [1] * dims, [1] * dims, False, [0] * dims, 1


@pytest.mark.parametrize(
    ("dims", "channels", "stride", "last", "dtype"),
    thinned(itertools.product([2, 3], [3, 16], [1, 2], [False, True], [torch.bfloat16, torch.float32]), 3),
)
def test_convolutions(dims: int, channels: int, stride: int, last: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = convolution(dims, channels, stride, last, dtype)
    assert cpu_workspace.measured_workspace("aten.convolution.default", args, {}) == held(
        lambda: aten.convolution.default(*args)
    )
    gradient = torch.randn_like(aten.convolution.default(*args))
    for mask in ([True, True, False], [False, True, False], [True, False, False]):
        given = gradient, *args[:2], [0], *args[3:], mask
        found = cpu_workspace.measured_workspace("aten.convolution_backward.default", given, {})
        assert found == held(lambda given=given: aten.convolution_backward.default(*given))


@pytest.mark.parametrize("size", [64, 700])
def test_products(size: int) -> None:
    torch.manual_seed(0)
    a, b, c = (torch.randn(size, size).bfloat16() for _ in range(3))
    assert cpu_workspace.measured_workspace("aten.mm.default", (a, b.T), {}) == held(lambda: aten.mm.default(a, b.T))
    found = cpu_workspace.measured_workspace("aten.addmm.default", (c, a, b), {"alpha": 2})
    assert found == held(lambda: aten.addmm.default(c, a, b, alpha=2))
    assert cpu_workspace.measured_workspace("aten.mm.out", (a, b), {"out": c}) == held(lambda: aten.mm.out(a, b, out=c))


def test_what_formulas_know_is_not_run() -> None:
    x = torch.randn(4, 4)
    assert cpu_workspace.measured_workspace("aten.mm.default", (x, x), {}) is None
    assert cpu_workspace.measured_workspace("aten.relu.default", (x.bfloat16(),), {}) is None


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(512, 8)]
    return nn.Sequential(*layers), torch.randn(2, 4, 10, 10, 10)


def test_a_graph_is_told_what_its_ops_hold() -> None:
    model, x = stack()
    graph = capture(model, call_of((x,), {}), Precision("bfloat16")).graph
    found = cpu_workspace.with_measured_scratch(graph)
    targets = cpu_workspace.CONVOLUTIONS | cpu_workspace.PRODUCTS
    low = [op for op in found.ops if op.target in targets]
    assert len(low) >= 7
    for op in low:
        made: Any = {v.id: torch.zeros(v.shape, dtype=getattr(torch, v.dtype)) for v in graph.values}
        made = {v.id: made[v.id].as_strided(v.shape, v.stride) for v in graph.values if all(v.stride)}
        args, kwargs = cpu_workspace.map_refs((op.args, op.kwargs), made.__getitem__)
        call = functools.partial(overload(op.target), *args, **kwargs)
        assert op.scratch == held(call) + NUMBER_TENSOR_BYTES
    others = [(op, other) for op, other in zip(found.ops, graph.ops, strict=True) if op.target not in targets]
    assert all(op is other for op, other in others)


@needs_avx512
@pytest.mark.parametrize("dims", [2, *slow(3)])
def test_the_step_without_a_plan_holds_what_was_measured(dims: int) -> None:
    """Convolutions in bfloat16 whose kernels hold several times what the formulas say."""
    torch.manual_seed(0)
    kind = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    layers = [part for inside in (1, 8, 8) for part in (kind(inside, 8, 1, bias=False), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(4, 1, *[{2: 96, 3: 24}[dims]] * dims)
    there = sum(one.nbytes for one in (*model.parameters(), x))

    def step() -> None:
        with torch.autocast("cpu"):
            result = Total()(model(x))
        result.backward()
        model.zero_grad()

    with torch.autocast("cpu"):
        predicted = memplan.plan(nn.Sequential(model, Total()), x, budget="1GB").eager_peak
        formulas = memplan.plan(nn.Sequential(model, Total()), x, budget="1GB", costs="roofline").eager_peak
    step()
    measured = there + peak_of(allocations(step))
    assert abs(predicted - measured) < 0.01 * measured
    assert abs(predicted - measured) <= abs(formulas - measured)


def test_when_the_time_is_up_formulas_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_workspace, "_known", {})
    model, x = stack()
    graph = capture(model, call_of((x,), {}), Precision("bfloat16")).graph
    cpu_workspace.with_measured_scratch(graph, limit=0.0)
    assert len(cpu_workspace._known) == 1  # the largest


def test_nothing_of_the_callers_is_touched() -> None:
    state = torch.get_rng_state()
    x = torch.randn(2, 3, 8, 8).bfloat16().requires_grad_()
    torch.set_rng_state(state)
    before = x.detach().clone()
    args = x, torch.zeros(4, 3, 3, 3).bfloat16(), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    with torch.autocast("cpu"):
        cpu_workspace.measured_workspace("aten.convolution.default", args, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before, x)
    assert x.grad is None


def test_a_kernel_that_fails_goes_by_the_formula() -> None:
    x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 5, 3, 3)  # other channels than the weight takes
    args = x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    assert cpu_workspace.measured_workspace("aten.convolution.default", args, {}) is None


def test_planning_beside_a_profiler_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_workspace, "_known", {})
    model, x = stack()
    with torch.profiler.profile(acc_events=True) as seen:
        memplan.plan(nn.Sequential(model, Total()), x, budget="1GB")
        torch.special.sinc(x)
    assert any(event.name == "aten::special_sinc" or event.name == "aten::sinc" for event in seen.events() or ())
    assert cpu_workspace._known == {}
