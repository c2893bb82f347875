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
"""Op without a formula in torch -> op of equal FLOPs whose formula takes the same leading arguments."""


def flop_formula(target: str) -> Callable[..., int] | None:
    """Return torch's FLOP formula of an op such as ``aten.mm.default``, or None for an op that torch does not count.

    The formula is called with the op's arguments and its result as ``out_val``.
    """
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten":
        return None
    packet: Any = getattr(torch.ops.aten, _SAME_FORMULA.get(name, name), None)
    return flop_registry.get(packet)
