"""Temporaries of linear algebra on the CPU: BatchLinearAlgebra.cpp, LinearAlgebra.cpp, and the workspaces of LAPACK.

``n`` is the order of the matrices, ``batch`` their number.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cpu.scalar_operands import of_number
from memplan.trace.semantics.cpu.temporaries.lapack import (
    applied_workspace,
    factors_workspace,
    general_workspace,
    least_squares_workspace,
    product_workspace,
    symmetric_workspace,
)
from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import bytes_of, copied, transposing

_INFO = 4
"""Bytes of LAPACK's `info` of a matrix."""


def _order(matrices: torch.Tensor) -> tuple[int, int]:
    return prod(matrices.shape[:-2]), matrices.shape[-1]


def _infos(batch: int) -> int:
    return _INFO * max(1, batch)


def _checked(infos: int) -> int:
    """_linalg_check_errors: all infos as booleans, and `any` of them."""
    return 1 + infos


def check_errors(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """_linalg_check_errors."""
    return _checked(args[0].numel())


def cholesky_solve(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """A copy of the factors for each result, and LAPACK's infos or the block buffer of a transposed copy."""
    batch, order = max(1, prod(result.shape[:-2])), args[1].shape[-1]
    other = max(_infos(batch) + _checked(batch), transposing(args[1].mT))
    return batch * order * order * result.element_size() + other


def _permutation_sign(batch: int, n: int) -> int:
    """lu_det_P: the pivots and their positions, where they differ, and the count of these as int64."""
    return (4 + batch) * n + 8 * batch + max(8 * batch * n, of_number(1, torch.int64))


def determinant(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """A factor for each matrix, and the sign of its permutation, which is cast to be multiplied."""
    batch, n = _order(args[0])
    size = batch * args[0].element_size()
    return _infos(batch) + size + max(_permutation_sign(batch, n), 8 * batch + size)


def log_determinant(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The sign of the permutation, then the signs of the diagonal and their product."""
    batch, n = _order(args[0])
    size = batch * args[0].element_size()
    return _infos(batch) + max(_permutation_sign(batch, n), 8 * batch + size * (n + 2))


def eigenvalues(vectors: bool) -> Formula:
    """Return the formula of linalg_eig or _linalg_eigvals: eigenvalues as pairs of reals, a copy, a workspace."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        x = args[0]
        if x.is_complex():
            return 0
        batch, n = _order(x)
        buffers = _infos(batch) + 2 * batch * n * x.element_size() + (bytes_of(x) if vectors else 0)
        workspace = x.element_size() * max(2, general_workspace(n, x.dtype, vectors))
        return buffers + max(bytes_of(x) + workspace, of_number(0.0, x.dtype) + batch * n)

    return formula


def eigh(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """LAPACK's workspaces; without eigenvectors also a copy of the matrices."""
    x, vectors = args[0], args[2] if len(args) > 2 else kwargs.get("compute_v", True)
    if x.is_complex() or not x.numel():
        return 0
    batch, n = _order(x)
    elements, integers = symmetric_workspace(n, x.dtype, vectors)
    buffers = _infos(batch) + max(elements * x.element_size() + 4 * integers, _checked(max(1, batch)))
    return buffers if vectors else bytes_of(x) + max(buffers, transposing(x.mT))


def solve_with_factors(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The check of the pivots: each is compared with a wrapped number."""
    return _pivots_check(args[1])


def solve(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The check of the result's pivots; a copy of right-hand sides that are vectors."""
    solution, factors = result[:2]
    return _pivots_check(result[2]) + (bytes_of(solution) if solution.dim() < factors.dim() else 0)


def solve_with_symmetric_factors(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """BatchLinearAlgebraKernel.cpp, apply_ldl_solve: a copy of the pivots and their check."""
    return bytes_of(args[1]) + _pivots_check(args[1])


def cholesky(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """BatchLinearAlgebra.cpp, cholesky: the block buffer of the transposed copy that becomes the result."""
    batch = max(1, _order(args[0])[0])
    return max(transposing(args[0].mT), _infos(batch) + _checked(batch)) if args[0].numel() else 0


def _pivots_check(pivots: torch.Tensor) -> int:
    return of_number(0, pivots.dtype) + pivots.numel() if pivots.numel() else 0


def lu_unpack(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The row numbers, and a permutation for each matrix of a batch; a square part to cut from non-square batches."""
    factors = args[0]
    if not result[0].numel():
        return 0
    (batch, _), (rows, columns) = _order(factors), factors.shape[-2:]
    batched = factors.dim() > 2
    cut = batch * min(rows, columns) ** 2 * factors.element_size() if batched and rows != columns else 0
    return max(cut, 8 * rows * (1 + batch if batched else 1))


def singular_values(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """A copy of the matrices, which LAPACK overwrites."""
    x = args[0]
    return _infos(_order(x)[0]) + bytes_of(x) + transposing(x.mT) if x.numel() else 0


def inverse(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """BatchLinearAlgebra.cpp, linalg_inv_ex_out: factors and pivots of the equation whose right-hand side is the
    identity."""
    x = args[0]
    if not x.numel():
        return 0
    batch, n = _order(x)
    return bytes_of(x) + _INFO * batch * n + of_number(0, torch.int32) + batch * n


def least_squares(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """BatchLinearAlgebra.cpp, linalg_lstsq: a copy of the matrices; for ``gelsy`` column pivots, a workspace, and the
    ranks twice."""
    x, right = args[0], result[0]
    batch, (rows, columns) = prod(x.shape[:-2]), x.shape[-2:]
    if not x.numel():
        return 0
    sides = 1 if args[1].dim() < x.dim() else right.shape[-1]
    workspace = least_squares_workspace(rows, columns, sides) * x.element_size()
    gelsy = _INFO * columns + workspace + 2 * result[2].element_size() * max(1, batch)
    return _infos(batch) + bytes_of(x) + gelsy


def pseudoinverse(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """LinearAlgebra.cpp, linalg_pinv: singular values and vectors, the mask of those above the tolerance, and a product
    of them."""
    x = args[0]
    batch, (rows, columns) = prod(x.shape[:-2]), x.shape[-2:]
    if not x.numel() or kwargs.get("hermitian", False):
        return 0
    order, size = min(rows, columns), x.element_size()
    tolerances = 16
    svd = batch * order * (rows + columns + 1) * size
    during_svd = _infos(batch) + transposing(x.mT)  # the copy that LAPACK overwrites is as large as the result
    return tolerances + svd + max(during_svd, 8 * batch + batch * order * (columns + 1) * size)


def lu(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """BatchLinearAlgebra.cpp, linalg_lu_out: factors and pivots; later the permutation, as in lu_unpack."""
    x = args[0]
    batch, (rows, columns) = prod(x.shape[:-2]), x.shape[-2:]
    if not x.numel():
        return 0
    pivots = _INFO * batch * min(rows, columns) + _infos(batch)
    block = transposing(x.mT) if rows == columns else 0
    return pivots + max(bytes_of(x) + block, 8 * rows * (1 + batch if x.dim() > 2 else 1))


def qr(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The reflections' factors, and a workspace or, for a batch of tall matrices, the triangular part that is cut."""
    x, (q, r) = args[0], result
    batch, columns = _order(x)
    rows, size = x.shape[-2], x.element_size()
    cut = bytes_of(r) if x.dim() > 2 and rows > columns and q.shape[-1] == columns else 0
    orgqr = product_workspace(rows, q.shape[-1], x.dtype) if q.numel() else 0
    workspace = size * max(factors_workspace(rows, columns), orgqr)
    return batch * min(rows, columns) * size + max(workspace, cut)


def reflections(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``geqrf``: its workspace."""
    x = args[0]
    return factors_workspace(*x.shape[-2:]) * x.element_size() if x.numel() else 0


def product_of_reflections(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``orgqr``: its workspace."""
    x = args[0]
    rows, columns = x.shape[-2:]
    return product_workspace(rows, columns, x.dtype) * x.element_size() if x.numel() else 0


def by_reflections(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``ormqr``: a column-major copy of the reflections, and the workspace."""
    x, other, left = args[0], args[2], args[3] if len(args) > 3 else kwargs.get("left", True)
    if not other.numel():
        return 0
    rows, columns = other.shape[-2:] if left else (other.shape[-1], other.shape[-2])
    workspace = applied_workspace(rows, columns, x.shape[-1], x.dtype)
    return copied(x.mT) + workspace * other.element_size()


def matrix_exp(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """LinearAlgebra.cpp, linalg_matrix_exp: the scaled matrices and buffers of five times their size, twice for a
    batch; for one matrix two more. For a single small matrix the degree, and with it a smaller size, depends on values.
    """
    x = args[0]
    batch, n = _order(x)
    if n <= 1 or not batch:
        return 0
    if batch == 1:
        return 12 * bytes_of(x) + 8 + 4 * x.element_size()
    return 10 * bytes_of(x) + 3 * batch * x.element_size()


FORMULAS: dict[str, Formula] = {
    "aten.linalg_matrix_exp.default": matrix_exp,
    "aten._linalg_check_errors.default": check_errors,
    **{f"aten.{name}.default": cholesky_solve for name in ("cholesky_solve", "_cholesky_solve_helper")},
    "aten._linalg_det.default": determinant,
    "aten._linalg_slogdet.default": log_determinant,
    "aten.linalg_eig.default": eigenvalues(True),
    "aten._linalg_eigvals.default": eigenvalues(False),
    "aten.linalg_eigvals.default": eigenvalues(False),
    "aten._linalg_eigh.default": eigh,
    "aten.linalg_lu_solve.default": solve_with_factors,
    "aten.linalg_ldl_solve.default": solve_with_symmetric_factors,
    "aten.cholesky.default": cholesky,
    "aten._linalg_solve_ex.default": solve,
    "aten.lu_unpack.default": lu_unpack,
    "aten._linalg_svd.default": singular_values,
    "aten.linalg_inv_ex.default": inverse,
    "aten.linalg_lstsq.default": least_squares,
    "aten.linalg_qr.default": qr,
    "aten.geqrf.default": reflections,
    "aten.linalg_householder_product.default": product_of_reflections,
    "aten.linalg_pinv.atol_rtol_tensor": pseudoinverse,
    "aten.linalg_lu.default": lu,
    "aten.ormqr.default": by_reflections,
}
