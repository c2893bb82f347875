"""torch's own memory history of a card. Seen in torch 2.11 and 2.15."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

_MOST = 10_000_000


class HistoryEvent(NamedTuple):
    """One thing that the caching allocator did. Bytes as requested for blocks, as mapped for segments."""

    action: str
    address: int
    bytes: int
    stream: int
    pool: tuple[int, ...]


def record_history(*, stacks: bool) -> None:
    """Begin the history of all that the caching allocator does; ``stacks``: with the Python stack of each event."""
    context = "all" if stacks else None
    torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=_MOST)


def history() -> list[HistoryEvent]:
    """Return what was recorded, in order."""
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    rows = snapshot["device_traces"][torch.cuda.current_device()]
    return [
        HistoryEvent(
            row["action"], row.get("addr", 0), row["size"], row.get("stream", 0), tuple(row.get("pool_id", (0, 0)))
        )
        for row in rows
    ]


def dump_history(path: str | os.PathLike[str]) -> None:
    """Write torch's own snapshot, a pickle, as `torch.cuda.memory._dump_snapshot` does."""
    torch.cuda.memory._dump_snapshot(os.fspath(path))
