"""Heads of a size that fused kernels take, for those that they do not."""

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


@contextmanager
def heads_padded() -> Iterator[None]:
    """`scaled_dot_product_attention` pads the heads that it gets to a multiple of 8; the result is the same."""
    call: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def padding(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        head, wide = query.shape[-1], value.shape[-1]
        if head % _MULTIPLE == 0 and wide % _MULTIPLE == 0:
            return call(query, key, value, *args, **kwargs)
        given = kwargs.get("scale")
        scale = 1 / math.sqrt(head) if given is None else given
        heads = (F.pad(tensor, (0, -tensor.shape[-1] % _MULTIPLE)) for tensor in (query, key, value))
        return call(*heads, *args, **{**kwargs, "scale": scale})[..., :wide]

    with _torch.patched(F, scaled_dot_product_attention=padding):
        yield
