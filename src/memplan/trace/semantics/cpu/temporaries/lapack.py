"""Workspace sizes that LAPACK returns, in elements.

They are MKL's, whose formulas are LAPACK's with its own block sizes; they were read off for real matrices on one thread
of an AVX512 processor. For complex matrices nothing is counted.
"""

from __future__ import annotations

import torch


def general_workspace(n: int, dtype: torch.dtype, vectors: bool) -> int:
    """``geev``: elements of its workspace; blocked in float32, and for large matrices."""
    if dtype is torch.float64 and n < _LARGE_DOUBLES:
        return (4 if vectors else 3) * n + 1
    return (386 if vectors and (n >= 16 or dtype is torch.float64) else 34) * n + 1


_LARGE_DOUBLES = 128


def symmetric_workspace(n: int, dtype: torch.dtype, vectors: bool) -> tuple[int, int]:
    """``syevd``: elements and integers of its two workspaces."""
    if n <= 1:
        return 2, 1
    if vectors:
        return 2 + 6 * n + 2 * n * n, 3 + 5 * n
    block = 1 if n < 16 else 20 if dtype is torch.float32 else 24
    return (block + 2) * n + 1, 1


def factors_workspace(rows: int, columns: int) -> int:
    """``geqrf``: rows of a block of reflections; small matrices are unblocked."""
    wide = columns > 50
    if rows <= 10:
        return (2 if wide else 1) * (columns + 1)
    blocked = wide or (rows > 50 and columns > 20)
    return (17 if blocked else 1) * (columns + 1)


def _blocked_from(dtype: torch.dtype) -> int:
    """Return the order from which on reflections are applied in blocks."""
    return 48 if dtype is torch.float64 else 32


def product_workspace(rows: int, columns: int, dtype: torch.dtype) -> int:
    """``orgqr``: rows of a block."""
    block = 1 if rows < _blocked_from(dtype) else 16 if columns <= 64 else 32
    return block * columns + 1


def applied_workspace(rows: int, columns: int, reflections: int, dtype: torch.dtype) -> int:
    """``ormqr``, applied to a matrix of this size: a row, or the rows and reflections of a block."""
    if max(rows, columns) < _blocked_from(dtype):
        return columns
    order = min(rows, columns)
    return (8 if order <= 64 else 16 if order <= 128 else 32) * (columns + reflections)


def least_squares_workspace(rows: int, columns: int, sides: int) -> int:
    """``gelsy``, for `sides` right-hand sides."""
    block = 1 if max(rows, columns) <= 10 else 32
    order = min(rows, columns)
    return 1 + max(order + 2 * columns + block * (columns + 1), 2 * order + block * sides)
