"""Real tensors, from a file or a data set, as tensors of a recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.trace.spec import like

_KNOWN = 1024
"""Elements up to which the values of integers are kept."""


def shapes_of(saved: Any) -> Any:
    """Return a saved object with meta tensors instead of its tensors; modules stay."""

    def bare(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        with _torch.no_modes():
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return meta.requires_grad_(leaf.requires_grad)

    return _torch.tree_map(bare, saved)


def new_tensors(shapes: Any, place: Any = None) -> Any:
    """Return an object of `shapes_of` with new tensors of the recording; ``place`` as for `as_recorded`."""
    device = place if isinstance(place, (str, torch.device)) else "cpu"

    def new(leaf: Any) -> Any:
        return like(leaf, device) if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" else leaf

    return _torch.tree_map(new, shapes)


def as_recorded(loaded: Any, place: Any = None) -> Any:
    """Return a loaded object with tensors of the recording, which share memory as the real tensors do.

    Args:
        loaded: anything, with real tensors somewhere in its lists and dicts, or a module.
        place: where its tensors lie then, as `torch.load` takes it as ``map_location``; the host where it is a mapping.
    """
    device = place if isinstance(place, (str, torch.device)) else "cpu"
    storages: dict[int, torch.Tensor] = {}
    if isinstance(loaded, nn.Module):
        for module in loaded.modules():
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, tensor in own:
                setattr(module, name, _recorded(tensor, device, storages))
        return loaded
    return _torch.tree_map(lambda leaf: _recorded(leaf, device, storages), loaded)


def _recorded(leaf: Any, device: str | torch.device, storages: dict[int, torch.Tensor]) -> Any:
    """Return the recording's tensor for a leaf; ``storages`` maps addresses of real storages to the recording's."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, _torch.FakeTensor) or leaf.layout != torch.strided:
        return leaf
    with _torch.no_modes():
        plain, needs = leaf.detach().as_subclass(torch.Tensor), leaf.requires_grad
        storage, dtype, shape, strides = plain.untyped_storage(), plain.dtype, tuple(plain.shape), plain.stride()
        alone = storage.nbytes() == plain.numel() * plain.element_size()
        whole = not dtype.is_floating_point and not dtype.is_complex
        values = plain.tolist() if whole and alone and plain.numel() <= _KNOWN else None
        key, size, offset = storage.data_ptr(), storage.nbytes(), plain.storage_offset()
    if values is not None:
        return torch.tensor(values, dtype=dtype, device=device)
    if not size:
        return torch.empty(shape, dtype=dtype, device=device)
    if key not in storages:
        storages[key] = torch.empty(size, dtype=torch.uint8, device=device)
    view = storages[key].view(dtype).as_strided(shape, strides, offset)
    return nn.Parameter(view.detach(), needs) if isinstance(leaf, nn.Parameter) else view.requires_grad_(needs)
