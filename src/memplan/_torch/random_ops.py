"""Ops that draw random numbers, made to draw them from a generator that is not torch's own.

Everything here was seen in torch 2.11 and 2.13: ``_schema`` and ``_overloadname`` of ops, and their overloads that take
a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DRAW_NOTHING = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
"""Ops that may draw on a card, and do not on the CPU."""


def drawing_from(op: Any, generator: torch.Generator) -> Callable[..., Any] | None:
    """Return a function that computes on the CPU what an op does and draws from a generator; the op itself if it draws
    nothing, None if it cannot draw from another generator than torch's own."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()) or op in _DRAW_NOTHING:
        return op
    if op is torch.ops.aten.native_dropout.default:
        return lambda x, p, train: _dropout(x, p, train, generator)
    name = "generator" if op._overloadname == "default" else f"{op._overloadname}_generator"
    if any(argument.name == "generator" for argument in op._schema.arguments):
        drawing = op
    elif name in op.overloadpacket.overloads():
        drawing = getattr(op.overloadpacket, name)
    else:
        return None
    return lambda *args, **kwargs: drawing(*args, **{**kwargs, "generator": generator})


def _dropout(x: torch.Tensor, p: float, train: bool | None, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Source: aten/src/ATen/native/Dropout.cpp, `native_dropout_cpu`."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return x.mul(kept).mul_(1 / (1 - p)), kept
