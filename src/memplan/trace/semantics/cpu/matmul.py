"""Temporaries of matrix products.

mm (Blas.cpp, addmm_impl_cpu_) copies an operand whose strides BLAS cannot read; bfloat16 goes to oneDNN if the CPU
computes in it, which packs the second operand in parts. The real size depends on the CPU and its number of threads:
from 0.5 to 5 MB were measured for products of 0.5 to 8 MB; the prediction is in between, and an explanation says so.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.layout import bytes_of, copied

_PACKED_AT_MOST = 2 << 20
_SMALL = 16**3


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
    """Return the bytes of the second operand as packed by oneDNN in bfloat16: one matrix of a batch, at most
    `_PACKED_AT_MOST`."""
    if not _uses_onednn(a, b):
        return 0
    return min(b.shape[-1] * b.shape[-2] * b.element_size(), _PACKED_AT_MOST)


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
