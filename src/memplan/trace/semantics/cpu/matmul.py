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
from memplan.trace.semantics.layout import bytes_of, copied, has_amx

_PACKED_AT_MOST = 2 << 20
_SMALL = 16**3
_BLOCK_ROWS, _BLOCK_COLUMNS = 256, 64
"""Most rows of a block, usually fewer if they do not divide the rows; and columns of a packed block."""


def _is_readable_by_blas(tensor: torch.Tensor) -> bool:
    """Return whether BLAS can read the tensor without a copy, plain or transposed."""
    (rows, columns), (row_stride, column_stride) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))


def _copies(*tensors: torch.Tensor) -> int:
    return sum(0 if _is_readable_by_blas(t) else bytes_of(t) for t in tensors)


def _uses_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """mkldnn/Matmul.cpp, use_mkldnn_bf16_matmul and checksize: small products are left to BLAS."""
    if a.dtype is not torch.bfloat16 or a.numel() * b.shape[-1] <= _SMALL:
        return False
    return _torch.onednn_computes_in(a.dtype) and bool(torch.backends.mkldnn.enabled)


def scratch(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the scratchpad of oneDNN's product in bfloat16 (brgemm), of one matrix of a batch.

    Each thread packs a block of the second operand, 64 columns wide, and of the first if that is transposed, and adds
    up a block of the result in float32. The sizes of the blocks were read off what oneDNN 3.12 takes with AVX512-BF16.
    With AMX: the second operand, at most `_PACKED_AT_MOST`.
    """
    if not _uses_onednn(a, b):
        return 0
    (rows, depth), columns = a.shape[-2:], b.shape[-1]
    if has_amx():
        return min(depth * columns * b.element_size(), _PACKED_AT_MOST)
    rows, packed = min(rows, _BLOCK_ROWS), -(-depth // 32) * 32
    if a.stride(-1) == 1 or not _is_readable_by_blas(a):  # else its copy is contiguous
        packed = min(packed, 512 if depth <= 1024 else 1024)
        first, wide = 0, _BLOCK_COLUMNS
    else:
        packed = min(packed, 512)
        # rows of a power of two would share lines of the cache; the result of a part of the depth stays for the next
        first = 128 + rows * (packed + 32 * (packed == 512)) * a.element_size()
        wide = _BLOCK_COLUMNS if depth <= 512 else 1024
    second, result = packed * _BLOCK_COLUMNS * b.element_size(), rows * min(columns, wide) * 4
    return 1024 + torch.get_num_threads() * (first + second + result)


def product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the temporary bytes of ``mm``; with an empty operand it only fills its result."""
    if not args[0].numel() or not args[1].numel():
        return 0
    return _copies(args[0], args[1]) + scratch(args[0], args[1])


def sum_and_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the temporary bytes of ``addmm``."""
    return _copies(args[1], args[2]) + scratch(args[1], args[2])


def batched(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the temporary bytes of ``bmm``. Only oneDNN, for bfloat16, has any: it needs contiguous operands."""
    return _batched(args[0], args[1])


def sum_and_batched(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the temporary bytes of ``baddbmm``, as of `batched`."""
    return _batched(args[1], args[2])


def _batched(a: torch.Tensor, b: torch.Tensor) -> int:
    if not _uses_onednn(a, b):
        return 0
    return scratch(a, b) + sum(0 if t.transpose(1, 2).is_contiguous() else copied(t) for t in (a, b))


def by_vector(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
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
