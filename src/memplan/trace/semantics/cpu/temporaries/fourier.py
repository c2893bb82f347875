"""Temporaries of Fourier transforms on the CPU, which MKL runs (mkl/SpectralOps.cpp), and of roll."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import bytes_of


def _batched_copy(x: torch.Tensor, dims: Sequence[int]) -> int:
    """_exec_fft: a copy if the batch dimensions, sorted by stride, do not merge into one for MKL, or if the input is
    expanded."""
    transformed = {d % x.dim() for d in dims}
    others = [(x.stride(d), x.shape[d]) for d in range(x.dim()) if d not in transformed and x.shape[d] != 1]
    others.sort(key=lambda dim: -dim[0])
    merged = all(outer == inner * size for (outer, _), (inner, size) in pairwise(others))
    expanded = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    return 0 if merged and not expanded else bytes_of(x)


def transform(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """SpectralOps.cpp, _fft_r2c_mkl and _fft_c2c_mkl."""
    return _batched_copy(args[0], args[1])


def to_real(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """SpectralOps.cpp, _fft_c2r_mkl: all dimensions but the last are transformed to a complex temporary first."""
    x, dims = args[0], args[1]
    if len(dims) == 1:
        return _batched_copy(x, dims)
    partial = torch.fft.fftn(x, dim=tuple(dims[:-1]))
    first_pass = _batched_copy(x, dims[:-1]) - result.untyped_storage().nbytes()
    return bytes_of(x) + max(first_pass, _batched_copy(partial, dims[-1:]))


def roll(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorTransformations.cpp and TensorTransformations.h, roll_common: one dimension at a time, each into a new
    tensor."""
    x, dims = args[0], args[2] if len(args) > 2 else kwargs.get("dims", ())
    return max(0, len(dims) - 1) * bytes_of(x)


FORMULAS: dict[str, Formula] = {
    "aten._fft_r2c.default": transform,
    "aten._fft_c2c.default": transform,
    "aten._fft_c2r.default": to_real,
    "aten.roll.default": roll,
}
