"""Sizes of Python numbers as operands: torch wraps each in a one-element tensor and casts it to the kernel's dtype.

Source: ScalarOps.h, ``wrapped_scalar_tensor``; TensorIterator.cpp, ``compute_types``.
"""

from __future__ import annotations

from typing import Any

import torch

_ARITHMETIC = ("add", "sub", "mul", "div", "rsub", "remainder", "fmod", "floor_divide", "copysign", "xlogy")
_BITWISE = (
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"
)  # fmt: skip
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_OVERLOADS = """
    Tensor Scalar default Tensor_mode Scalar_mode Tensor_Scalar Scalar_Other Scalar_Self
"""
OPS = frozenset(
    f"aten.{name}{place}.{overload}"
    for name in (*_ARITHMETIC, *_BITWISE, *_COMPARING)
    for place in ("", "_")
    for overload in _OVERLOADS.split()
) | {"aten.pow.Scalar"}  # a power by a number has a kernel of its own
"""Ops of two operands, either of which may be a number."""
_FOREACH = frozenset(f"aten._foreach_{name}{place}.Scalar" for name in _ARITHMETIC for place in ("", "_"))
"""Foreach ops with a scalar, which run tensor by tensor."""

_WRAPPED = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_COMMON: dict[Any, torch.dtype] = {}
_FRACTIONS = ("aten.div.Tensor", "aten.div.Scalar", "aten.div_.Tensor", "aten.div_.Scalar")


def transient_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of the wrapped numbers among an op's first two operands; 0 for ops that wrap none."""
    if name in _FOREACH:
        tensors, number = args[:2]
        return max((_wrapped_bytes(name, tensor, number) for tensor in tensors), default=0)
    return _wrapped_bytes(name, *args[:2]) if name in OPS and len(args) > 1 else 0


def _wrapped_bytes(name: str, left: Any, right: Any) -> int:
    """Return the bytes of the number among the two operands of op ``name``, wrapped and cast; 0 if both or none are
    tensors."""
    if isinstance(left, torch.Tensor) == isinstance(right, torch.Tensor):
        return 0
    number = right if isinstance(left, torch.Tensor) else left
    common = common_dtype(left, right)
    if name in _FRACTIONS and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype()
    return of_number(number, common)


def common_dtype(left: Any, right: Any) -> torch.dtype:
    """Return `torch.result_type` of two operands, cached by their types: it is slow on fake tensors."""
    left_key, right_key = _type_key(left), _type_key(right)
    if left_key is None or right_key is None:
        return torch.result_type(left, right)
    key = (left_key, right_key, torch.get_default_dtype())
    if key not in _COMMON:
        _COMMON[key] = torch.result_type(left, right)
    return _COMMON[key]


def _type_key(operand: Any) -> Any:
    """Return the properties of an operand on which `torch.result_type` depends, as a key.

    None for a 0-dim tensor that may be a wrapped number, which counts less than a tensor: only torch can tell them
    apart.
    """
    if not isinstance(operand, torch.Tensor):
        return type(operand)
    if operand.dim():
        return operand.dtype
    return None if operand.dtype in _WRAPPED.values() else (operand.dtype,)


def of_number(number: complex, common: torch.dtype) -> int:
    """Return the bytes of a number as operand of a kernel that computes in dtype ``common``: wrapped, and its cast."""
    dtype = wrapped(number)
    return dtype.itemsize + (0 if dtype is common else common.itemsize)


def wrapped(number: complex) -> torch.dtype:
    """Return the dtype of the tensor that torch wraps a number in."""
    return next((dtype for kind, dtype in _WRAPPED.items() if isinstance(number, kind)), torch.float64)


def averaged(numel: int, dtype: torch.dtype, results: int = 1) -> int:
    """Return the temporary bytes of a mean of ``numel`` elements: its sums are divided in place by a wrapped number.

    Reduced precision is summed in float32, cast as a whole (ReduceOps.cpp, mean_kernel_impl and mean_out).
    ``results``: the number of means.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return 4 * results + max(4 * numel, of_number(1, torch.float32))
    return of_number(1, dtype)
