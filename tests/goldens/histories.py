"""Two real histories of an H100's allocator, and a Trace's events to put beside them.

The recorded events are read here, without memplan: which block was asked for, of which size, and in which order blocks
were given back. Their times and addresses play no part.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from goldens.cs336_step import forward_step, full_step

from memplan.trace.trace import Trace

DATA = Path(__file__).parents[3] / "shared" / "data" / "cuda_snapshots"
STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "ctx128_forward": partial(forward_step, 128),
    "ctx256_fullstep": partial(full_step, 256),
}
"""The name of a history -> the step that it is of."""


def file_of(name: str) -> Path:
    """Where a history lies."""
    return DATA / f"transformer_2.7b_{name}.json.gz"


class Event(NamedTuple):
    """A block is born (+) or dies (-). Blocks are numbered in order of birth."""

    kind: Literal["+", "-"]
    block: int
    bytes: int
    op: str = ""

    @property
    def step(self) -> tuple[str, int]:
        return self.kind, self.bytes

    @property
    def whole(self) -> tuple[str, int, int]:
        return self[:3]


def read(path: Path) -> list[Event]:
    """The events of a snapshot, which frees nothing that was there before."""
    events, live = list[Event](), dict[int, Event]()
    births = 0
    for entry in json.loads(gzip.decompress(path.read_bytes()))["device_traces"][0]:
        if entry["action"] == "alloc":
            events.append(Event("+", births, entry["size"]))
            live[entry["addr"]] = events[-1]
            births += 1
        elif entry["action"] == "free_requested":
            events.append(live.pop(entry["addr"])._replace(kind="-"))
    return events


def predict(trace: Trace) -> list[Event]:
    """The events on the card from the first step on."""
    ticks: list[tuple[int, Any]] = []
    for storage in trace.counted:
        if storage.bytes:
            ticks += [(storage.born, storage)] + ([(storage.died, storage)] if storage.died is not None else [])
    events, blocks = list[Event](), dict[int, int]()
    for tick, storage in sorted((t for t in ticks if t[0] > trace.steps[0]), key=lambda t: t[0]):
        born = tick == storage.born
        block = blocks.setdefault(storage.id, len(blocks)) if born else blocks[storage.id]
        op = "" if storage.op is None else trace.ops[storage.op]
        events.append(Event("+" if born else "-", block, storage.bytes, f"{op and f'{op.name} at {op.where}'}"))
    return events


def same_until(predicted: list[Event], recorded: list[Event]) -> int:
    """How many events from the first on are the same."""
    pairs = enumerate(zip(predicted, recorded, strict=False))
    return next((i for i, (a, b) in pairs if a.whole != b.whole), min(len(predicted), len(recorded)))
