"""Register ops of the namespace ``memplan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("memplan", "DEF")  # lives as long as the process


def define(
    schema: str, fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel for the CPU and CUDA, and what it does to tensors without data."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=tags)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"memplan::{name}", fake, lib=LIBRARY)
        return kernel

    return register


def in_memory(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
