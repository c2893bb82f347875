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
    """Return a saved object with meta tensors of the same shapes, so that it takes no memory until it is loaded."""

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        with _torch.no_modes():
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return meta.requires_grad_(leaf.requires_grad)

    return _torch.tree_map(to_meta, saved)


def new_tensors(shapes: Any, map_location: Any = None) -> Any:
    """Return an object of `shapes_of` with new tensors of the recording; ``map_location`` as for `as_recorded`."""
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"

    def new(leaf: Any) -> Any:
        return like(leaf, device) if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" else leaf

    return _torch.tree_map(new, shapes)


def as_recorded(loaded: Any, map_location: Any = None) -> Any:
    """Return a loaded object with tensors of the recording, which share memory as the real tensors do.

    Args:
        loaded: anything, with real tensors somewhere in its lists and dicts, or a module.
        map_location: the device of its tensors, as for `torch.load`; a mapping or function counts as the host.
    """
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    storages: dict[int, torch.Tensor] = {}
    if isinstance(loaded, nn.Module):
        for module in loaded.modules():
            named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, tensor in named:
                setattr(module, name, _recorded_tensor(tensor, device, storages))
        return loaded
    return _torch.tree_map(lambda leaf: _recorded_tensor(leaf, device, storages), loaded)


def _recorded_tensor(leaf: Any, device: str | torch.device, storages: dict[int, torch.Tensor]) -> Any:
    """Return a real tensor as one of the recording: small integers keep their values, aliases share a storage.

    ``storages`` maps the address of each real storage to the recording's; leaves that are no tensor stay.
    """
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, _torch.FakeTensor) or leaf.layout != torch.strided:
        return leaf
    with _torch.no_modes():
        plain, needs_grad = leaf.detach().as_subclass(torch.Tensor), leaf.requires_grad
        storage, dtype, shape, strides = plain.untyped_storage(), plain.dtype, tuple(plain.shape), plain.stride()
        owns_storage = storage.nbytes() == plain.numel() * plain.element_size()
        is_integral = not dtype.is_floating_point and not dtype.is_complex
        values = plain.tolist() if is_integral and owns_storage and plain.numel() <= _KNOWN else None
        key, size, offset = storage.data_ptr(), storage.nbytes(), plain.storage_offset()
    if values is not None:
        return torch.tensor(values, dtype=dtype, device=device)
    if not size:
        return torch.empty(shape, dtype=dtype, device=device)
    if key not in storages:
        storages[key] = torch.empty(size, dtype=torch.uint8, device=device)
    view = storages[key].view(dtype).as_strided(shape, strides, offset)
    is_parameter = isinstance(leaf, nn.Parameter)
    return nn.Parameter(view.detach(), needs_grad) if is_parameter else view.requires_grad_(needs_grad)
