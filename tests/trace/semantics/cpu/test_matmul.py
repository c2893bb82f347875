"""oneDNN's scratchpads of products in bfloat16, held against torch's profiler."""

from __future__ import annotations

import pytest
import torch
from truth.cpu_allocator import allocations, peak_of

from memplan import _torch
from memplan.trace.semantics.cpu import matmul
from memplan.trace.semantics.layout import has_amx

needs_brgemm = pytest.mark.skipif(
    not _torch.onednn_computes_in(torch.bfloat16) or has_amx() or torch.get_num_threads() > 1,
    reason="read off oneDNN with AVX512-BF16; several threads divide the rows as they like",
)
SHAPES = (
    (8, 64, 64), (8, 64, 10), (8, 64, 1000), (10, 100, 100), (33, 65, 129), (8, 512, 512), (256, 768, 768),
    (8, 1024, 512), (8, 2048, 512), (64, 768, 3072), (1024, 768, 768), (512, 3072, 768), (2048, 64, 64),
)  # fmt: skip


def matrix(rows: int, columns: int, *, transposed: bool) -> torch.Tensor:
    plain = torch.zeros((columns, rows) if transposed else (rows, columns), dtype=torch.bfloat16)
    return plain.t() if transposed else plain


@needs_brgemm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("first", "second"), [(False, True), (False, False), (True, False)])
def test_scratchpad_of_a_product(shape: tuple[int, int, int], *, first: bool, second: bool) -> None:
    rows, depth, columns = shape
    a, b = matrix(rows, depth, transposed=first), matrix(depth, columns, transposed=second)
    measured = peak_of(allocations(lambda: a @ b)) - rows * columns * 2
    assert matmul.scratch(a, b) == pytest.approx(measured, rel=1e-3, abs=0)


@needs_brgemm
def test_rows_that_256_does_not_divide_take_at_most_what_is_predicted() -> None:
    for rows in (257, 300, 333, 1000):
        a, b = matrix(rows, 64, transposed=False), matrix(64, 64, transposed=True)
        measured = peak_of(allocations(lambda a=a, b=b: a @ b)) - rows * 64 * 2
        assert measured <= matmul.scratch(a, b) <= 2.5 * measured


def test_other_dtypes_and_small_products_are_left_to_blas() -> None:
    assert matmul.scratch(torch.zeros(64, 64), torch.zeros(64, 64)) == 0
    small = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert matmul.scratch(small, small) == 0
