"""Everything of a module and of the process that a call could change, as a value to compare."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch
from torch import nn


def digest(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.stride(), tensor.dtype, hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def everything(model: nn.Module, *tensors: torch.Tensor) -> dict[str, Any]:
    """Identities, values, versions and gradients of parameters and buffers, hooks, modes, plain attributes, random
    streams; and the same of other tensors."""
    state: dict[str, Any] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
        *((f"given {n}", t) for n, t in enumerate(tensors)),
    ):
        grad = tensor.grad if tensor.is_leaf else None
        state[name] = (id(tensor), digest(tensor), tensor.requires_grad, tensor._version, digest(grad), id(grad))
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                state[f"{name}:{key}"] = (id(value), digest(value))
            elif isinstance(value, (int, str, bool, float)) or value is None:
                state[f"{name}:{key}"] = value
            elif isinstance(value, dict):
                state[f"{name}:{key}"] = (id(value), list(value), [id(v) for v in value.values()])
            elif isinstance(value, list):
                state[f"{name}:{key}"] = (id(value), [id(v) for v in value])
            else:
                state[f"{name}:{key}"] = id(value)
    state["keys"] = list(model.state_dict())
    state["streams"] = (digest(torch.get_rng_state()), random.getstate(), str(numpy.random.get_state()))
    state["modes"] = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads())
    return state
