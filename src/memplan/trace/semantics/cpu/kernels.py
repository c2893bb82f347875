"""Temporaries of PyTorch's own CPU kernels: norms, softmax, pooling, reductions, casts.

Each formula names its file under ATen/native. ``result`` is the op's result, ``args`` its operands as dispatched.
Temporaries below 64 KiB or 2 % of the op's own tensors are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu.scalar_operands import averaged, common_dtype, of_number
from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes, padded, suggests_channels_last

_REDUCED = (torch.bfloat16, torch.float16)


def copies_of(*positions: int) -> Formula:
    """Return the formula of a kernel that calls ``contiguous()`` on these operands."""

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        return sum(copy_bytes(args[i]) for i in positions)

    return formula


def copy_in_own_format(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries: a copy of the operand, unless it is contiguous in the memory format that it suggests."""
    return copy_bytes(args[0], suggests_channels_last(args[0]))


def _in_channels_last(x: torch.Tensor) -> bool:
    return x.dim() in (4, 5) and copy_bytes(x, channels_last=True) == 0


def _uses_channels_last_norm(x: torch.Tensor) -> bool:
    """Return whether batch norm runs its kernel for channels last: also for a single position per channel.

    Source: batch_norm_kernel.cpp, batch_norm_use_channels_last_kernel.
    """
    return _in_channels_last(x) or (x.is_contiguous() and x.stride(1) == 1)


def batch_norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Normalization.cpp, batch_norm_cpu): scale and shift of each channel; before that mean and
    variance and, in channels last, their sums."""
    x, training = args[0], args[5]
    per_channel = x.shape[1] * _accumulated(x)  # bytes of a number for each channel
    if not training:
        return 2 * per_channel
    mean = result[1]
    return max(2 * per_channel, 2 * bytes_of(mean) + (per_channel if _uses_channels_last_norm(x) else 0))


def batch_norm_with_update(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Normalization.cpp, _batch_norm_with_update_cpu): as `batch_norm` in training."""
    return batch_norm((*args[:5], True), kwargs, result)


def batch_norm_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Normalization.cpp, batch_norm_backward_cpu): the input's gradient is allocated twice;
    batch_norm_kernel.cpp, batch_norm_cpu_backward_channels_last_impl: sums per thread.

    If the memory formats differ, a strided kernel runs instead, after the gradient was summed.
    """
    gradient, x, mean, training, (needs_input, needs_weight, _) = args[0], args[1], args[5], args[7], args[9]
    dense = all(t.is_contiguous() or _in_channels_last(t) for t in (gradient, x))
    if not dense or suggests_channels_last(gradient) != suggests_channels_last(x):
        statistics = x.shape[1] * (mean.element_size() if training else x.element_size())
        return statistics + _summed_in_float32(gradient, [dim for dim in range(gradient.dim()) if dim != 1])
    sums = 0
    if _uses_channels_last_norm(x):
        shared_sums = 3 if x.dtype in _REDUCED else (not training) + (not needs_weight)
        sums = (2 * torch.get_num_threads() + shared_sums) * x.shape[1] * _accumulated(x)
    return max(bytes_of(x) if needs_input else 0, sums)


def group_norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (group_norm_kernel.cpp, GroupNormKernelImplChannelsLastInternal): sums per sample and
    channel in channels last."""
    x = args[0]
    return _sums_by_channel(x) if x.dim() > 3 and not x.is_contiguous() else 0


def group_norm_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (group_norm_kernel.cpp, GroupNormBackwardKernelImplInternal): sums of the gradient and of
    its product with the input, per sample and channel.

    From torch 2.14 on, group_norm.cpp makes the copies that the derivative formula made before.
    """
    gradient, x = args[:2]
    if _torch.torch_version() < (2, 14):
        return _sums_by_channel(x)
    channels_last = suggests_channels_last(x)
    return copy_bytes(gradient, channels_last) + copy_bytes(x, channels_last) + _sums_by_channel(x)


def _sums_by_channel(x: torch.Tensor) -> int:
    return 2 * x.shape[0] * x.shape[1] * _accumulated(x)


def _accumulated(x: torch.Tensor) -> int:
    return max(x.element_size(), 4)


def layer_norm_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (layer_norm.cpp): contiguous copies; layer_norm_kernel.cpp: two rows of sums per thread."""
    gradient, x, shape, (_, needs_weight, needs_bias) = args[0], args[1], args[2], args[7]
    row_bytes = math.prod(shape) * x.element_size()
    sums = 2 * torch.get_num_threads() * row_bytes if needs_weight or needs_bias else 0
    return copy_bytes(gradient) + copy_bytes(x) + sums


def angle_conversion(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (UnaryOps.cpp, deg2rad and rad2deg): the factor, which torch wraps in a tensor."""
    return of_number(math.pi, result.dtype)


def dropout_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Dropout.cpp, native_dropout_backward): the masked gradient, and the scale."""
    gradient, _, scale = args
    return bytes_of(gradient) + of_number(scale, result.dtype)


def safe_softmax(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (transformers/attention.cpp, _safe_softmax): the mask of entries, and of rows that are
    masked completely."""
    x, dim = args[0], args[1]
    return x.numel() + x.numel() // max(1, x.shape[dim])


def pool_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (DilatedMaxPool2d.cpp and similar): indices and result in the memory format of the output's
    gradient."""
    gradient, _, *others = args
    indices = [other for other in others if isinstance(other, torch.Tensor) and other.dtype is torch.int64]
    return sum(copy_bytes(t, suggests_channels_last(gradient)) for t in (gradient, result, *indices))


def embedding_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Embedding.cpp): contiguous copies of both operands."""
    return copy_bytes(args[0]) + copy_bytes(args[1])


def common_dtype_casts(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorIterator.cpp, cast_common_dtype_to_outputs): whole casts of the operands of a binary
    op that do not have the common dtype."""
    left, right = args[:2]  # either can be a number
    common = common_dtype(left, right)
    if common is not torch.bool and result.is_floating_point() and not common.is_floating_point:
        common = result.dtype  # a division of integers
    return sum(_cast_bytes(x, common) for x in (left, right) if isinstance(x, torch.Tensor))


def common_dtype_casts_in_place(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries as of `common_dtype_casts`, for an in-place op: its first operand is cast twice, as input
    and as output."""
    left, right = args[:2]
    if not isinstance(right, torch.Tensor) or left.dtype is right.dtype:
        return 0
    common = common_dtype(left, right)
    return 2 * _cast_bytes(left, common) + _cast_bytes(right, common)


def _cast_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor's copy in this dtype; 0 if the tensor has the dtype already."""
    return 0 if tensor.dtype is dtype else tensor.numel() * dtype.itemsize


def where(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorCompare.cpp, where_self_out): casts of both values to the result's dtype."""
    return _cast_bytes(args[1], result.dtype) + _cast_bytes(args[2], result.dtype)


def operand_cast(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp): a whole cast of an operand that does not have the result's dtype."""
    return _cast_bytes(args[0], result.dtype)


def _summed_in_float32(x: torch.Tensor, dims: Sequence[int]) -> int:
    """Return the bytes of the float32 copies of a bfloat16 or float16 operand and its sum over ``dims``; 0 if the
    kernel sums the operand itself.

    The copies are made if the reduced dimensions do not merge into one in memory (ReduceOps.cpp,
    should_use_acc_buffer).
    """
    if x.dtype not in _REDUCED:
        return 0
    reduced = sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] != 1)
    if all(outer_stride == stride * size for (stride, size), (outer_stride, _) in itertools.pairwise(reduced)):
        return 0
    result_numel = math.prod(size for dim, size in enumerate(x.shape) if dim not in dims)
    return 4 * (x.numel() + result_numel)


def sum_of_dims(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, sum_out): a whole cast of an operand of another dtype; else float32 copies
    if its reduced dimensions do not merge (`_summed_in_float32`)."""
    x, dims = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if x.dtype is not result.dtype:
        return operand_cast(args, kwargs, result)
    if dims is None or dims == [] or not x.dim():
        return _summed_in_float32(x, range(x.dim()))
    dims = [dims] if isinstance(dims, int) else dims
    return _summed_in_float32(x, [dim % x.dim() for dim in dims])


def mean(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, mean_out): a cast of the operand, or the temporaries of dividing the sum
    (`averaged`)."""
    x = args[0]
    cast = 0 if result.dtype in _REDUCED else _cast_bytes(x, result.dtype)
    return max(cast, averaged(x.numel(), result.dtype, result.numel()))


def isinf(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorCompare.cpp, isinf): the absolute values, and the infinity that they are compared
    with as a tensor."""
    x = args[0]
    return bytes_of(x) + of_number(math.inf, x.dtype) if x.is_floating_point() else 0


def complex_abs(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (UnaryOps.cpp, unary_op_impl_with_complex_to_float_out): for complex operands, abs is
    computed as complex first."""
    return bytes_of(args[0]) if args[0].is_complex() else 0


def any_or_all(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, any and all): the operand cast to bool."""
    return 0 if args[0].dtype is torch.bool else args[0].numel()


def integer_operand_cast(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries of a unary op with a floating-point result (sqrt, exp): the cast of an integer operand."""
    return _cast_bytes(args[0], result.dtype)


def flat_argmax(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, argmax without a dimension): the flattened operand."""
    x, has_dim = args[0], len(args) > 1 or result.dim() > 0
    return 0 if has_dim else copy_bytes(x)


def working_copy(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of a temporary of the operand's size: the scaled mask of native_dropout, the working copy of median."""
    return bytes_of(args[0])


def ctc_loss_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (LossCTC.cpp, ctc_loss_backward_cpu_template): log betas, as large as the saved log
    alphas."""
    log_alpha = args[6]
    return bytes_of(log_alpha)


def im2col(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Im2Col.cpp and Col2Im.cpp): a contiguous copy of the operand, and the output as first
    allocated, in the operand's size, if it is resized to be larger."""
    x = args[0]
    return copy_bytes(x) + (bytes_of(x) if result.numel() > x.numel() else 0)


def sort(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Sorting.cpp, sort_stable_kernel): the int64 positions along the sorted dimension."""
    x = args[0]
    if not x.dim():
        return 0
    integers = [arg for arg in args[1:] if type(arg) is int]  # not the flag `stable`, which is first in an overload
    dim = kwargs.get("dim", integers[0] if integers else -1)
    return 8 * x.shape[dim]


def median_of_rows(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Sorting.cpp, median_with_indices_impl): a copy of the rows unless they are contiguous."""
    x, dim = args[:2]
    return bytes_of(x) if x.dim() and x.stride(dim) != 1 else 0


def kthvalue(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Sorting.cpp, kthvalue_out_impl_cpu): a working copy of the values, and their int64
    indices."""
    return bytes_of(args[0]) + 8 * args[0].numel()


def logsumexp(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, logsumexp_out_impl): the exponentials, the maximum of each row, and the
    temporaries of the sum."""
    return bytes_of(args[0]) + bytes_of(result) + sum_of_dims(args[:2], {}, result)


def gelu_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Activation.cpp): oneDNN, which has only the exact form and no float64, needs a contiguous
    gradient."""
    gradient, approximate = args[0], args[2] if len(args) > 2 else kwargs.get("approximate", "none")
    return copy_bytes(gradient) if approximate == "none" and gradient.dtype is not torch.float64 else 0


def rms_norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (layer_norm.cpp, rms_norm_composite): the squares, then the product; in reduced precision
    three float32 tensors, of which the result is a part."""
    x = args[0]
    return 3 * 4 * x.numel() - bytes_of(x) if x.dtype in _REDUCED else bytes_of(x)


_WITH_IN_PLACE = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor fmod.Tensor remainder.Tensor copysign.Tensor atan2.default hypot.default
    floor_divide.default
"""
_WITHOUT_IN_PLACE = (
    *("maximum.default", "minimum.default", "fmax.default", "fmin.default", "pow.Tensor_Tensor", "div.Tensor_mode"),
)
_IN_PLACE = ("pow_.Tensor", "floor_divide_.Tensor")
_COMPARING = """
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and.default logical_or.default
    logical_xor.default
"""
_WITH_SCALAR = (
    *(f"{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "rsub", "copysign")),
    *("xlogy.Scalar_Self", "xlogy.Scalar_Other", "pow.Scalar", "pow.Tensor_Scalar"),
)
_UNARY = ("sqrt", "rsqrt", "exp", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "reciprocal", "erf")
_BY_FORMAT = """
    max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool3d_with_indices reflection_pad3d
    replication_pad3d reflection_pad2d replication_pad2d pixel_shuffle channel_shuffle upsample_nearest2d_backward
    _upsample_nearest_exact2d_backward upsample_bilinear2d_backward _upsample_bilinear2d_aa_backward
    _upsample_bicubic2d_aa_backward
"""
_POOL_BACKWARD = """
    max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward
    upsample_bicubic2d_backward max_pool3d_with_indices_backward
"""

_COPYING_GRADIENTS = (
    *(f"{mode}_pad{dims}d_backward" for mode in ("reflection", "replication") for dims in (1, 2, 3)),
    *(f"upsample_{mode}_backward" for mode in ("nearest1d", "linear1d", "nearest3d", "trilinear3d")),
    *(f"_upsample_nearest_exact{dims}d_backward" for dims in (1, 3)),
    "avg_pool3d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool3d_backward",
    "grid_sampler_2d_backward",
    "pixel_unshuffle",
)


def padded_chunks(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorShape.cpp, _pad_chunk): gradients that FSDP2 reduces to shards, each padded to a
    multiple of the number of ranks. CUDA's kernel needs no padding."""
    tensors, dim, ranks = args[:3]
    uneven = [tensor for tensor in tensors if tensor.shape[dim] % ranks]
    return sum(bytes_of(tensor) // tensor.shape[dim] * padded(tensor.shape[dim], ranks) for tensor in uneven)


FORMULAS: dict[str, Formula] = {
    "fsdp.chunk_cat.default": padded_chunks,
    "aten.native_batch_norm.default": batch_norm,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
    "aten._batch_norm_with_update.default": batch_norm_with_update,
    "aten.batch_norm_backward.default": batch_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.abs.default": complex_abs,
    "aten.native_layer_norm.default": copies_of(0),
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten._softmax.default": copies_of(0),
    "aten._log_softmax.default": copies_of(0),
    "aten._softmax_backward_data.default": copies_of(0, 1),
    "aten._log_softmax_backward_data.default": copies_of(0, 1),
    "aten._safe_softmax.default": safe_softmax,
    "aten.log_sigmoid_forward.default": copies_of(0),
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten.where.self": where,
    "aten.mean.default": mean,
    "aten.mean.dim": mean,
    "aten.sum.default": sum_of_dims,
    "aten.sum.dim_IntList": sum_of_dims,
    "aten.cumsum.default": operand_cast,
    "aten.cumprod.default": operand_cast,
    "aten.linalg_vector_norm.default": operand_cast,
    "aten.isinf.default": isinf,
    "aten.any.default": any_or_all,
    "aten.any.dim": any_or_all,
    "aten.all.default": any_or_all,
    "aten.all.dim": any_or_all,
    "aten.max.default": copies_of(0),
    "aten.min.default": copies_of(0),
    "aten.argmax.default": flat_argmax,
    "aten.argmin.default": flat_argmax,
    "aten.logsumexp.default": logsumexp,
    "aten.native_dropout.default": working_copy,
    "aten.native_dropout_backward.default": dropout_backward,
    **{f"aten.{name}.default": angle_conversion for name in ("deg2rad", "rad2deg")},
    **{f"aten._ctc_loss_backward.{form}": ctc_loss_backward for form in ("default", "Tensor")},
    "aten.im2col.default": im2col,
    "aten.col2im.default": im2col,
    "aten.sort.default": sort,
    "aten.sort.stable": sort,
    **{f"aten.{name}.default": working_copy for name in ("median", "nanmedian")},
    **{f"aten.{name}.dim": median_of_rows for name in ("median", "nanmedian")},
    "aten.kthvalue.default": kthvalue,
    "aten.gelu_backward.default": gelu_backward,
    **{
        f"aten.{name}": common_dtype_casts
        for name in (*_WITH_IN_PLACE.split(), *_WITHOUT_IN_PLACE, *_COMPARING.split(), *_WITH_SCALAR)
    },
    **{
        f"aten.{name.replace('.', '_.')}": common_dtype_casts_in_place
        for name in _WITH_IN_PLACE.split()
        if name != "floor_divide.default"
    },
    **{f"aten.{name}": common_dtype_casts_in_place for name in _IN_PLACE},
    **{f"aten.{name}.default": integer_operand_cast for name in _UNARY},
    **{f"aten.{name}.default": copy_in_own_format for name in _BY_FORMAT.split()},
    "aten.avg_pool3d.default": copies_of(0),
    **{f"aten.{name}.default": copies_of(0) for name in _COPYING_GRADIENTS},
    "aten.nll_loss2d_forward.default": copies_of(0),
    **{f"aten.{name}.default": pool_backward for name in _POOL_BACKWARD.split()},
}
