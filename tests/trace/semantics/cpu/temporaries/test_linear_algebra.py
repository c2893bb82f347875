"""Linear algebra: the predicted peak beside what torch's profiler saw without a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan
from memplan.errors import DataDependentError

pytestmark = pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated:UserWarning")
SHAPES = ((5, 5), (3, 4, 4), (2, 3, 6, 6), (20, 20))


def positive(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "determinant": torch.linalg.det,
    "its sign and logarithm": torch.linalg.slogdet,
    "its logarithm": lambda x: torch.logdet(positive(x)),
    "eigenvalues": lambda x: torch.linalg.eigvals(x).abs(),
    "eigenvectors": lambda x: torch.linalg.eig(x).eigenvectors.abs(),
    "eigenvalues of a symmetric one": torch.linalg.eigvalsh,
    "eigenvectors of a symmetric one": torch.linalg.eigh,
    "solved": lambda x: torch.linalg.solve(x, x),
    "solved by its factors": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(positive(x))),
    "inverse": torch.linalg.inv,
    "solved with least squares": lambda x: torch.linalg.lstsq(x, x * 2)[0],
    "pseudoinverse": torch.linalg.pinv,
    "singular values": torch.linalg.svd,
    "exponential": torch.matrix_exp,
    "reflections": torch.linalg.qr,
    "factors": torch.linalg.lu,
    "factors, unpacked": lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x)),
    "chain": lambda x: torch.linalg.multi_dot([x, x, x, x]) if x.dim() == 2 else x * 2,
}
FORWARD: dict[str, Callable[[Tensor], Any]] = {
    "determinant": torch.linalg.det,
    "its sign and logarithm": torch.linalg.slogdet,
    "eigenvectors": torch.linalg.eig,
    "eigenvectors of a symmetric one": torch.linalg.eigh,
    "solved by its factors": lambda x: torch.cholesky_solve(x, x),
    "singular values": torch.linalg.svd,
    "inverse": torch.linalg.inv,
    "inverse and what LAPACK says": torch.linalg.inv_ex,
    "pseudoinverse": torch.linalg.pinv,
    "factors": torch.linalg.lu,
    "solved with least squares": lambda x: torch.linalg.lstsq(x, x),
    "solved with least squares for a vector": lambda x: torch.linalg.lstsq(x, x[..., 0]),
    "factors of reflections": torch.geqrf,
    "solved for a vector": lambda x: torch.linalg.solve(x, x[..., 0]),
    "triangular factor": lambda x: torch.cholesky(positive(x)),
    "exponential": torch.matrix_exp,
    "reflections": torch.linalg.qr,
    "all reflections": lambda x: torch.linalg.qr(x, "complete"),
    "product of reflections": lambda x: torch.linalg.householder_product(x, x[..., 0].contiguous()),
    "times a product of reflections": lambda x: torch.ormqr(x, x[..., 0].contiguous(), x),
    "factors, unpacked": lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x)),
}


def peaks(op: Callable[[Tensor], Any], shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> tuple[int, int]:
    def build() -> Any:
        torch.manual_seed(0)
        x = torch.rand(shape, dtype=dtype, requires_grad=grad)

        def step() -> None:
            x.grad = None
            results = op(x)
            if grad:
                results = (results,) if isinstance(results, Tensor) else results
                sum(one.sum() for one in results if one.requires_grad).backward()  # pyright: ignore[reportAttributeAccessIssue]

        return step

    return memplan.simulate(memplan.record(build, device="cpu")).peak_allocated, measured_peak(build)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_an_op_and_its_derivative_take_what_the_allocator_saw(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        predicted, measured = peaks(OPS[name], shape, dtype, True)
        assert predicted == measured, shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORWARD)
def test_an_op_takes_what_the_allocator_saw(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        predicted, measured = peaks(FORWARD[name], shape, dtype, False)
        assert predicted == measured, shape


LARGE = ((33, 33), (51, 51), (70, 70), (2, 70, 70))
"""Shapes around those at which LAPACK starts to work in blocks, and copies to transpose in blocks."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in FORWARD if name != "exponential"])
def test_a_large_matrix_is_worked_on_in_blocks(name: str, dtype: torch.dtype) -> None:
    for shape in LARGE:
        predicted, measured = peaks(FORWARD[name], shape, dtype, False)
        assert predicted == measured, shape


TALL_AND_WIDE: dict[str, Callable[[Tensor], Any]] = {
    "singular values": torch.linalg.svd,
    "pseudoinverse": torch.linalg.pinv,
    "factors": torch.linalg.lu,
    "reflections": torch.linalg.qr,
    "factors of reflections": torch.geqrf,
    "solved with least squares": lambda x: torch.linalg.lstsq(x, x),
    "solved with least squares for a vector": lambda x: torch.linalg.lstsq(x, x[..., 0]),
}


@pytest.mark.parametrize("name", TALL_AND_WIDE)
def test_matrices_that_are_not_square_take_what_the_allocator_saw(name: str) -> None:
    for shape in ((7, 4), (4, 7), (3, 7, 4), (100, 30), (30, 100), (60, 15), (11, 60), (10, 60)):
        predicted, measured = peaks(TALL_AND_WIDE[name], shape, torch.float32, False)
        assert predicted == measured, shape


def test_products_of_few_reflections_are_worked_on_in_blocks() -> None:
    for shape in ((40, 7), (100, 30), (130, 10), (2, 70, 60)):
        x = torch.rand(shape)
        for op in (
            lambda x: torch.linalg.householder_product(x, x[..., 0, :].contiguous()),
            lambda x: torch.ormqr(x, x[..., 0, :].contiguous(), x),
            lambda x: torch.ormqr(x, x[..., 0, :].contiguous(), x.mT, left=False),
        ):
            predicted, measured = peaks(op, tuple(x.shape), torch.float32, False)
            assert predicted == measured, shape


VALUES_ALONE: dict[str, Callable[[Tensor], Any]] = {
    "singular values": lambda x: torch.linalg.svdvals(x),
    "eigenvalues": lambda x: torch.linalg.eigvals(x),
    "eigenvalues of a symmetric one": lambda x: torch.linalg.eigvalsh(x),
    "rank": lambda x: torch.linalg.matrix_rank(x),
    "condition": lambda x: torch.linalg.cond(x),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "vectors, which are asked for": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
}


@pytest.mark.parametrize("name", VALUES_ALONE)
def test_vectors_are_computed_where_they_are_needed_alone(name: str) -> None:
    for shape in ((5, 5), (70, 70), (2, 33, 33)):
        predicted, measured = peaks(VALUES_ALONE[name], shape, torch.float32, False)
        assert predicted == measured, shape
    if name != "rank":
        predicted, measured = peaks(lambda x: VALUES_ALONE[name](x).abs(), (5, 5), torch.float32, True)
        assert predicted == measured


def test_symmetric_factors_solve_with_a_copy_of_the_pivots() -> None:
    for shape in ((5, 5), (3, 4, 4)):
        predicted, measured = peaks(
            lambda x: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(positive(x)), x), shape, torch.float32, False
        )
        assert predicted == measured, shape


def test_a_driver_that_says_by_values_what_it_returns_is_refused() -> None:
    def build() -> Any:
        x = torch.rand(6, 4)
        return lambda: torch.linalg.lstsq(x, x, driver="gelsd")

    with pytest.raises(DataDependentError):
        memplan.record(build, device="cpu")


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 5), (2, 4, 5, 3)])
def test_factors_that_are_not_square_are_cut_to_it(shape: tuple[int, ...]) -> None:
    predicted, measured = peaks(lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x)), shape, torch.float32, False)
    assert predicted == measured


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (2, 6, 3)])
def test_reflections_of_matrices_that_are_not_square(shape: tuple[int, ...]) -> None:
    for mode in ("reduced", "complete"):
        predicted, measured = peaks(lambda x, mode=mode: torch.linalg.qr(x, mode), shape, torch.float32, False)
        assert predicted == measured, mode


def test_a_product_without_terms_takes_no_copies() -> None:
    def build() -> Any:
        x, y = torch.rand(2, 0, requires_grad=True), torch.rand(0, 2, requires_grad=True)
        return lambda: (x @ y).sum().backward()

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)
