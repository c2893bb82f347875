"""The inference fast path on CUDA: the CPU's parts, but for attention by a fused kernel where there is one.

Source: native/transformers/cuda/attention.cu, `native_multi_head_attention_cuda`: without a mask and where nobody asks
for the weights, one projection, the kernel that `select_sdp_backend` names (unless that is math), and the projection of
its result.
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
    """Return the bytes that the fast path takes at most beside its results, by the card's compute capability."""

    def attend(x: torch.Tensor, heads: int, mask: torch.Tensor | None) -> int:
        return _fused_peak(x, heads) if _is_fused(x, heads, mask, capability) else parts.attention_peak(x, heads, mask)

    if name == _LAYER:
        return max(0, parts.layer(args, kwargs, result, attend))
    x, heads, given = args[0], args[4], dict(zip(("mask", "need_weights"), args[9:], strict=False)) | kwargs
    alike = args[1] is x and args[2] is x and x.dim() == 3 and not x.is_nested and not given.get("need_weights", True)
    if alike and _is_fused(x, heads, given.get("mask"), capability):
        return _fused_peak(x, heads) - bytes_of(x)
    return max(0, parts.attention(args, kwargs, result))


def _is_fused(x: torch.Tensor, heads: int, mask: torch.Tensor | None, capability: Any) -> bool:
    size = x.shape[-1] // heads
    if mask is not None or size % 8:
        return False
    split = x.view(x.shape[0], -1, heads, size).transpose(1, 2)
    given = split, split, split, None, 0.0, False, None, False
    return sdpa_choice.choose(*given, arch=capability, enabled=enabled_now()).kernel != "math"


def _fused_peak(x: torch.Tensor, heads: int) -> int:
    """Return the peak: queries, keys and values in one, with the result and its statistics, then its projection."""
    unit, statistics = bytes_of(x), 4 * x.shape[0] * heads * x.shape[1]
    return 3 * unit + max(unit + statistics, 2 * unit)
