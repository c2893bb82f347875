"""Register ops of the namespace ``memplan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_KERNELS = dict[str, Callable[..., Any]]()
"""Kernels by the name of their op."""
LIBRARY = torch.library.Library("memplan", "DEF")  # lives as long as the process


def define(
    schema: str, fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the kernel of an op of memplan for the CPU and CUDA. ``schema``:
    of the op, as ``relu(Tensor self) -> Tensor``; ``fake``: returns results without data."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Register a kernel, and return it."""
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=tags)
        _KERNELS[f"memplan::{name}"] = kernel
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"memplan::{name}", fake, lib=LIBRARY)
        return kernel

    return register


def kernel_of(op: Any) -> Callable[..., Any] | None:
    """Return the kernel of an op of memplan; None for other ops."""
    return _KERNELS.get(op.name())


def elements_in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
