"""Temporaries of Fourier transforms on the CPU, which MKL runs (mkl/SpectralOps.cpp), and of rolls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from memplan.trace.semantics.layout import bytes_of

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]


def _copied_for(x: torch.Tensor, dims: Sequence[int]) -> int:
    """_exec_fft: a copy where the other dimensions, by stride, are not one for MKL, or where elements are repeated."""
    transformed = {d % x.dim() for d in dims}
    others = [(x.stride(d), x.shape[d]) for d in range(x.dim()) if d not in transformed and x.shape[d] != 1]
    others.sort(key=lambda one: -one[0])
    merged = all(outer == inner * size for (outer, _), (inner, size) in pairwise(others))
    repeated = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    return 0 if merged and not repeated else bytes_of(x)


def transform(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """SpectralOps.cpp, _fft_r2c_mkl and _fft_c2c_mkl."""
    return _copied_for(args[0], args[1])


def to_real(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """SpectralOps.cpp, _fft_c2r_mkl: of several dimensions, all but the last go as complex numbers first."""
    x, dims = args[0], args[1]
    if len(dims) == 1:
        return _copied_for(x, dims)
    complex_ones = torch.fft.fftn(x, dim=tuple(dims[:-1]))
    before = _copied_for(x, dims[:-1]) - result.untyped_storage().nbytes()
    return bytes_of(x) + max(before, _copied_for(complex_ones, dims[-1:]))


def roll(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorTransformations.cpp and TensorTransformations.h, roll_common: one dimension after the other."""
    x, dims = args[0], args[2] if len(args) > 2 else kwargs.get("dims", ())
    return max(0, len(dims) - 1) * bytes_of(x)


FORMULAS: dict[str, Formula] = {
    "aten._fft_r2c.default": transform,
    "aten._fft_c2c.default": transform,
    "aten._fft_c2r.default": to_real,
    "aten.roll.default": roll,
}
