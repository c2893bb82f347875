"""Temporaries of kernels on sparse tensors: predicted beside what torch's profiler saw, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from truth.cpu_allocator import measured_peak

import memplan

# torch says so once in a process, of its own optimizers, too
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS, COLUMNS, WIDTH, COUNT = 300, 200, 16, 900
Matrix = Callable[[], torch.Tensor]


def coordinates() -> torch.Tensor:
    """All of its elements differ, which a recording does not know."""
    places = torch.arange(COUNT) * (ROWS * COLUMNS // COUNT) + torch.randint(0, 1, (COUNT,))
    indices = torch.stack([torch.div(places, COLUMNS, rounding_mode="floor"), places % COLUMNS])
    return torch.sparse_coo_tensor(indices, torch.randn(COUNT), (ROWS, COLUMNS))


def in_order() -> torch.Tensor:
    return coordinates().coalesce()


def predicted_and_measured(build: Callable[[], Callable[[], Any]]) -> tuple[int, int]:
    return memplan.simulate(memplan.record(build, device="cpu")).peak_allocated, measured_peak(build)


def step_of(make: Matrix, run: Callable[..., Any]) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        matrix = make()
        dense = torch.randn(COLUMNS, WIDTH, requires_grad=True)
        left = torch.randn(ROWS, WIDTH, requires_grad=True)
        full = torch.randn(ROWS, COLUMNS, requires_grad=True)
        leaves = [dense, left, full]

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            result = run(matrix, dense, left, full)
            result = result if result.layout == torch.strided else result.to_dense()
            loss = result.sum()
            del result
            if loss.requires_grad:
                loss.backward()

        return step

    return build


RUNS: dict[str, tuple[Matrix, Callable[..., Any]]] = {
    "coo @": (coordinates, lambda a, d, m, x: a @ d),
    "coo mm": (in_order, lambda a, d, m, x: torch.sparse.mm(a, d)),
    "coo addmm": (in_order, lambda a, d, m, x: torch.sparse.addmm(m, a, d)),
    "coo turned": (in_order, lambda a, d, m, x: a.t() @ m),
    "@ coo": (in_order, lambda a, d, m, x: m.t() @ a),
    "to_sparse": (coordinates, lambda a, d, m, x: x.to_sparse()),
    "coo and coo": (coordinates, lambda a, d, m, x: a - a * 2),
    "dense and coo": (coordinates, lambda a, d, m, x: x + a),
    "mask": (in_order, lambda a, d, m, x: x.sparse_mask(a)),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_op_takes_what_is_predicted(name: str) -> None:
    make, run = RUNS[name]
    predicted, measured = predicted_and_measured(step_of(make, run))
    assert predicted == measured


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_dense_tensor_made_sparse_never_takes_more(share: float) -> None:
    def build() -> Callable[[], Any]:
        x = torch.rand(200, 300)
        return lambda: (x * (x < share)).to_sparse()

    trace = memplan.record(build, device="cpu")
    predicted, measured = memplan.simulate(trace).peak_allocated, measured_peak(build)
    assert measured <= predicted
    assert share < 1 or predicted == measured
    assert "no element of it taken as zero" in trace.assumptions[0].text


def test_a_matrix_from_outside_keeps_its_elements() -> None:
    matrix = in_order()

    def build() -> Callable[[], None]:
        linear, x = torch.nn.Linear(32, 16), torch.randn(COLUMNS, 32)
        return lambda: torch.sparse.mm(matrix, linear(x)).pow(2).mean().backward()

    predicted, measured = predicted_and_measured(build)
    assert predicted == measured
