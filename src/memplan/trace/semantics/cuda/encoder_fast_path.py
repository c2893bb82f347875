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
from memplan.trace.semantics.layout import bytes_of

OPS = frozenset(parts.FORMULAS)
_LAYER = "aten._transformer_encoder_layer_fwd.default"


def temporaries(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, capability: Any) -> int:
    """Peak bytes that the fast path allocates beyond its results, on a card of this compute capability."""

    def attend(x: torch.Tensor, heads: int, mask: torch.Tensor | None) -> int:
        """Peak bytes of self-attention in an encoder layer."""
        fused = _uses_fused_attention(x, heads, mask, capability)
        return _fused_peak(x, heads) if fused else parts.attention_peak(x, heads, mask)

    if name == _LAYER:
        return max(0, parts.encoder_layer(args, kwargs, result, attend))
    x, heads, options = args[0], args[4], dict(zip(("mask", "need_weights"), args[9:], strict=False)) | kwargs
    self_attention = args[1] is x and args[2] is x
    may_fuse = self_attention and x.dim() == 3 and not x.is_nested and not options.get("need_weights", True)
    if may_fuse and _uses_fused_attention(x, heads, options.get("mask"), capability):
        return _fused_peak(x, heads) - bytes_of(x)
    return max(0, parts.attention(args, kwargs, result))


def _uses_fused_attention(x: torch.Tensor, heads: int, mask: torch.Tensor | None, capability: Any) -> bool:
    """Return whether a fused kernel runs self-attention of ``x``, as `sdpa_choice.choose` says."""
    size = x.shape[-1] // heads
    if mask is not None or size % 8:
        return False
    split = x.view(x.shape[0], -1, heads, size).transpose(1, 2)
    arguments = split, split, split, None, 0.0, False, None, False
    return sdpa_choice.choose(*arguments, arch=capability, enabled=enabled_now()).kernel != "math"


def _fused_peak(x: torch.Tensor, heads: int) -> int:
    """Peak bytes: packed queries, keys and values with the attention output and log-sum-exp, then the projection."""
    unit, statistics = bytes_of(x), 4 * x.shape[0] * heads * x.shape[1]
    return 3 * unit + max(unit + statistics, 2 * unit)
