"""Checkpoints of a recording: shapes are saved, and new tensors of these shapes are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.loads import place_of
from memplan.trace.records import HOST
from memplan.trace.spec import like


@dataclass(frozen=True)
class _Saved:
    """A saved tensor, which takes no memory until it is loaded."""

    meta: torch.Tensor
    location: str
    """The device that it was saved from, as torch names it in a file: ``cpu``, ``cuda:0``."""


def shapes_of(saved: Any) -> Any:
    """Return a saved object with the shapes of its tensors instead of these."""

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        with _torch.no_modes():
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        device = leaf.device
        location = device.type if device.type in (HOST, "meta") else f"{device.type}:{device.index or 0}"
        return _Saved(meta.requires_grad_(leaf.requires_grad), location)

    return _torch.tree_map(to_meta, saved)


def new_tensors(shapes: Any, map_location: Any = None) -> Any:
    """Return an object of `shapes_of` with new tensors of the recording; ``map_location`` is as for `torch.load`."""

    def new(leaf: Any) -> Any:
        return like(leaf.meta, place_of(leaf.meta, leaf.location, map_location)) if isinstance(leaf, _Saved) else leaf

    return _torch.tree_map(new, shapes)
