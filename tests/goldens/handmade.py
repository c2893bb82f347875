"""Golden files written by hand, from the description of their fields and from torch's rules, with none of our code."""

from __future__ import annotations

import copy
import gzip
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for _folder in (ROOT / "benchmarks", ROOT / "tools" / "gpu"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

MIB = 1 << 20
TENSOR = 4096 * 8192 * 4  # 128 MiB: a segment of its own, to the byte
UNITS = TENSOR // 512


def gelu() -> dict[str, Any]:
    """The step ``gelu`` of the single layers on an H200: input, output and both gradients are 128 MiB each.

    Building makes the input and the output's gradient. The first step makes the output and the input's gradient, which
    is kept: four tensors. From the second on there is another one to be added to the kept one: five. Among free blocks
    of one size the allocator takes the lowest.
    """
    first = "sasa" + "sasa" + "f"
    second = "a" + "sa" + "ff"
    third = "aaff"
    places = [
        *(0, 0, UNITS, UNITS),  # input, the output's gradient
        *(2 * UNITS, 2 * UNITS, 3 * UNITS, 3 * UNITS, 2),  # output, the input's gradient; the output goes
        *(2 * UNITS, 4 * UNITS, 4 * UNITS, 1, 2),  # output where the first was, another gradient; both go
        *(2 * UNITS, 4 * UNITS, 1, 2),
    ]
    live, free = [TENSOR, TENSOR, 1], [TENSOR, 0, 0]
    return {
        "format": "memplan-golden", "version": 1, "name": "gelu", "set": "layers", "steps": 3,
        "gpu": {"name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132, "memory": 150_000_000_000},
        "versions": {"torch": "2.13.0+cu130", "cuda": "13.0", "cudnn": 91900},
        "environment": {}, "flags": {}, "allocator_settings": {"expandable_segments": False, "max_split_size": -1},
        "build": [2 * TENSOR] * 2, "peaks": [[4 * TENSOR] * 2, [5 * TENSOR] * 2, [5 * TENSOR] * 2],
        "end": [3 * TENSOR, 5 * TENSOR], "context": {"bytes": 520 * MIB, "how": "by hand"},
        "events": {
            "unit": 512, "actions": first + second + third, "places": places, "sizes": [TENSOR] * 13,
            "streams": None, "pools": None, "pool_ids": [[0, 0]],
        },
        "segments": [
            [number * UNITS, TENSOR, 0, False, 0, False, [live if number in (0, 1, 3) else free]] for number in range(5)
        ],
        "workspaces": [["aten.gelu.default", "f32[4096,8192]", 0, 0, 0, 1, [TENSOR]]],
        "calls": {"aten.gelu.default": [0]},
        "notes": [],
    }  # fmt: skip


def changed(content: dict[str, Any], *keys: Any, to: Any) -> dict[str, Any]:
    """A copy with one field, named by the way to it, set to something else."""
    made = copy.deepcopy(content)
    place: Any = made
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    return made


def write(folder: Path, content: dict[str, Any], name: str = "gelu") -> Path:
    """The file of a content."""
    path = folder / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path
