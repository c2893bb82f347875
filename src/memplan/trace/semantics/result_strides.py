"""Ops whose results have other strides than fake tensors have, on every device.

Where no dimension has size 1 and all operands have the same layout, fake tensors are right. Each entry was compared
with the kernels of torch 2.13 on the CPU; those of CUDA take their layouts from the same source files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import suggests_channels_last
from memplan.trace.semantics.tensor_iterator import (
    Strides,
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    preserved_strides,
)

Correction = Callable[[Arguments, Keywords, Any], Any]


def with_strides(result: torch.Tensor, strides: Strides) -> torch.Tensor:
    """Return the result itself if it has these strides, else a new tensor like it with them."""
    return result if result.stride() == strides else result.new_empty_strided(result.shape, strides)


def in_sequence(*corrections: Correction) -> Correction:
    """Return a correction that applies these corrections of a result in sequence."""

    def corrected(args: Arguments, kwargs: Keywords, result: Any) -> Any:
        for correction in corrections:
            result = correction(args, kwargs, result)
        return result

    return corrected


def elementwise(*positions: int) -> Correction:
    """Return the correction of the result's strides for a TensorIterator kernel.

    ``positions``: of the kernel's operands among the arguments, in the kernel's order; none: all arguments.
    """

    def corrected(args: Arguments, kwargs: Keywords, result: Any) -> Any:
        candidates = [args[position] for position in positions] if positions else args
        operands = [operand for operand in candidates if isinstance(operand, torch.Tensor)]
        if not _are_strided(result, *operands):
            return result
        return with_strides(result, elementwise_strides(operands, result.shape))

    return corrected


def _arithmetic(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Correct the strides of the result of a binary op, whose operands are two tensors, or a tensor and a number.

    torch wraps the number in a 0-dim tensor (ScalarOps.h, `wrapped_scalar_tensor`).
    """
    operands = [operand for operand in args[:2] if isinstance(operand, torch.Tensor)]
    if not _are_strided(result, *operands):
        return result
    return with_strides(result, elementwise_strides(operands, result.shape, with_scalar=len(operands) < 2))


def empty_like(position: int, index: int = 0) -> Correction:
    """Return the correction for a result that the kernel allocates by ``at::empty_like`` of the argument at
    ``position``. ``index``: of the result, if the op has several."""

    def corrected(args: Arguments, kwargs: Keywords, result: Any) -> Any:
        preserves_format = kwargs.get("memory_format") in (None, torch.preserve_format)
        strided = kwargs.get("layout") in (None, torch.strided) and _are_strided(args[position])
        if not preserves_format or not strided:
            return result
        return _with_strides_of(result, index, lambda output: preserved_strides(args[position]))

    return corrected


def contiguous(index: int = 0) -> Correction:
    """Return the correction for a result that is always contiguous. ``index``: of the result, if the op has several."""
    return lambda args, kwargs, result: _with_strides_of(result, index, lambda output: contiguous_strides(output.shape))


def suggested_format(position: int) -> Correction:
    """Return the correction for a result, or the first of several, in the memory format that the argument at
    ``position`` suggests (``suggest_memory_format()``)."""

    def corrected(args: Arguments, kwargs: Keywords, result: Any) -> Any:
        strides_in_format = channels_last_strides if suggests_channels_last(args[position]) else contiguous_strides
        return _with_strides_of(result, 0, lambda output: strides_in_format(output.shape))

    return corrected


def _with_strides_of(result: Any, index: int, strides_of: Callable[[torch.Tensor], Strides]) -> Any:
    """Give a result the strides ``strides_of(result)``: a single result, or number ``index`` of several results."""
    if isinstance(result, torch.Tensor):
        return with_strides(result, strides_of(result)) if _are_strided(result) else result
    results = list(result)
    if results[index] is not None and _are_strided(results[index]):
        results[index] = with_strides(results[index], strides_of(results[index]))
    return tuple(results)


def _are_strided(*values: Any) -> bool:
    """Return whether all values are tensors in the strided layout, with sizes for which strides can be computed."""
    return all(isinstance(t, torch.Tensor) and t.layout is torch.strided and has_usable_sizes(t) for t in values)


def has_usable_sizes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's strides can be corrected: all sizes are integers, or any size is 1.

    Comparing other symbolic sizes would add guards that specialize the graph, so torch's own strides stay.
    """
    integers = [size for size in tensor.shape if type(size) is int]
    return len(integers) == tensor.dim() or 1 in integers


def _view(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Correct the strides of a view's dimensions of size 1 (TensorUtils.cpp, `computeStride`)."""
    if 1 not in result.shape:
        return result
    strides = _torch.view_strides(args[0], result.shape)
    return result if strides == result.stride() else result.as_strided(result.shape, strides)


_UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu clamp cos cosh digamma elu erf erfc erfinv
exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish isnan leaky_relu lgamma log log10 log1p log2 logical_not
logit mish neg reciprocal relu round rsqrt selu sgn sigmoid sign sin sinc sinh softplus softshrink sqrt square tan tanh
threshold trunc"""
_MULTI_INPUT = """addcdiv addcmul atan2 elu_backward fmax fmin gelu_backward hardsigmoid_backward hardswish_backward
hardtanh_backward hypot logaddexp logaddexp2 logical_and logical_or logical_xor logit_backward maximum minimum
mish_backward sigmoid_backward silu_backward softplus_backward tanh_backward"""
_ARITHMETIC = "add sub mul div eq ne ge gt le lt remainder fmod bitwise_and bitwise_or bitwise_xor"
_LIKE = "clone empty_like zeros_like ones_like full_like rand_like randn_like flip hardtanh relu6"
_CONTIGUOUS = """tril triu _log_softmax _log_softmax_backward_data _softmax_backward_data linalg_vector_norm
mse_loss_backward smooth_l1_loss_backward huber_loss_backward native_layer_norm native_layer_norm_backward"""
_UPSAMPLING = "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_nearest3d upsample_trilinear3d"

STRIDES: Mapping[str, Correction] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    # TensorIterator.cpp, with the operands of each kernel: BinaryOps.cpp, UnaryOps.cpp, Activation.cpp
    **{f"aten.{name}.default": elementwise() for name in f"{_UNARY} {_MULTI_INPUT}".split()},
    **{f"aten.{name}.{kind}": _arithmetic for name in _ARITHMETIC.split() for kind in ("Tensor", "Scalar")},
    "aten.rsub.Scalar": _arithmetic,
    **{f"aten.{name}": elementwise() for name in ("clamp.Tensor", "lerp.Tensor", "lerp.Scalar", "where.self")},
    **{f"aten.pow.Tensor_{kind}": elementwise() for kind in ("Tensor", "Scalar")},
    "aten.clamp_min.default": elementwise(),
    "aten.clamp_max.default": elementwise(),
    "aten.threshold_backward.default": elementwise(1, 0),
    "aten.leaky_relu_backward.default": elementwise(1, 0),
    # TensorFactories.cpp, TensorTransformations.cpp, Activation.cpp, Sorting.cpp
    **{f"aten.{name}.default": empty_like(0) for name in _LIKE.split()},
    "aten._prelu_kernel.default": empty_like(0),
    "aten.sort.default": in_sequence(empty_like(0), empty_like(0, index=1)),
    # SoftMax.cpp, TriangularOps.cpp, LinearAlgebra.cpp, Loss.cpp, layer_norm.cpp
    **{f"aten.{name}.default": contiguous() for name in _CONTIGUOUS.split()},
    "aten.masked_fill.Scalar": contiguous(),
    # UpSample.cpp
    **{f"aten.{name}.default": suggested_format(0) for name in _UPSAMPLING.split()},
}
"""Overload name -> (args, kwargs, result) -> the result with the strides of the kernel's output."""
