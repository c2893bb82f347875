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
from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import bytes_of, copied, copied_to, suggests_channels_last

_REDUCED = (torch.bfloat16, torch.float16)


def copies_of(*positions: int) -> Formula:
    """Return the formula of a kernel that calls ``contiguous()`` on these operands."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        return sum(copied(args[i]) for i in positions)

    return formula


def copies_by_format(*positions: int) -> Formula:
    """Return the formula of a kernel that copies these operands to the memory format suggested by the first."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        last = suggests_channels_last(args[positions[0]])
        return sum(copied_to(args[i], last) for i in positions)

    return formula


def _in_channels_last(x: torch.Tensor) -> bool:
    return x.dim() in (4, 5) and copied_to(x, True) == 0


def _uses_channels_last_norm(x: torch.Tensor) -> bool:
    """batch_norm_kernel.cpp, batch_norm_use_channels_last_kernel: also for a single position per channel."""
    return _in_channels_last(x) or (x.is_contiguous() and x.stride(1) == 1)


def batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Normalization.cpp, batch_norm_cpu): scale and shift of each channel; before that mean and
    variance and, in channels last, their sums."""
    x, training = args[0], args[5]
    of_channels = x.shape[1] * _accumulated(x)  # bytes of a number for each channel
    if not training:
        return 2 * of_channels
    statistics = 2 * bytes_of(result[1])
    return max(2 * of_channels, statistics + (of_channels if _uses_channels_last_norm(x) else 0))


def batch_norm_with_update(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Normalization.cpp, _batch_norm_with_update_cpu): as `batch_norm` in training."""
    return batch_norm((*args[:5], True), kwargs, result)


def batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Normalization.cpp, batch_norm_backward_cpu): the input's gradient is allocated twice;
    batch_norm_kernel.cpp, batch_norm_cpu_backward_channels_last_impl: sums per thread.

    If the memory formats differ, a strided kernel runs instead, after the gradient was summed.
    """
    gradient, x, mean, training, mask = args[0], args[1], args[5], args[7], args[9]
    channels = x.shape[1] * _accumulated(x)
    dense = all(t.is_contiguous() or _in_channels_last(t) for t in (gradient, x))
    if dense and suggests_channels_last(gradient) == suggests_channels_last(x):
        sums = 0
        if _uses_channels_last_norm(x):
            shared = 3 if x.dtype in _REDUCED else (not training) + (not mask[1])
            sums = (2 * torch.get_num_threads() + shared) * channels
        return max(bytes_of(x) if mask[0] else 0, sums)
    statistics = x.shape[1] * (mean.element_size() if training else x.element_size())
    return statistics + _summed_in_float32(gradient, [dim for dim in range(gradient.dim()) if dim != 1])


def group_norm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (group_norm_kernel.cpp, GroupNormKernelImplChannelsLastInternal): sums per sample and
    channel in channels last."""
    last = args[0].dim() > 3 and not args[0].is_contiguous()
    return _sums_by_channel(args[0]) if last else 0


def group_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (group_norm_kernel.cpp, GroupNormBackwardKernelImplInternal): sums of the gradient and of
    its product with the input, per sample and channel.

    From torch 2.14 on, group_norm.cpp makes the copies that the derivative formula made before.
    """
    last = suggests_channels_last(args[1])
    copies = copied_to(args[0], last) + copied_to(args[1], last) if _torch.torch_version() >= (2, 14) else 0
    return copies + _sums_by_channel(args[1])


def _sums_by_channel(x: torch.Tensor) -> int:
    """Return the bytes of two sums per sample and channel."""
    return 2 * x.shape[0] * x.shape[1] * _accumulated(x)


def _accumulated(x: torch.Tensor) -> int:
    """Return the bytes of an accumulator for sums of a tensor's elements."""
    return max(x.element_size(), 4)


def layer_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (layer_norm.cpp): contiguous copies; layer_norm_kernel.cpp: two rows of sums per thread."""
    gradient, x, shape, mask = args[0], args[1], args[2], args[7]
    rows = 0
    if mask[1] or mask[2]:
        rows = 2 * torch.get_num_threads() * x.element_size()
        for n in shape:
            rows *= n
    return copied(gradient) + copied(x) + rows


def angle_conversion(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (UnaryOps.cpp, deg2rad and rad2deg): the factor, which torch wraps in a tensor."""
    return of_number(math.pi, result.dtype)


def dropout_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Dropout.cpp, native_dropout_backward): the masked gradient, and the scale."""
    return bytes_of(args[0]) + of_number(args[2], result.dtype)


def safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (transformers/attention.cpp, _safe_softmax): the mask of entries, and of rows that are
    masked completely."""
    x, dim = args[0], args[1]
    return x.numel() + x.numel() // max(1, x.shape[dim])


def pool_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (DilatedMaxPool2d.cpp and similar): indices and result in the memory format of the output's
    gradient."""
    last = suggests_channels_last(args[0])
    indices = [a for a in args[2:] if isinstance(a, torch.Tensor) and a.dtype is torch.int64]
    return sum(copied_to(t, last) for t in [args[0], result, *indices])


def embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Embedding.cpp): contiguous copies of both operands."""
    return copied(args[0]) + copied(args[1])


def common_dtype_casts(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorIterator.cpp, cast_common_dtype_to_outputs): whole casts of the operands of a binary
    op that do not have the common dtype."""
    a, b = args[0], args[1]
    common = common_dtype(a, b)  # either can be a number
    if common is not torch.bool and result.is_floating_point() and not common.is_floating_point:
        common = result.dtype
    return sum(_cast_bytes(x, common) for x in (a, b) if isinstance(x, torch.Tensor))


def common_dtype_casts_in_place(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries as of `common_dtype_casts`, for an in-place op: its first operand is cast twice, as input
    and as output."""
    a, b = args[0], args[1]
    if not isinstance(b, torch.Tensor) or a.dtype is b.dtype:
        return 0
    common = common_dtype(a, b)
    return 2 * _cast_bytes(a, common) + _cast_bytes(b, common)


def _cast_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor's copy in this dtype; 0 if the tensor has the dtype already."""
    return 0 if tensor.dtype is dtype else tensor.numel() * dtype.itemsize


def where(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorCompare.cpp, where_self_out): casts of both values to the result's dtype."""
    return _cast_bytes(args[1], result.dtype) + _cast_bytes(args[2], result.dtype)


def operand_cast(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp): a whole cast of an operand that does not have the result's dtype."""
    return _cast_bytes(args[0], result.dtype)


def _summed_in_float32(x: torch.Tensor, dims: Sequence[int]) -> int:
    """ReduceOps.cpp, should_use_acc_buffer: bytes of the float32 copies of a bfloat16 or float16 operand and its sum,
    which are made if the reduced dimensions do not merge into one in memory."""
    if x.dtype not in _REDUCED:
        return 0
    result_numel = math.prod(size for dim, size in enumerate(x.shape) if dim not in dims)
    reduced = sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] != 1)
    gaps = sum(after[0] != before[0] * before[1] for before, after in itertools.pairwise(reduced))
    return 4 * (x.numel() + result_numel) if gaps else 0


def sum_of_dims(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, sum_out): a whole cast of an operand of another dtype; else see
    `_summed_in_float32`."""
    x, dims = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if x.dtype is not result.dtype:
        return operand_cast(args, kwargs, result)
    if dims is None or dims == [] or not x.dim():
        return _summed_in_float32(x, range(x.dim()))
    return _summed_in_float32(x, [dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)])


def mean(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, mean_out): a cast of the operand, or what the division of the sum takes (see
    `averaged`)."""
    x = args[0]
    cast = 0 if result.dtype in _REDUCED else _cast_bytes(x, result.dtype)
    return max(cast, averaged(x.numel(), result.dtype, result.numel()))


def isinf(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorCompare.cpp, isinf): the absolute values, and the infinity that they are compared
    with as a tensor."""
    return bytes_of(args[0]) + of_number(math.inf, args[0].dtype) if args[0].is_floating_point() else 0


def complex_abs(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (UnaryOps.cpp, unary_op_impl_with_complex_to_float_out): for complex operands, abs is
    computed as complex first."""
    return bytes_of(args[0]) if args[0].is_complex() else 0


def any_or_all(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, any and all): the operand cast to bool."""
    return 0 if args[0].dtype is torch.bool else args[0].numel()


def integer_operand_cast(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries of a unary op with a floating-point result (sqrt, exp): the cast of an integer operand."""
    return _cast_bytes(args[0], result.dtype)


def flat_argmax(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, argmax without a dimension): the flattened operand."""
    return 0 if args[1:] or result.dim() else copied(args[0])


def working_copy(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """One temporary of the operand's size: the scaled mask of native_dropout, the working copy of median."""
    return bytes_of(args[0])


def ctc_loss_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (LossCTC.cpp, ctc_loss_backward_cpu_template): log betas, as large as the saved log
    alphas."""
    return bytes_of(args[6])


def im2col(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Im2Col.cpp and Col2Im.cpp): a contiguous copy of the operand, and the output as first
    allocated, in the operand's size, if it is resized to be larger."""
    return copied(args[0]) + (bytes_of(args[0]) if result.numel() > args[0].numel() else 0)


def sort(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Sorting.cpp, sort_stable_kernel): the positions along the sorted dimension."""
    x, numbers = args[0], [arg for arg in args[1:] if type(arg) is int]
    return 8 * x.shape[kwargs.get("dim", numbers[0] if numbers else -1)] if x.dim() else 0


def median_of_rows(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Sorting.cpp, median_with_indices_impl): a copy of the rows unless they are contiguous."""
    x = args[0]
    return bytes_of(x) if x.dim() and x.stride(args[1]) != 1 else 0


def kthvalue(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Sorting.cpp, kthvalue_out_impl_cpu): a working copy of the values, and their int64
    indices."""
    return bytes_of(args[0]) + 8 * args[0].numel()


def logsumexp(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ReduceOps.cpp, logsumexp_out_impl): the exponentials, the maximum of each row, and the
    temporaries of the sum."""
    return bytes_of(args[0]) + bytes_of(result) + sum_of_dims(args[:2], {}, result)


def gelu_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Activation.cpp): oneDNN, which has only the exact form and no float64, needs a contiguous
    gradient."""
    gradient, form = args[0], args[2] if len(args) > 2 else kwargs.get("approximate", "none")
    return copied(gradient) if form == "none" and gradient.dtype is not torch.float64 else 0


def rms_norm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (layer_norm.cpp, rms_norm_composite): the squares, then the product; reduced precision in
    float32."""
    x = args[0]
    if x.dtype in _REDUCED:
        return 2 * 4 * x.numel() + 4 * x.numel() - bytes_of(x)
    return bytes_of(x)


_WITH_IN_PLACE = (
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "fmod.Tensor",
    "remainder.Tensor",
    "copysign.Tensor",
    "atan2.default",
    "hypot.default",
    "floor_divide.default",
)
_WITHOUT_IN_PLACE = (
    *("maximum.default", "minimum.default", "fmax.default", "fmin.default", "pow.Tensor_Tensor", "div.Tensor_mode"),
)
_IN_PLACE = ("pow_.Tensor", "floor_divide_.Tensor")
_COMPARING = (
    "eq.Tensor",
    "ne.Tensor",
    "lt.Tensor",
    "le.Tensor",
    "gt.Tensor",
    "ge.Tensor",
    "logical_and.default",
    "logical_or.default",
    "logical_xor.default",
)
_WITH_SCALAR = (
    *(f"{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "rsub", "copysign")),
    *("xlogy.Scalar_Self", "xlogy.Scalar_Other", "pow.Scalar", "pow.Tensor_Scalar"),
)
_UNARY = ("sqrt", "rsqrt", "exp", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "reciprocal", "erf")
_BY_FORMAT = (
    "max_pool2d_with_indices",
    "avg_pool2d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "max_pool3d_with_indices",
    "reflection_pad3d",
    "replication_pad3d",
    "reflection_pad2d",
    "replication_pad2d",
    "pixel_shuffle",
    "channel_shuffle",
)
_POOL_BACKWARD = (
    "max_pool2d_with_indices_backward",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
    "upsample_bicubic2d_backward",
    "max_pool3d_with_indices_backward",
)

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


def padded_chunks(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorShape.cpp, _pad_chunk): gradients that FSDP2 reduces to shards, each padded to a
    multiple of the number of ranks. CUDA's kernel needs no padding."""
    tensors, dim, chunks = args[:3]
    padded = 0
    for tensor in tensors:
        size = tensor.shape[dim]
        if size % chunks:
            padded += bytes_of(tensor) // size * (-(-size // chunks) * chunks)
    return padded


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
        f"aten.{name}": common_dtype_casts for name in (*_WITH_IN_PLACE, *_WITHOUT_IN_PLACE, *_COMPARING, *_WITH_SCALAR)
    },
    **{
        f"aten.{name.replace('.', '_.')}": common_dtype_casts_in_place
        for name in _WITH_IN_PLACE
        if name != "floor_divide.default"
    },
    **{f"aten.{name}": common_dtype_casts_in_place for name in _IN_PLACE},
    **{f"aten.{name}.default": integer_operand_cast for name in _UNARY},
    **{f"aten.{name}.default": copies_by_format(0) for name in _BY_FORMAT},
    "aten.avg_pool3d.default": copies_of(0),
    **{f"aten.{name}.default": copies_of(0) for name in _COPYING_GRADIENTS},
    "aten.nll_loss2d_forward.default": copies_of(0),
    **{f"aten.{name}.default": pool_backward for name in _POOL_BACKWARD},
}
