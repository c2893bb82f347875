"""What a recording saves: shapes, of which tensors of the recording are made again."""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch
from memplan.trace.spec import like


def shapes_of(saved: Any) -> Any:
    """Return a saved object with meta tensors of the same shapes, so that it takes no memory until it is loaded."""

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        with _torch.no_modes():
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return meta.requires_grad_(leaf.requires_grad)

    return _torch.tree_map(to_meta, saved)


def new_tensors(shapes: Any, map_location: Any = None) -> Any:
    """Return an object of `shapes_of` with new tensors of the recording.

    ``map_location`` is as for `torch.load`; a mapping or function counts as the host.
    """
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"

    def new(leaf: Any) -> Any:
        return like(leaf, device) if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" else leaf

    return _torch.tree_map(new, shapes)
