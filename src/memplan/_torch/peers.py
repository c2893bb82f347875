"""Bound how much `torch.compile` keeps from forward to backward.

Seen in torch 2.11, 2.13 and 2.15: ``torch._functorch.config.activation_memory_budget``, and ``patch`` of that module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_budget(share: float) -> Iterator[None]:
    """Compile in this context with at most this share (1: all that it would) of the bytes kept for backward."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=share):
        yield
