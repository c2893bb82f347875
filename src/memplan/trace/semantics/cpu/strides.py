"""Ops whose results have other strides on the CPU than fake tensors have, besides those of every device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memplan._torch import torch_version
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import copy_bytes, suggests_channels_last
from memplan.trace.semantics.result_strides import STRIDES as EVERYWHERE
from memplan.trace.semantics.result_strides import (
    Correction,
    contiguous,
    elementwise,
    empty_like,
    has_usable_sizes,
    in_sequence,
    suggested_format,
    with_strides,
)
from memplan.trace.semantics.tensor_iterator import (
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    preserved_strides,
)

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() in _FORMATS and x.is_contiguous(memory_format=_FORMATS[x.dim()])


def _norm(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Correct the strides of a batch norm's output (Normalization.cpp, `suggest_memory_format_contig`).

    The output is channels last if the input is channels last and not also contiguous (as with one channel).
    Otherwise it is contiguous.
    """
    x, (output, *statistics) = args[0], results
    return _formatted(output, not x.is_contiguous() and _is_channels_last(x)), *statistics


def _norm_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Correct the strides of a batch norm's input gradient (Normalization.cpp, `batch_norm_backward_cpu_template`).

    If the incoming gradient and the input are dense in the same memory format, the input's gradient has the format that
    `_norm` gives the output; else the format that the input suggests (``suggest_memory_format()``).
    """
    (gradient, x), (grad_input, *others) = args[:2], results
    channels_last = suggests_channels_last(x)
    dense = all(t.is_contiguous() or _is_channels_last(t) for t in (gradient, x))
    if dense and suggests_channels_last(gradient) == channels_last:
        channels_last = not x.is_contiguous()
    return None if grad_input is None else _formatted(grad_input, channels_last), *others


def _formatted(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return a tensor in channels last or contiguous: itself if it has these strides, else a new tensor like it."""
    strides = channels_last_strides(tensor.shape) if channels_last else contiguous_strides(tensor.shape)
    return with_strides(tensor, strides)


def _convolution_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Correct the strides of a convolution's weight gradient (Convolution.cpp): contiguous in more than one format, it
    gets contiguous strides, unless the weight is channels last or grouped."""
    weight, groups = args[2], args[9]
    grad_input, grad_weight, grad_bias = results
    is_plain = groups == 1 and not suggests_channels_last(weight)
    if is_plain and grad_weight is not None and grad_weight.is_contiguous():
        grad_weight = with_strides(grad_weight, contiguous_strides(grad_weight.shape))
    return grad_input, grad_weight, grad_bias


def _prelu_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Correct the strides of both gradients: those of an elementwise op over input, weight and gradient, in this order.

    Source: Activation.cpp, `_prelu_kernel_backward`.
    """
    gradient, x, weight = args[:3]
    return tuple(with_strides(grad, elementwise_strides([x, weight, gradient], grad.shape)) for grad in results)


def _group_norm_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Correct the strides of a group norm's input gradient (group_norm.cpp): it has the memory format that the input
    suggests.

    From torch 2.14 on, an input that has this format already passes its strides on (``empty_like``).
    """
    x = args[1]
    if torch_version() < (2, 14) or copy_bytes(x, suggests_channels_last(x)):
        return suggested_format(1)(args, kwargs, results)
    grad_input, *others = results
    return (None if grad_input is None else with_strides(grad_input, preserved_strides(x)), *others)


def _roll(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Correct the strides of a rolled tensor (TensorTransformations.cpp): in each dimension in turn its two parts are
    concatenated, to channels last where both suggest it. Without dimensions, all elements are rolled as one row."""
    x, shifts, dims = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dims", ())
    if 0 in x.shape:
        return result
    if not dims:
        return _formatted(result, channels_last=False)
    rolled = x
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        begin = -shift % size
        parts = rolled.narrow(dim, begin, size - begin), rolled.narrow(dim, 0, begin)
        rolled = _formatted(result, all(map(suggests_channels_last, parts)))
    return rolled


def _on_cpu(correction: Correction) -> Correction:
    """Return the correction restricted to CPU tensors: tracing for a GPU looks it up in the same table."""

    def corrected(args: Arguments, kwargs: Keywords, result: Any) -> Any:
        applies = args[0].device.type in ("cpu", "meta") and has_usable_sizes(args[0])
        return correction(args, kwargs, result) if applies else result

    return corrected


_NORMS = """
    native_batch_norm.default _native_batch_norm_legit.default _native_batch_norm_legit.no_stats
    _native_batch_norm_legit_functional.default
"""
_CPU_ONLY: Mapping[str, Correction] = {
    **{f"aten.{name}": _norm for name in _NORMS.split()},
    "aten.native_batch_norm_backward.default": _norm_backward,
    "aten.native_group_norm.default": suggested_format(0),  # group_norm.cpp
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._prelu_kernel_backward.default": _prelu_backward,
    # Dropout.cpp
    "aten.native_dropout.default": in_sequence(
        lambda args, kwargs, results: (elementwise(0)(args, kwargs, results[0]), results[1]), empty_like(0, index=1)
    ),
    "aten.native_dropout_backward.default": elementwise(0, 1),
    # Activation.cpp, GatedLinearUnit.cpp, LossNLL2d.cpp, FlashAttentionKernel.cpp
    "aten.log_sigmoid_forward.default": in_sequence(contiguous(), contiguous(index=1)),
    "aten.log_sigmoid_backward.default": empty_like(0),
    "aten.glu_backward.default": contiguous(),
    "aten.nll_loss2d_backward.default": empty_like(1),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": empty_like(0),
    # ReflectionPad.cpp, ReplicationPadding.cpp, ChanelShuffle.cpp
    "aten.reflection_pad3d.default": suggested_format(0),
    "aten.replication_pad2d_backward.default": suggested_format(1),
    "aten.replication_pad3d.default": suggested_format(0),
    "aten.replication_pad3d_backward.default": suggested_format(1),
    "aten.channel_shuffle.default": suggested_format(0),
    "aten.roll.default": _roll,
}
STRIDES: Mapping[str, Correction] = {**EVERYWHERE, **{name: _on_cpu(entry) for name, entry in _CPU_ONLY.items()}}
"""Overload name -> (args, kwargs, result) -> the result with the strides of the kernel's output."""
