"""Max pools as torch's own kernels, in a step of fused ones.

Inductor writes a pool as a loop over every window, in which what it fuses runs once for each element of a window, and a
pool's derivative as a scatter into a copy in order. torch's kernels are several times as fast in channels last, and
copy nothing that is laid out alike. Under names of ours, they are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("memplan", "FRAGMENT")  # lives as long as the process
_NAMES = (
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
)


def _registered(name: str) -> Any:
    torchs = getattr(_ATEN, name).default
    _LIBRARY.define(str(torchs._schema).removeprefix("aten::"))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, torchs, key)
    torch.library.register_fake(f"memplan::{name}", torchs, lib=_LIBRARY)
    return getattr(torch.ops.memplan, name).default


POOLS: Mapping[Any, Callable[..., Any]] = {getattr(_ATEN, name).default: _registered(name) for name in _NAMES}
"""By torch's pool and its derivative, ours of the same arguments."""
