"""Temporaries of matrix products and oneDNN's LSTM.

mm in float32 (Blas.cpp, addmm_impl_cpu_) copies an operand that no stride describes as a matrix to BLAS.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.layout import bytes_of, copied


def _matrix(tensor: torch.Tensor) -> bool:
    """Whether BLAS can read it, plain or transposed."""
    (rows, columns), (over, along) = tensor.shape[-2:], tensor.stride()[-2:]
    return (along == 1 and over >= max(1, columns)) or (over == 1 and along >= max(1, rows))


def _copies(*tensors: torch.Tensor) -> int:
    return sum(0 if _matrix(t) else bytes_of(t) for t in tensors)


def product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``mm``."""
    return _copies(args[0], args[1])


def sum_and_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``addmm``."""
    return _copies(args[1], args[2])


def batched(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``bmm``: float32 copies one matrix at a time; oneDNN, for bfloat16, wants whole contiguous operands."""
    if args[0].dtype is not torch.bfloat16:
        return 0
    return sum(0 if t.transpose(1, 2).is_contiguous() else copied(t) for t in args[:2])


FORMULAS = {
    "aten.mm.default": product,
    "aten.addmm.default": sum_and_product,
    "aten.bmm.default": batched,
}
