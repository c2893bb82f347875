"""Facts about ops and tensors: overloads, argument names, element sizes, layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from memplan import _torch
from memplan.planning.graph.joint_graph import Value


def is_dense(value: Value) -> bool:
    """Return whether a tensor's elements fill a range of memory, in any order, without gaps and overlaps."""
    expected_stride = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride, value.shape, strict=True) if n != 1):
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True


def is_contiguous(value: Value) -> bool:
    """Return whether a tensor is contiguous, by its shape and strides."""
    expected_stride = 1
    for stride, size in zip(reversed(value.stride), reversed(value.shape), strict=True):
        if size != 1 and stride != expected_stride:
            return False
        expected_stride *= size
    return True


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype such as ``float32``."""
    return getattr(torch, dtype).itemsize


CROSS_ENTROPY = "memplan.cross_entropy_backward.default"
BATCH_NORM_AGAIN = "memplan.batch_norm_again.default"
CHUNKED = "memplan.convolution_chunks.default"
TOKEN_STATISTICS = "memplan.token_statistics.default"
TOKEN_STATISTICS_BACKWARD = "memplan.token_statistics_backward.default"
CHANNEL_NORM, CHANNEL_NORM_BACKWARD = "memplan.channel_norm.default", "memplan.channel_norm_backward.default"
DEPTHWISE, DEPTHWISE_BACKWARD = "memplan.depthwise.default", "memplan.depthwise_backward.default"
DROPOUT_MASK = "memplan.dropout_mask.default"
CLASS_SUMS, CLASS_SUMS_BACKWARD = "memplan.class_sums.default", "memplan.class_sums_backward.default"
MASKED_SOFTMAX_BACKWARD = "memplan.masked_softmax_backward.default"
ELEMENTWISE = frozenset(
    """
    abs.default acos.default acosh.default add.Scalar add.Tensor addcdiv.default addcmul.default asin.default
    asinh.default atan.default atan2.default atanh.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_xor.Tensor ceil.default clamp.Tensor clamp.default clamp_max.Tensor clamp_max.default clamp_min.Tensor
    clamp_min.default copysign.Tensor cos.default cosh.default div.Scalar div.Tensor div.Tensor_mode elu.default
    elu_backward.default eq.Scalar eq.Tensor erf.default erfc.default exp.default exp2.default expm1.default
    floor.default fmax.default fmin.default fmod.Scalar fmod.Tensor frac.default ge.Scalar ge.Tensor gelu.default
    gelu_backward.default gt.Scalar gt.Tensor hardshrink.default hardshrink_backward.default hardsigmoid.default
    hardsigmoid_backward.default hardswish.default hardtanh.default hardtanh_backward.default
    huber_loss_backward.default le.Scalar le.Tensor leaky_relu.default leaky_relu_backward.default lerp.Scalar
    lerp.Tensor log.default log10.default log1p.default log2.default log_sigmoid_backward.default logaddexp.default
    logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor
    masked_fill.Scalar masked_fill.Tensor maximum.default minimum.default mish.default mse_loss_backward.default
    mul.Scalar mul.Tensor nan_to_num.default ne.Scalar ne.Tensor neg.default pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal.default relu.default remainder.Scalar remainder.Tensor round.default rsqrt.default sgn.default
    sigmoid.default sigmoid_backward.default sign.default silu.default silu_backward.default sin.default sinh.default
    smooth_l1_loss_backward.default softplus.default softplus_backward.default softshrink.default
    softshrink_backward.default sqrt.default square.default sub.Scalar sub.Tensor tan.default tanh.default
    tanh_backward.default threshold.default threshold_backward.default trunc.default where.self xlogy.Tensor
    """.split()  # noqa: SIM905  # a hundred quoted names are harder to read
)
"""Elementwise ops, by their names under ``aten``."""


KERNELS: Mapping[str, tuple[str, ...]] = {
    TOKEN_STATISTICS: ("hidden", "weight", "bias", "ids", "softcap", "scale", "summed"),
    TOKEN_STATISTICS_BACKWARD: (
        "d_lse", "d_picked", "d_total", "hidden", "weight", "bias", "ids", "lse", "softcap", "scale", "wanted",
    ),
    "memplan.norm.default": ("x", "residual", "weight", "bias", "eps", "centred"),
    "memplan.norm_backward.default": ("d_y", "d_h", "h", "weight", "bias", "mean", "rstd", "wanted"),
    CHANNEL_NORM: ("x", "residual", "weight", "bias", "groups", "activation", "slope", "eps"),
    CHANNEL_NORM_BACKWARD: (
        "d_y", "x", "y", "weight", "bias", "mean", "variance", "groups", "activation", "slope", "eps", "added",
    ),
    "memplan.gated.default": ("gate", "up", "activation"),
    "memplan.gated_backward.default": ("d_y", "gate", "up", "activation"),
    DEPTHWISE: ("x", "weight", "bias", "stride", "padding", "dilation"),
    DEPTHWISE_BACKWARD: ("d_y", "x", "weight", "stride", "padding", "dilation", "wanted"),
    "memplan.pack_flags.default": ("flags",),
    "memplan.masked_softmax.default": ("x", "mask", "bits", "fill", "scale", "p", "dtype"),
    MASKED_SOFTMAX_BACKWARD: ("d_y", "x", "y", "mask", "bits", "statistics", "fill", "scale", "p"),
    CLASS_SUMS: ("logits", "targets", "ignore_index", "squared"),
    CLASS_SUMS_BACKWARD: ("d_sums", "logits", "targets", "ignore_index", "squared"),
}  # fmt: skip
"""Ops of `memplan.kernels`, and their argument names."""


OWN: Mapping[str, tuple[str, ...]] = {
    **KERNELS,
    BATCH_NORM_AGAIN: ("self", "weight", "bias", "mean", "invstd"),
    CROSS_ENTROPY: ("grad_output", "log_probs", "target", "weight", "reduction", "ignore_index", "total_weight"),
    CHUNKED: (
        "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups", "pieces",
    ),
    "memplan.tile_statistics.default": ("inputs", "key"),
    "memplan.tile.default": ("inputs", "statistics", "key"),
    "memplan.tile_with_gradients.default": ("inputs", "statistics", "needed", "key"),
    "memplan.tile_backward.default": ("inputs", "statistics", "gradients", "needed", "key"),
    DROPOUT_MASK: ("self", "p", "generator"),
    "memplan.is_not_zero.default": ("self",),
    "memplan.dropout.default": ("self", "mask", "scale"),
}  # fmt: skip
"""The engine's own ops that a graph can contain (see `memplan.planning.passes`), and their argument names. They are
listed here because planning does not import the modules that register them."""


def overload(target: str) -> Any:
    """Return the op of a target such as ``aten.relu.default``."""
    namespace, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)


@cache
def _argument_names(target: str) -> tuple[str, ...]:
    """Return the names of an op's arguments, in the order of its schema."""
    return OWN.get(target) or tuple(argument.name for argument in _torch.arguments(overload(target)))


def arguments_of(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the op's schema. Omitted arguments are missing."""
    by_name = {**dict(zip(_argument_names(target), args, strict=False)), **kwargs}
    return {name: by_name[name] for name in _argument_names(target) if name in by_name}


NUMBER_TENSOR_BYTES = 128
"""Most bytes of the 0-d tensors in which torch wraps the numbers that kernels are called with."""


def short(target: str) -> str:
    """Return the bare name of an op: ``relu`` of ``aten.relu.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target
