"""Read what Dynamo reports of the graphs that it hands to a backend.

Seen in torch 2.11, 2.13 and 2.15: the attribute ``compile_subgraph_reason`` of its graph modules, with ``graph_break``,
``reason`` and ``user_stack``.
"""

from __future__ import annotations

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
