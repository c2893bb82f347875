"""Indexing and embedding bags: the predicted peak beside what torch's profiler saw."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import thinned
from torch import Tensor
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan

INTS = torch.int32


def short(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=INTS)


def indices(x: Tensor) -> list[Tensor | None]:
    return [torch.zeros(4, 1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)]


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "gathered": lambda x: x.gather(0, short(3, 6)),
    "scattered": lambda x: x.scatter(0, short(3, 6), torch.ones(3, 6)),
    "a number scattered": lambda x: x.scatter(0, short(3, 6), 1.5),
    "scattered and added": lambda x: x.scatter_add(0, short(3, 6), torch.ones(3, 6)),
    "scattered and reduced": lambda x: x.scatter_reduce(0, short(3, 6), torch.ones(3, 6), "sum"),
    "an outer product added": lambda x: torch.addr(x, x[:, 0], x[0]),
    "times a vector": lambda x: torch.ones(()).expand(5, 4) @ x[:, 0],
    "where a mask is": lambda x: torch.ops.aten._unsafe_masked_index(x, torch.ones(4, 6) > 0, indices(x), 0),
    "added where a mask is": lambda x: torch.ops.aten._unsafe_masked_index_put_accumulate(
        x, torch.ones(4, 6) > 0, indices(x), torch.ones(4, 6)
    ),
    "all of another": lambda x: x.masked_scatter(torch.ones(4, 6) > 0, torch.ones(4, 6)),
    "of another": lambda x: torch.zeros(4, 6).masked_scatter(torch.ones(4, 6) > 0, x),
}


def peaks(shape: tuple[int, ...], op: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    def build() -> Any:
        x = torch.rand(shape, requires_grad=True)

        def step() -> None:
            x.grad = None
            op(x).sum().backward()

        return step

    return memplan.simulate(memplan.record(build, device="cpu")).peak_allocated, measured_peak(build)


@pytest.mark.parametrize("name", OPS)
def test_an_op_takes_what_the_allocator_saw(name: str) -> None:
    predicted, measured = peaks((4, 6), OPS[name])
    assert predicted == measured


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_an_embedding_bag(mode: str, last: bool) -> None:
    def bag(table: Tensor) -> Tensor:
        rows, bags = torch.tensor([0, 3, 4, 1, 1, 0]), torch.tensor([0, 3, 6] if last else [0, 3])
        weights = torch.rand(6, requires_grad=True) if mode == "weighted" else None
        how = "sum" if mode == "weighted" else mode
        return F.embedding_bag(rows, table, bags, mode=how, per_sample_weights=weights, include_last_offset=last)

    predicted, measured = peaks((10, 5), bag)
    assert predicted == measured


BY_INDEX: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gathered": lambda x, at, other: x.gather(0, at),
    "scattered": lambda x, at, other: x.scatter(0, at, other),
    "a number scattered": lambda x, at, other: x.scatter(0, at, 1.0),
    "scattered and added": lambda x, at, other: x.scatter_add(0, at, other),
    "sums": lambda x, at, other: x.scatter_reduce(0, at, other, "sum"),
    "largest": lambda x, at, other: x.scatter_reduce(0, at, other, "amax", include_self=False),
    "rows added": lambda x, at, other: x.index_add(0, at[:, 0], other),
    "rows chosen": lambda x, at, other: x.index_select(0, at[:, 0]),
    "largest of rows": lambda x, at, other: x.max(1)[0],
    "some of the largest": lambda x, at, other: x.topk(3)[0],
    "running maximum": lambda x, at, other: x.cummax(1)[0],
}


@pytest.mark.parametrize(
    ("name", "dtype", "grad"), thinned(itertools.product(BY_INDEX, [torch.bfloat16, torch.float32], [False, True]), 3)
)
def test_what_is_written_by_index_is_float32_meanwhile(name: str, dtype: torch.dtype, grad: bool) -> None:
    for rows in (10, 40):

        def build(rows: int = rows) -> Any:
            torch.manual_seed(0)
            x, at = torch.rand(rows, 10, dtype=dtype, requires_grad=grad), torch.randint(0, 10, (5, 10))

            def step() -> None:
                x.grad = None
                result = BY_INDEX[name](x, at, x[:5] * 2)
                if grad:
                    result.sum().backward()

            return step

        assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build), rows


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_reductions_by_the_older_names(reduce: str) -> None:
    def build() -> Any:
        x, at = torch.rand(40, 10, dtype=torch.bfloat16), torch.zeros(5, 10, dtype=torch.int64)
        return lambda: (x.scatter(0, at, x[:5] * 2, reduce=reduce), x.scatter(0, at, 2.0, reduce=reduce))

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("contiguous", [False, True])
def test_of_what_a_mask_selects_of_a_gradient_never_more_is_there(dtype: torch.dtype, contiguous: bool) -> None:
    def build(share: float) -> Any:
        x, factor = torch.rand(40, 60, dtype=dtype, requires_grad=True), torch.rand(40, 60, dtype=dtype)

        def step() -> None:
            x.grad = None
            result = torch.zeros(40, 60, dtype=dtype).masked_scatter(torch.rand(40, 60) < share, x)
            (result * factor if contiguous else result).sum().backward()

        return step

    trace = memplan.record(lambda: build(0.5), device="cpu")
    assert any("every element was taken as selected" in assumption.text for assumption in trace.assumptions)
    largest = max(measured_peak(lambda share=share: build(share)) for share in (0.1, 0.5, 2.0))
    assert largest <= memplan.simulate(trace).peak_allocated <= 1.02 * largest


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 20, 39, 40])
def test_of_what_a_known_mask_selects_the_gradient_is_exact(rows: int, contiguous: bool) -> None:
    def build() -> Any:
        x, factor = torch.rand(40, 60, requires_grad=True), torch.rand(40, 60)
        mask = torch.tensor([[row < rows] * 60 for row in range(40)])

        def step() -> None:
            x.grad = None
            result = torch.zeros(40, 60).masked_scatter(mask, x)
            (result * factor if contiguous else result).sum().backward()

        return step

    trace = memplan.record(build, device="cpu")
    assert not trace.assumptions
    assert memplan.simulate(trace).peak_allocated == measured_peak(build)
