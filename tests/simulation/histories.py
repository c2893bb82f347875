"""Snapshots to replay: random programs driven through the slow reference allocator, written out as torch writes them.

Neither the allocator nor the writer is memplan's own. The rest are small ones by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.reference_allocator import ReferenceAllocator

from memplan.simulation.allocator.allocator import OutOfMemory
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import AllocatorEvent, Pool, Segment

MIB = 1 << 20
REAL = Path(__file__).parents[3] / "shared" / "data" / "cuda_snapshots"
BASE = 0x7F0000000000


@dataclass
class Program:
    """A random program, what an allocator did for it, and the bytes after every event of it."""

    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    seed: int = 0
    length: int = 250
    capacity: int | None = None
    limit: int | None = None
    largest: int = 26
    """log2 of the largest request."""
    pools: Sequence[Pool] = ((0, 0), (0, 0), (0, 1))

    def run(self) -> ReferenceAllocator:
        number = random.Random(self.seed)
        following = iter(range(1, 1 << 20))
        allocator = ReferenceAllocator(
            self.settings, lambda size: BASE + next(following) * (1 << 33), capacity=self.capacity, limit=self.limit,
            total=1 << 32,
        )  # fmt: skip
        self.levels: list[tuple[int, int]] = []
        for tick in range(1, self.length + 1):
            self._step(allocator, number, tick)
            self.levels.append((allocator.allocated, allocator.reserved))
        return allocator

    def _step(self, allocator: ReferenceAllocator, number: random.Random, tick: int) -> None:
        live = [block.address for block in allocator.blocks if not block.pending]
        waiting = [block.address for block in allocator.blocks if block.pending]
        kind = number.random()
        if live and kind < 0.4:
            address = number.choice(live)
            if number.random() < 0.15:
                allocator.record_stream(address, 99)
            allocator.free(address, tick)
        elif waiting and kind < 0.45:
            allocator.complete(number.choice(waiting), tick)
        elif kind < 0.46:
            allocator.empty_cache(tick)
        else:
            size = int(2 ** number.uniform(3, self.largest))
            try:
                allocator.malloc(size, number.choice([0, 0, 0, 7]), number.choice(self.pools), tick, tick)
            except OutOfMemory:
                for address in live[::2]:
                    allocator.free(address, tick)


def written(
    log: Iterable[AllocatorEvent],
    segments: Iterable[Segment],
    settings: dict[str, Any] | None = None,
    *,
    device: int = 0,
    pools: bool = True,
) -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` would return."""
    trace: list[dict[str, Any]] = []
    for event in log:
        place = "device_free" if event.action == "oom" else "addr"
        row = {"action": event.action, place: event.address, "size": event.size, "stream": event.stream, "time_us": 0}
        trace.append(row | {"pool_id": event.pool} if pools else row)
    rows: list[dict[str, Any]] = []
    for segment in segments:
        blocks = [
            {"address": b.address, "size": b.size, "requested_size": b.requested, "state": b.state, "frames": []}
            for b in segment.blocks
        ]
        rows.append(
            {
                "device": device,
                "address": segment.address,
                "total_size": segment.size,
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": segment.expandable,
                "frames": [],
                "blocks": blocks,
            }
        )
    return {
        "segments": rows,
        "device_traces": [[]] * device + [trace],
        "allocator_settings": settings or {},
    }


def recorded(settings: AllocatorSettings) -> dict[str, Any]:
    """Settings as torch records them."""
    table = dict(settings.roundup_power2_divisions)
    return {
        "PYTORCH_CUDA_ALLOC_CONF": str(settings),
        "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << k): table.get(1 << k, 0) for k in range(16)},
    }


def block(size: int, state: str = "inactive", requested: int | None = None, **more: Any) -> dict[str, Any]:
    return {"size": size, "state": state, "requested_size": size if requested is None else requested, **more}


def segment(address: int, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A segment of the default pool and stream as a dict."""
    size = sum(row["size"] for row in blocks)
    kind = "small" if size == 2 * MIB else "large"
    return {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": kind, "blocks": [*blocks],
            **more}  # fmt: skip


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def freed(addr: int, size: int, **more: Any) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size, **more), event("free_completed", addr, size, **more)]


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


A, B, C = BASE, BASE + (1 << 30), BASE + (2 << 30)


def out_of_memory() -> dict[str, Any]:
    """Four blocks of 24 MiB in two segments; the first and the last are freed; then 40 MiB do not fit anywhere.

    Worked out by hand. The card gives 100 MiB: 96 are held in two segments of 48, and 4 are left. 48 MiB are free, but
    each segment holds a block in use beside its free half. Expandable segments, in pages of 20 MiB, would have held
    all of the 100: 24 free, 48 in use, 28 free. Short of memory, the pages that are all free (the first and the last)
    go back, and the 8 MiB before the last grow by two pages: 48 of 40 + 8, and 100 MiB held again.
    """
    user = [frame("/home/me/train.py", 7, "forward"), frame("/usr/lib/python3.11/runpy.py", 1, "run")]
    torch = [frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 3, "forward")]
    size = 24 * MIB
    trace: list[dict[str, Any]] = []
    for start in (A, B):
        trace += [event("segment_alloc", start, 2 * size), event("alloc", start, 2 * size)]
    trace += [*freed(A, 2 * size), *freed(B, 2 * size)]
    trace += [event("alloc", start, size, frames=torch + user) for start in (A, A + size, B, B + size)]
    trace += [*freed(A, size), *freed(B + size, size)]
    trace.append({"action": "oom", "device_free": 4 * MIB, "size": 40 * MIB, "stream": 0, "frames": torch + user})
    live = block(size, "active_allocated", frames=torch + user)
    return {
        "segments": [segment(A, block(size), live), segment(B, live, block(size))],
        "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False},
    }
