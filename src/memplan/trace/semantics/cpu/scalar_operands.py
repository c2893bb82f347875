"""Numbers as operands: torch makes a tensor of one element of each, and casts it to the dtype of the kernel.

The former in ScalarOps.h, ``wrapped_scalar_tensor``; the latter in TensorIterator.cpp, ``compute_types``.
"""

from __future__ import annotations

from typing import Any

import torch

_ARITHMETIC = ("add", "sub", "mul", "div", "rsub", "remainder", "fmod", "floor_divide", "copysign", "xlogy")
_BITWISE = (
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"
)  # fmt: skip
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_OVERLOADS = (
    "Tensor",
    "Scalar",
    "default",
    "Tensor_mode",
    "Scalar_mode",
    "Tensor_Scalar",
    "Scalar_Other",
    "Scalar_Self",
)
OPS = frozenset(
    f"aten.{name}{place}.{overload}"
    for name in (*_ARITHMETIC, *_BITWISE, *_COMPARING)
    for place in ("", "_")
    for overload in _OVERLOADS
) | {"aten.pow.Scalar"}  # a power by a number has a kernel of its own
"""Ops of two operands, either of which may be a number."""
_FOREACH = frozenset(f"aten._foreach_{name}{place}.Scalar" for name in _ARITHMETIC for place in ("", "_"))
"""The same for each tensor of a list, one after the other."""

_WRAPPED = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_COMMON: dict[Any, torch.dtype] = {}
_FRACTIONS = ("aten.div.Tensor", "aten.div.Scalar", "aten.div_.Tensor", "aten.div_.Scalar")


def transient_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that the numbers among an op's first two operands take while it runs."""
    if name in _FOREACH:
        return max((_taken(name, tensor, args[1]) for tensor in args[0]), default=0)
    return _taken(name, *args[:2]) if name in OPS and len(args) > 1 else 0


def _taken(name: str, one: Any, other: Any) -> int:
    if isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor):
        return 0
    number = other if isinstance(one, torch.Tensor) else one
    common = common_dtype(one, other)
    if name in _FRACTIONS and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype()
    return of_number(number, common)


def common_dtype(one: Any, other: Any) -> torch.dtype:
    """Return `torch.result_type` of two operands. It is asked once for each kind: of fake tensors it is slow."""
    kinds = _kind(one), _kind(other)
    if None in kinds:
        return torch.result_type(one, other)
    key = (*kinds, torch.get_default_dtype())
    if key not in _COMMON:
        _COMMON[key] = torch.result_type(one, other)
    return _COMMON[key]


def _kind(operand: Any) -> Any:
    """Return what `torch.result_type` looks at; None for a tensor that may itself have been made of a number."""
    if not isinstance(operand, torch.Tensor):
        return type(operand)
    if operand.dim():
        return operand.dtype
    return None if operand.dtype in _WRAPPED.values() else (operand.dtype,)


def of_number(number: complex, common: torch.dtype) -> int:
    """Return the bytes that a number takes as the operand of a kernel that computes in a dtype."""
    dtype = wrapped(number)
    return dtype.itemsize + (0 if dtype is common else common.itemsize)


def wrapped(number: complex) -> torch.dtype:
    """Return the dtype of the tensor that torch makes of a number."""
    return next((dtype for kind, dtype in _WRAPPED.items() if isinstance(number, kind)), torch.float64)


def averaged(numel: int, dtype: torch.dtype, results: int = 1) -> int:
    """Return what a mean takes beside its result: sums, divided in place by the number of elements.

    Reduced precision is summed in float32, cast as a whole (ReduceOps.cpp, mean_kernel_impl and mean_out).
    """
    if dtype in (torch.bfloat16, torch.float16):
        return 4 * results + max(4 * numel, of_number(1, torch.float32))
    return of_number(1, dtype)
