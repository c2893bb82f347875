"""The inference fast path of transformer encoders on CUDA: as on the CPU, but with fused attention where possible.

Source: native/transformers/cuda/attention.cu, `native_multi_head_attention_cuda`: without a mask and without returned
attention weights, one input projection, the kernel that `select_sdp_backend` chooses (unless that is math), and the
output projection.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.cpu import encoder_fast_path as parts
from memplan.trace.semantics.cuda import sdpa_choice
from memplan.trace.semantics.cuda.composites import enabled_now
from memplan.trace.semantics.cuda.sdpa_choice import Arch
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of

OPS = frozenset(parts.FORMULAS)
_LAYER = "aten._transformer_encoder_layer_fwd.default"


def temporaries(name: str, args: Arguments, kwargs: Keywords, result: Any, capability: Arch) -> int:
    """Peak bytes that an op of the fast path allocates beyond its results, on a card of this compute capability."""

    def attend(x: torch.Tensor, heads: int, mask: torch.Tensor | None) -> int:
        """Peak bytes of self-attention in an encoder layer."""
        if _uses_fused_attention(x, heads, mask, capability):
            return _fused_peak(x, heads)
        return parts.attention_peak(x, heads, mask)

    if name == _LAYER:
        return max(0, parts.encoder_layer(args, kwargs, result, attend))
    query, key, value, _, heads, *_ = args
    options = dict(zip(("mask", "need_weights"), args[9:], strict=False)) | kwargs
    is_self_attention = key is query and value is query
    may_fuse = is_self_attention and query.dim() == 3 and not query.is_nested and not options.get("need_weights", True)
    if may_fuse and _uses_fused_attention(query, heads, options.get("mask"), capability):
        return _fused_peak(query, heads) - bytes_of(query)
    return max(0, parts.attention(args, kwargs, result))


def _uses_fused_attention(x: torch.Tensor, heads: int, mask: torch.Tensor | None, capability: Arch) -> bool:
    """Return whether `sdpa_choice.choose` selects a fused kernel for self-attention of ``x``."""
    head_size = x.shape[-1] // heads
    if mask is not None or head_size % 8:
        return False
    split = x.view(x.shape[0], -1, heads, head_size).transpose(1, 2)
    no_mask, dropout, is_causal, scale, grouped = None, 0.0, False, None, False
    arguments = split, split, split, no_mask, dropout, is_causal, scale, grouped
    return sdpa_choice.choose(*arguments, arch=capability, enabled=enabled_now()).kernel != "math"


def _fused_peak(x: torch.Tensor, heads: int) -> int:
    """Peak bytes of fused self-attention of ``x``, which is (batch, length, width).

    First packed queries, keys and values with the attention output and its log-sum-exp; then, in place of these two,
    the output and its projection.
    """
    log_sum_exp = 4 * x.shape[0] * heads * x.shape[1]
    return 3 * bytes_of(x) + max(bytes_of(x) + log_sum_exp, 2 * bytes_of(x))
