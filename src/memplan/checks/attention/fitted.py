"""Heads that fused kernels take, for those that they do not: padded, repeated, or in float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # torch's own name for it

from memplan import _torch

_MULTIPLE = 8
"""Sizes that every fused kernel takes are multiples of it."""
PADDING = "pad the heads to a multiple of 8, with scale= of the size that they have"
REPEATING = "repeat each key and value head for its query heads (repeat_interleave) in place of enable_gqa=True"
HALF = "take float16 in place of bfloat16, which this card has no fused kernel for; beyond 65504 it overflows"


@contextmanager
def heads_fitted(*, half: bool = False) -> Iterator[set[str]]:
    """Make `scaled_dot_product_attention` pad its heads to a multiple of 8 and repeat those of grouped queries. The
    result is the same; yields what was done, in words. ``half``: bfloat16 becomes float16, too."""
    call: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    done: set[str] = set()

    def fitting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
            done.add(REPEATING)
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
            kwargs = {**kwargs, "enable_gqa": False}
        head, wide = query.shape[-1], value.shape[-1]
        if head % _MULTIPLE == 0 and wide % _MULTIPLE == 0:
            return call(query, key, value, *args, **kwargs)
        done.add(PADDING)
        given = kwargs.get("scale")
        scale = 1 / math.sqrt(head) if given is None else given
        heads = (F.pad(tensor, (0, -tensor.shape[-1] % _MULTIPLE)) for tensor in (query, key, value))
        return call(*heads, *args, **{**kwargs, "scale": scale})[..., :wide]

    def in_half(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if query.dtype is not torch.bfloat16:
            return fitting(query, key, value, *args, **kwargs)
        done.add(HALF)
        args, kwargs = _torch.tree_map(_halved, (args, kwargs))  # a mask of the same type
        with torch.autocast(query.device.type, enabled=False):
            return fitting(query.half(), key.half(), value.half(), *args, **kwargs).to(torch.bfloat16)

    with _torch.patched(F, scaled_dot_product_attention=in_half if half else fitting):
        yield done


def _halved(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value
