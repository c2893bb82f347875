"""Real tensors from a file, as tensors of a recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memplan import _torch


def as_recorded(loaded: Any, place: Any = None) -> Any:
    """Return what was loaded with tensors of the recording, which share memory as the real ones do.

    Args:
        loaded: anything, with real tensors somewhere in its lists and dicts.
        place: what `torch.load` was given as ``map_location``.
    """
    device = place if isinstance(place, (str, torch.device)) else "cpu"
    storages: dict[int, torch.Tensor] = {}

    def recorded(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, _torch.FakeTensor) or leaf.layout != torch.strided:
            return leaf
        with _torch.no_modes():
            storage = leaf.untyped_storage()
            key, size, offset = storage.data_ptr(), storage.nbytes(), leaf.storage_offset()
            shape, strides, dtype, needs = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
        if key not in storages:
            storages[key] = torch.empty(size, dtype=torch.uint8, device=device)
        made = storages[key].view(dtype).as_strided(shape, strides, offset) if size else torch.empty(shape, dtype=dtype)
        return nn.Parameter(made.detach(), needs) if isinstance(leaf, nn.Parameter) else made.requires_grad_(needs)

    if isinstance(loaded, nn.Module):
        for module in loaded.modules():
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, tensor in own:
                setattr(module, name, recorded(tensor))
        return loaded
    return _torch.tree_map(recorded, loaded)
