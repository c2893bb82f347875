"""Attention heads changed to what fused kernels take: padded, repeated, or in float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # torch's own name for it

from memplan import _torch

_MULTIPLE = 8
"""Every fused kernel takes head sizes that are multiples of this."""
PADDING = "pad the heads to a multiple of 8, with scale= of the size that they have"
REPEATING = "repeat each key and value head for its query heads (repeat_interleave) in place of enable_gqa=True"
HALF = "take float16 in place of bfloat16, which this card has no fused kernel for; beyond 65504 it overflows"


@contextmanager
def heads_fitted(*, half: bool = False) -> Iterator[set[str]]:
    """Within this context `scaled_dot_product_attention` pads heads to a multiple of 8 and repeats key and value heads
    for grouped queries, with the same result.

    Yields the set of changes applied so far, in words. With ``half``, bfloat16 becomes float16 as well.
    """
    call: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    applied: set[str] = set()

    def fitted_call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if kwargs.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
            applied.add(REPEATING)
            key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
            kwargs = {**kwargs, "enable_gqa": False}
        head_size, value_size = query.shape[-1], value.shape[-1]
        if head_size % _MULTIPLE == 0 and value_size % _MULTIPLE == 0:
            return call(query, key, value, *args, **kwargs)
        applied.add(PADDING)
        scale = kwargs.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(head_size)
        padded = (F.pad(tensor, (0, -tensor.shape[-1] % _MULTIPLE)) for tensor in (query, key, value))
        return call(*padded, *args, **{**kwargs, "scale": scale})[..., :value_size]

    def half_call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if query.dtype is not torch.bfloat16:
            return fitted_call(query, key, value, *args, **kwargs)
        applied.add(HALF)
        args, kwargs = _torch.tree_map(_bfloat16_to_half, (args, kwargs))  # the mask has the dtype of the queries
        with torch.autocast(query.device.type, enabled=False):
            return fitted_call(query.half(), key.half(), value.half(), *args, **kwargs).to(torch.bfloat16)

    with _torch.patched(F, scaled_dot_product_attention=half_call if half else fitted_call):
        yield applied


def _bfloat16_to_half(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value
