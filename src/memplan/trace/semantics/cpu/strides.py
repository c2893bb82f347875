"""Ops whose results have other strides on the CPU than fake tensors say, beside those of every device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memplan._torch import torch_version
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import copied_to, suggests_channels_last
from memplan.trace.semantics.result_strides import STRIDES as EVERYWHERE
from memplan.trace.semantics.result_strides import (
    Correction,
    as_suggested,
    elementwise,
    in_order,
    is_told,
    laid_out,
    like,
    then,
)
from memplan.trace.semantics.tensor_iterator import (
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    preserved_strides,
)

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_in_last(x: torch.Tensor) -> bool:
    return x.dim() in _FORMATS and x.is_contiguous(memory_format=_FORMATS[x.dim()])


def _norm(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Normalization.cpp, `suggest_memory_format_contig`: contiguous first, unless channels last alone describes it."""
    x, (output, *statistics) = args[0], results
    last = not x.is_contiguous() and _is_in_last(x)
    return _formatted(output, last=last), *statistics


def _norm_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Normalization.cpp, `batch_norm_backward_cpu_template`: the same where gradient and input are of one format."""
    (gradient, x), (of_input, *others) = args[:2], results
    last = suggests_channels_last(x)
    dense = all(one.is_contiguous() or _is_in_last(one) for one in (gradient, x))
    if dense and suggests_channels_last(gradient) == last:
        last = not x.is_contiguous()
    return None if of_input is None else _formatted(of_input, last=last), *others


def _formatted(tensor: torch.Tensor, *, last: bool) -> torch.Tensor:
    return laid_out(tensor, (channels_last_strides if last else contiguous_strides)(tensor.shape))


def _convolution_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Convolution.cpp: a weight's gradient that more than one format describes is contiguous, unless the weight is in
    channels last or in groups."""
    of_input, of_weight, of_bias = results
    plain = args[9] == 1 and not suggests_channels_last(args[2])
    if plain and of_weight is not None and of_weight.is_contiguous():
        of_weight = laid_out(of_weight, contiguous_strides(of_weight.shape))
    return of_input, of_weight, of_bias


def _rectified_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """Activation.cpp, `_prelu_kernel_backward`: of input, weight and gradient, in this order."""
    gradient, x, weight = args[:3]
    return tuple(laid_out(made, elementwise_strides([x, weight, gradient], made.shape)) for made in results)


def _group_norm_backward(args: Arguments, kwargs: Keywords, results: Any) -> Any:
    """group_norm.cpp: in the input's memory format; from torch 2.14 on, by ``empty_like`` of the input in it."""
    x = args[1]
    if torch_version() < (2, 14) or copied_to(x, suggests_channels_last(x)):
        return as_suggested(1)(args, kwargs, results)
    of_input, *others = results
    return (None if of_input is None else laid_out(of_input, preserved_strides(x)), *others)


def _of_cpu(correction: Correction) -> Correction:
    """Return the correction for tensors in the host's memory: a graph that is traced for a card asks for it, too."""

    def corrected(args: Arguments, kwargs: Keywords, result: Any) -> Any:
        own = args[0].device.type in ("cpu", "meta") and is_told(args[0])
        return correction(args, kwargs, result) if own else result

    return corrected


_NORMS = (
    "native_batch_norm.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
)
_OWN: Mapping[str, Correction] = {
    **{f"aten.{name}": _norm for name in _NORMS},
    "aten.native_batch_norm_backward.default": _norm_backward,
    "aten.native_group_norm.default": as_suggested(0),  # group_norm.cpp
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._prelu_kernel_backward.default": _rectified_backward,
    # Dropout.cpp
    "aten.native_dropout.default": then(
        lambda args, kwargs, results: (elementwise(0)(args, kwargs, results[0]), results[1]), like(0, of=1)
    ),
    "aten.native_dropout_backward.default": elementwise(0, 1),
    # Activation.cpp, GatedLinearUnit.cpp, LossNLL2d.cpp, FlashAttentionKernel.cpp
    "aten.log_sigmoid_forward.default": then(in_order(), in_order(of=1)),
    "aten.log_sigmoid_backward.default": like(0),
    "aten.glu_backward.default": in_order(),
    "aten.nll_loss2d_backward.default": like(1),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": like(0),
    # ReplicationPadding.cpp, ChanelShuffle.cpp
    "aten.replication_pad2d_backward.default": as_suggested(1),
    "aten.replication_pad3d.default": as_suggested(0),
    "aten.replication_pad3d_backward.default": as_suggested(1),
    "aten.channel_shuffle.default": as_suggested(0),
}
STRIDES: Mapping[str, Correction] = {**EVERYWHERE, **{name: _of_cpu(entry) for name, entry in _OWN.items()}}
"""Overload name -> (args, kwargs, result) -> the result with the strides that the kernel gives it."""
