"""Temporaries of comparing tensors on the CPU: TensorCompare.cpp."""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan.trace.semantics.cpu.scalar_operands import of_number
from memplan.trace.semantics.kinds import Formula


def all_close(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorCompare.cpp, isclose: the boolean result, and the larger of the allowed error, the actual error and the
    check of the latter's magnitude against infinity. Integers are cast as a whole, booleans on both sides."""
    x, other = args[:2]
    rtol, atol = (args[at] if len(args) > at else kwargs.get(name, default) for at, name, default in _TOLERANCES)
    n = math.prod(torch.broadcast_shapes(x.shape, other.shape))
    equal_nan = args[4] if len(args) > 4 else kwargs.get("equal_nan", False)
    inexact = x.is_floating_point() or x.is_complex()
    close = n * (3 if equal_nan and inexact else 1)
    if not rtol and not atol:
        return max(close, n + 1)
    dtype = x.dtype if inexact else torch.get_default_dtype()
    cast = 0 if inexact else dtype.itemsize * (other.numel() + (x.numel() if x.dtype is torch.bool else 0))
    error, magnitude = n * dtype.itemsize, n * dtype.to_real().itemsize
    complex_magnitude = error if dtype.is_complex else 0  # magnitudes of complex numbers are complex at first
    tolerance = other.numel() * dtype.to_real().itemsize
    relative = other.numel() * dtype.itemsize
    allowed = (
        relative + tolerance + max(relative if complex_magnitude else 0, tolerance + of_number(atol, dtype.to_real()))
    )
    actual = tolerance + error + magnitude + complex_magnitude
    finite = tolerance + 2 * magnitude + max(n + of_number(math.inf, dtype.to_real()), 3 * n)
    return max(close, n + cast + max(allowed, actual, finite))


_TOLERANCES = (2, "rtol", 1e-05), (3, "atol", 1e-08)

FORMULAS: dict[str, Formula] = {"aten.allclose.default": all_close}
