"""Temporaries of the inference fast path: transformers/transformer.cpp and transformers/attention.cpp.

A whole encoder layer, or self-attention, is a single op: all of its intermediate tensors are temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.trace.semantics.cpu import matmul
from memplan.trace.semantics.layout import bytes_of

Attend = Callable[[torch.Tensor, int, torch.Tensor | None], int]
"""(input, heads, mask) -> peak bytes of self-attention that does not return its weights."""


def _linear(x: torch.Tensor, rows: int, into: int, out: int) -> int:
    """Scratchpad bytes of a linear layer."""
    return matmul.scratch(x.new_empty(rows, into), x.new_empty(out, into).t())


def attention_peak(
    x: torch.Tensor, heads: int, mask: torch.Tensor | None, weights: bool = False, average: bool = False
) -> int:
    """Return the peak bytes of self-attention: the largest of its moments (projections, scores, output projection,
    averaged weights). ``weights``: whether it returns the attention weights; ``average``: averaged over heads."""
    batch, length, width = x.shape
    unit, scores = bytes_of(x), batch * heads * length * length * x.element_size()
    rows, head = batch * length, width // heads
    q, p = x.new_empty(batch * heads, length, head), x.new_empty(batch * heads, length, length)
    products = max(matmul.scratch(q, q.transpose(1, 2)), matmul.scratch(p, q))
    softmax = 0 if mask is None else scores
    if mask is not None and mask.dtype is not torch.bool:  # converted to bool, of the number of scores
        softmax += batch * heads * length * length
    return max(
        3 * unit + max(3 * unit, _linear(x, rows, width, 3 * width)),
        3 * unit + scores + max(softmax, products),
        5 * unit + (scores if weights else 0) + _linear(x, rows, width, width),
        4 * unit + scores + scores // heads if weights and average else 0,
    )


def attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the temporary bytes of ``_native_multi_head_attention`` with the same tensor as query, key and value."""
    x, heads = args[0], args[4]
    options = dict(zip(("mask", "need_weights", "average_attn_weights"), args[9:], strict=False))
    options |= kwargs
    if x.is_nested or args[1] is not x or x.dim() != 3:
        return 0
    weights, average = options.get("need_weights", True), options.get("average_attn_weights", True)
    results = sum(bytes_of(t) for t in result if isinstance(t, torch.Tensor)) if isinstance(result, tuple) else 0
    return attention_peak(x, heads, options.get("mask"), weights, average) - results


def encoder_layer(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, attend: Attend = attention_peak) -> int:
    """Return the temporary bytes of ``_transformer_encoder_layer_fwd``: those of its attention or of its feed-forward
    part, whichever peaks higher. ``attend``: formula of the attention's peak."""
    x, heads, norm_first, hidden = args[0], args[2], args[8], args[14].shape[0]
    if x.is_nested or x.dim() != 3:
        return 0
    mask = args[18] if len(args) > 18 else kwargs.get("mask")
    result_bytes, rows, width = bytes_of(x), x.shape[0] * x.shape[1], x.shape[2]  # x and the result have one shape
    normed = result_bytes if norm_first else 0
    hidden_bytes = rows * hidden * x.element_size()
    linears = max(_linear(x, rows, width, hidden), result_bytes + _linear(x, rows, hidden, width))
    feed_forward = normed + result_bytes + hidden_bytes + linears  # the input: the attention's result
    return max(normed + attend(x, heads, mask), feed_forward) - result_bytes


FORMULAS = {
    "aten._transformer_encoder_layer_fwd.default": encoder_layer,
    "aten._native_multi_head_attention.default": attention,
}
