"""The formulas by which torch counts the floating-point operations of an op.

`torch.utils.flop_counter` is public, its registry is not named in its ``__all__``. Seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_SAME_FORMULA = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
"""Ops that torch has no formula for, and those with the same arguments in front that do the same work."""


def flop_formula(target: str) -> Callable[..., int] | None:
    """Return the formula of an op such as ``aten.mm.default``: called as the op is, with tensors and ``out_val``.

    Returns:
        None where torch counts none for it: it is bound by memory.
    """
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten":
        return None
    packet: Any = getattr(torch.ops.aten, _SAME_FORMULA.get(name, name), None)
    return flop_registry.get(packet)
