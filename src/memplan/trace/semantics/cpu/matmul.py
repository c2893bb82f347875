"""Temporaries of matrix products.

mm (Blas.cpp, addmm_impl_cpu_) copies an operand whose strides BLAS cannot read; bfloat16 goes to oneDNN if the CPU
computes in it, which packs blocks of the operands and adds up in float32 (`scratch`). Where AMX multiplies, its size
is not known so well: from 0.5 to 5 MB were measured for products of 0.5 to 8 MB. The prediction is in between, and an
explanation says so.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes, has_amx, padded

_PACKED_AT_MOST = 2 << 20
_SMALL = 16**3
_BLOCK_ROWS, _BLOCK_COLUMNS = 256, 64
"""Most rows of a block, usually fewer if they do not divide the rows; and columns of a packed block."""


def _is_readable_by_blas(tensor: torch.Tensor) -> bool:
    """Return whether BLAS can read the tensor without a copy, plain or transposed."""
    (rows, columns), (row_stride, column_stride) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))


def _copies(*matrices: torch.Tensor) -> int:
    """Return the bytes of the copies of matrices that BLAS cannot read."""
    return sum(0 if _is_readable_by_blas(matrix) else bytes_of(matrix) for matrix in matrices)


def _uses_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies the matrices: in bfloat16, unless the product is small.

    Source: mkldnn/Matmul.cpp, use_mkldnn_bf16_matmul and checksize.
    """
    if a.dtype is not torch.bfloat16 or a.numel() * b.shape[-1] <= _SMALL:
        return False
    return _torch.onednn_computes_in(a.dtype) and bool(torch.backends.mkldnn.enabled)


def scratch(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the scratchpad bytes of oneDNN's product in bfloat16 (brgemm), of a single matrix of a batch; 0 without
    oneDNN.

    Each thread packs a block of the second operand, 64 columns wide, and of the first if that is transposed, and adds
    up a block of the result in float32. The sizes of the blocks were read off what oneDNN 3.12 takes with AVX512-BF16.
    With AMX: the second operand, at most `_PACKED_AT_MOST`.
    """
    if not _uses_onednn(a, b):
        return 0
    (rows, depth), columns = a.shape[-2:], b.shape[-1]
    if has_amx():
        return min(depth * columns * b.element_size(), _PACKED_AT_MOST)
    block_rows = min(rows, _BLOCK_ROWS)
    if a.stride(-1) == 1 or not _is_readable_by_blas(a):  # else its copy is contiguous
        block_depth = min(padded(depth, 32), 512 if depth <= 1024 else 1024)
        first_block, result_columns = 0, _BLOCK_COLUMNS
    else:
        block_depth = min(padded(depth, 32), 512)
        row_padding = 32 if block_depth == 512 else 0  # rows of a power of two would share lines of the cache
        first_block = 128 + block_rows * (block_depth + row_padding) * a.element_size()
        # the result of a part of the depth stays for the next part
        result_columns = _BLOCK_COLUMNS if depth <= 512 else 1024
    second_block = block_depth * _BLOCK_COLUMNS * b.element_size()
    result_block = block_rows * min(columns, result_columns) * 4
    return 1024 + torch.get_num_threads() * (first_block + second_block + result_block)


def product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``mm``; with an empty operand it only fills its result."""
    if not args[0].numel() or not args[1].numel():
        return 0
    return _copies(args[0], args[1]) + scratch(args[0], args[1])


def sum_and_product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``addmm``."""
    return _copies(args[1], args[2]) + scratch(args[1], args[2])


def batched(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``bmm``."""
    return _batched(args[0], args[1])


def sum_and_batched(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``baddbmm``."""
    return _batched(args[1], args[2])


def _batched(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the temporary bytes of a batch of products: only oneDNN has any, which needs each matrix contiguous, plain
    or transposed."""
    if not _uses_onednn(a, b):
        return 0
    return scratch(a, b) + sum(0 if t.transpose(1, 2).is_contiguous() else copy_bytes(t) for t in (a, b))


def by_vector(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``mv`` (Blas.cpp, gemv): a contiguous copy of the matrix if BLAS cannot read it."""
    return _copies(args[0]) if args[0].numel() else 0


FORMULAS = {
    "aten.mv.default": by_vector,
    "aten.mm.default": product,
    "aten.addmm.default": sum_and_product,
    "aten.addmm_.default": sum_and_product,
    "aten.bmm.default": batched,
    "aten.baddbmm.default": sum_and_batched,
    "aten.baddbmm_.default": sum_and_batched,
}
