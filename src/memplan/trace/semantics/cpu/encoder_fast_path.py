"""Temporaries of the inference fast path: transformers/transformer.cpp and transformers/attention.cpp.

A whole encoder layer, or self-attention, is a single op: all of its intermediate tensors are temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.trace.semantics.cpu import matmul
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of

Attend = Callable[[torch.Tensor, int, torch.Tensor | None], int]
"""(input, heads, mask) -> peak bytes of self-attention that does not return its weights."""


def _linear(x: torch.Tensor, rows: int, inputs: int, outputs: int) -> int:
    """Scratchpad bytes of a linear layer on this many rows, in the dtype of ``x``."""
    return matmul.scratch(x.new_empty(rows, inputs), x.new_empty(outputs, inputs).t())


def attention_peak(
    x: torch.Tensor, heads: int, mask: torch.Tensor | None, weights: bool = False, average: bool = False
) -> int:
    """Return the peak bytes of self-attention of ``x``, which is (batch, length, width).

    The largest of its moments: projections, scores, output projection, averaged weights. ``weights``: whether it
    returns the attention weights; ``average``: whether these are averaged over heads.
    """
    batch, length, width = x.shape
    rows, head_size = batch * length, width // heads
    query = x.new_empty(batch * heads, length, head_size)
    score = x.new_empty(batch * heads, length, length)
    unit, scores = bytes_of(x), bytes_of(score)
    products = max(matmul.scratch(query, query.transpose(1, 2)), matmul.scratch(score, query))
    masked_softmax = 0 if mask is None else scores
    if mask is not None and mask.dtype is not torch.bool:  # converted to bool, of the number of scores
        masked_softmax += score.numel()
    return max(  # unit: bytes of the queries, as of the keys, the values and the output
        3 * unit + max(3 * unit, _linear(x, rows, width, 3 * width)),
        3 * unit + scores + max(masked_softmax, products),
        5 * unit + (scores if weights else 0) + _linear(x, rows, inputs=width, outputs=width),
        4 * unit + scores + scores // heads if weights and average else 0,
    )


def attention(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``_native_multi_head_attention`` with the same tensor as query, key and value."""
    x, key, _, _, heads, *_ = args
    options = dict(zip(("mask", "need_weights", "average_attn_weights"), args[9:], strict=False)) | kwargs
    if x.is_nested or key is not x or x.dim() != 3:
        return 0
    weights, average = options.get("need_weights", True), options.get("average_attn_weights", True)
    results = sum(bytes_of(t) for t in result if isinstance(t, torch.Tensor)) if isinstance(result, tuple) else 0
    return attention_peak(x, heads, options.get("mask"), weights, average) - results


def encoder_layer(args: Arguments, kwargs: Keywords, result: Any, attend: Attend = attention_peak) -> int:
    """Return the temporary bytes of ``_transformer_encoder_layer_fwd``: those of its attention or of its feed-forward
    part, whichever peaks higher.

    ``attend``: (input, heads, mask) -> peak bytes of the attention.
    """
    x, heads, norm_first, hidden_weight = args[0], args[2], args[8], args[14]
    if x.is_nested or x.dim() != 3:
        return 0
    mask = args[18] if len(args) > 18 else kwargs.get("mask")
    result_bytes, rows, width = bytes_of(x), x.shape[0] * x.shape[1], x.shape[2]  # x and the result have one shape
    hidden = hidden_weight.shape[0]
    normed = result_bytes if norm_first else 0
    hidden_bytes = rows * hidden * x.element_size()
    linears = max(_linear(x, rows, width, hidden), result_bytes + _linear(x, rows, hidden, width))
    feed_forward = normed + result_bytes + hidden_bytes + linears  # the input: the attention's result
    return max(normed + attend(x, heads, mask), feed_forward) - result_bytes


FORMULAS = {
    "aten._transformer_encoder_layer_fwd.default": encoder_layer,
    "aten._native_multi_head_attention.default": attention,
}
