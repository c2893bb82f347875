"""Results of CUDA ops that differ from those of fake CPU tensors, and of ops that fake CPU tensors do not support.

The same on both devices, though surprising: reduced losses in the storage of the unreduced loss (`cpu.results`).
Layers that call another op on CUDA (attention, dropout, batch norm) are in `composites`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan._torch import torch_version
from memplan.cudnn.recurrent import rnn_weight_bytes
from memplan.trace.semantics.cpu import results
from memplan.trace.semantics.cuda.cudnn import MODES
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.result_strides import STRIDES, in_sequence, suggested_format

Result = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]

_REDUCED = (torch.bfloat16, torch.float16)
_MAXIMUM = 2


def _accumulated(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of this shape in float32 if ``tensor`` is in half precision, else ``tensor`` itself."""
    return tensor.new_empty(tensor.shape, dtype=torch.float32) if tensor.dtype in _REDUCED else tensor


def wide_statistics(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Result (layer_norm_kernel.cu, Normalization.cu): mean and reciprocal deviation in the dtype that CUDA accumulates
    in."""
    output, *statistics = result
    return (output, *(_accumulated(s) for s in statistics))


def group_norm(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Result (group_norm.cpp): mean and reciprocal deviation are in float32 if the weight is. Up to 2.14 the output is
    contiguous, whatever the memory format of the input."""
    weight, (output, *statistics) = args[1], result
    if torch_version() < (2, 15) and not output.is_contiguous():
        output = output.new_empty(output.shape)
    if weight is not None and weight.dtype is torch.float32:
        statistics = [_accumulated(s) for s in statistics]
    return (output, *statistics)


def batch_norm_of_cudnn(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Result (cudnn/BatchNorm.cpp): statistics in the weight's dtype, empty without training.

    The reserve is left as it is: `semantics.cuda.table` counts its bytes.
    """
    weight, training, (output, mean, deviation, reserve) = args[1], args[5], result
    if not training:
        return output, mean.new_empty(0), deviation.new_empty(0), reserve
    return output, weight.new_empty(mean.shape), weight.new_empty(mean.shape), reserve


def log_sigmoid(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Result (Activation.cpp, log_sigmoid_forward): the buffer is empty on CUDA."""
    return result[0], result[1].new_empty(0)


def recurrent(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Results of ``_cudnn_rnn``: with the batch first, the output is a view of a time-first tensor (cudnn/RNN.cpp)."""
    output, batch_first, batch_sizes = result[0], args[10], args[14]
    if not batch_first or batch_sizes:
        return result
    return (output.new_empty(output.transpose(0, 1).shape).transpose(0, 1), *result[1:])


def embedding_bag(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Result (EmbeddingBag.cu, _embedding_bag_cuda): the second result is the bag of every index, in each mode (on the
    CPU in some only); the last, the positions of maxima, is empty unless the mode is max."""
    output, _, bag_sizes, max_positions = result
    indices, mode = args[1], args[4] if len(args) > 4 else kwargs.get("mode", 0)
    shape = output.shape if mode == _MAXIMUM else (0,)
    return output, indices.new_empty(indices.shape), bag_sizes, max_positions.new_empty(shape)


_AS_ON_THE_CPU = "mse_loss smooth_l1_loss soft_margin_loss binary_cross_entropy col2im im2col"
RESULTS: dict[str, Result] = {
    **STRIDES,
    **{f"aten.{name}.default": results.RESULTS[f"aten.{name}.default"] for name in _AS_ON_THE_CPU.split()},
    "aten.native_layer_norm.default": in_sequence(STRIDES["aten.native_layer_norm.default"], wide_statistics),
    "aten.native_batch_norm.default": wide_statistics,
    # the input's gradient is in the input's format: cuda/Normalization.cu, cudnn/BatchNorm.cpp
    "aten.native_batch_norm_backward.default": suggested_format(1),
    "aten._native_batch_norm_legit.default": wide_statistics,
    "aten._native_batch_norm_legit.no_stats": wide_statistics,
    "aten.native_group_norm.default": group_norm,
    "aten.cudnn_batch_norm.default": batch_norm_of_cudnn,
    "aten.log_sigmoid_forward.default": log_sigmoid,
    "aten._cudnn_rnn.default": recurrent,
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
}
"""Overload name -> (args, kwargs, result) -> the result as the CUDA kernel returns it."""


ORDER: dict[str, tuple[int, ...]] = {
    "aten.native_dropout.default": (1, 0),
    "aten._native_batch_norm_legit_functional.default": (3, 4, 0, 1, 2),
    "aten._embedding_bag.default": (2, 1, 0, 3),
    "aten._embedding_bag_forward_only.default": (2, 1, 0, 3),
    "aten._scaled_dot_product_efficient_attention.default": (0, 1),
    "aten._scaled_dot_product_cudnn_attention.default": (6, 7, 0, 1, 2, 3, 4, 5, 8),
}
"""Overload name -> positions of the results in the order of their allocation; results not listed are on the host.

Source: cuda/Dropout.cu, dropout_cuda; Normalization.cpp, _batch_norm_legit_functional, which clones the running
statistics first; cuda/EmbeddingBag.cu, _embedding_bag_cuda; transformers/cuda/attention.cu, where
the memory-efficient kernel's seed and offset are on the card only during graph capture; torch's memory history.
"""


def flattened_weights(args: Arguments, kwargs: Keywords) -> torch.Tensor:
    """Return the result of ``_cudnn_rnn_flatten_weight``: a buffer, of which torch makes the weights views, freeing
    their own storages.

    Source: cudnn/RNN.cpp, copy_weights_to_flat_buf_views.
    """
    weights, _, inputs, mode, hidden, projection, layers, _, bidirectional = args[:9]
    itemsize = weights[0].element_size()
    size = rnn_weight_bytes(MODES[mode], inputs, hidden, layers, bidirectional, itemsize, projection)
    return weights[0].new_empty(size // itemsize)


def recurrent_backward(args: Arguments, kwargs: Keywords) -> Any:
    """Return the results of ``_cudnn_rnn_backward``, whose weight gradients are views of a buffer like the weights'."""
    x, weights, _, buffer, hx, cx = args[:6]
    batch_first, batch_sizes, (*_, needs_weights) = args[14], args[18], args[21]
    weight_gradients: list[torch.Tensor | None] = [None] * len(weights)
    if needs_weights:
        flat, start = buffer.new_empty(buffer.numel()), 0
        for i, weight in enumerate(weights):
            weight_gradients[i] = flat[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()
    grad_x = x.new_empty(x.shape)
    if batch_first and not batch_sizes:  # a view of a time-first tensor
        grad_x = x.new_empty(x.transpose(0, 1).shape).transpose(0, 1)
    return grad_x, hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape), weight_gradients


def gru_cell(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``_thnn_fused_gru_cell`` (RNN.cu): it saves five values per hidden unit for the backward pass."""
    hidden = args[2]
    batch, size = hidden.shape
    return hidden.new_empty(hidden.shape), hidden.new_empty(batch, 5 * size)


def gru_cell_backward(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``_thnn_fused_gru_cell_backward``: gradients of both gate inputs, the state and, if there are any, the
    biases."""
    gradient, saved, has_bias = args  # saved: five values per hidden unit, of which the gates are three
    batch, gates = saved.shape[0], saved.shape[1] * 3 // 5
    gradients = saved.new_empty(batch, gates), saved.new_empty(batch, gates), gradient.new_empty(gradient.shape)
    return *gradients, *(saved.new_empty(gates) if has_bias else None for _ in range(2))


def histogram(args: Arguments, kwargs: Keywords) -> torch.Tensor:
    """Result of ``histc``: a value per bin. Unlike the CPU, CUDA supports integers."""
    x, bins = args[0], args[1] if len(args) > 1 else kwargs.get("bins", 100)
    return x.new_empty(bins)


INSTEAD: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "aten._cudnn_rnn_flatten_weight.default": flattened_weights,
    "aten._cudnn_rnn_backward.default": recurrent_backward,
    "aten._thnn_fused_gru_cell.default": gru_cell,
    "aten._thnn_fused_gru_cell_backward.default": gru_cell_backward,
    "aten.histc.default": histogram,
    "aten._grouped_mm.default": results.grouped_mm,
    **results.OF_LENGTHS,
}
"""Overload name -> (args, kwargs) -> the result, for ops that fake CPU tensors do not support."""
