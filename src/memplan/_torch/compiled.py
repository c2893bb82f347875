"""`torch.compile`: where Dynamo ends a graph that it hands to a backend, and how much is kept for the backward pass.

Seen in torch 2.11, 2.13 and 2.15: the attribute ``compile_subgraph_reason`` of Dynamo's graph modules, with
``graph_break``, ``reason`` and ``user_stack``; ``torch._functorch.config.activation_memory_budget``, and ``patch`` of
that module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why and where a graph ends before the user's function does."""

    reason: str
    path: str
    line: int


def graph_break(graph: Any) -> GraphBreak | None:
    """Return the break that ends this graph; None where it goes on to the function's end."""
    found = getattr(graph, "compile_subgraph_reason", None)
    if found is None or not found.graph_break or not found.user_stack:
        return None
    frame = found.user_stack[-1]
    return GraphBreak(str(found.reason).strip().split("\n")[0], frame.filename, frame.lineno or 0)


@contextmanager
def memory_budget(share: float) -> Iterator[None]:
    """Compile in this context with at most this share (1: all that it would) of the bytes kept for backward."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=share):
        yield
