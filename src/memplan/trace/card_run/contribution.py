"""A golden file of a user's step: what the allocator did, with shapes and sizes, and none of the user's strings.

The format is that of the files in ``goldens/`` (tools/gpu/README.md), with ``allocations`` beside, and without
``workspaces``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from memplan._text import write_whole
from memplan.dry.card import CARD
from memplan.trace.card_run import golden_format, machine
from memplan.trace.card_run.observed import CardRun
from memplan.trace.records import Op, Storage

NAME = "contributed"
_SETTING = re.compile(r"[A-Za-z0-9_:,.\[\]>-]{1,200}")
OTHER = "other"
"""Op that is none of torch's own."""


def contribution(run: CardRun, *, number: int = 0) -> dict[str, Any]:
    """Return the content of a golden file of a run whose snapshot was kept. ``number``: of the card."""
    emulated = CARD in os.environ  # by no means a real card's
    events, segments = golden_format.compact(run.snapshot, number)
    settings = golden_format.plain(run.snapshot.get("allocator_settings") or {})
    return {
        "format": golden_format.DRY_FORMAT if emulated else golden_format.FORMAT, "version": golden_format.VERSION,
        "name": NAME, "set": NAME, "steps": len(run.counters) - 1,
        "gpu": machine.gpu(number), "versions": machine.versions(),
        "environment": _settings(machine.environment()), "flags": machine.flags(),
        "allocator_settings": _settings(settings),
        "build": _pair(run, 0), "peaks": [_pair(run, at) for at in range(1, len(run.counters))],
        "end": [run.end.allocated, run.end.reserved], "context": None,
        "events": events, "segments": segments, "workspaces": None, "calls": None, "notes": [],
        "allocations": allocations(run),
    } | ({"assumed": []} if emulated else {})  # fmt: skip


def allocations(run: CardRun) -> list[list[Any]]:
    """Return [bytes, cause, phase, op, dtype, shape] of each allocation, in order; the op where it is torch's own."""
    ops = {op.index: op for op in run.found.joined.ops}
    return [_allocation(one, None if one.op is None else ops.get(one.op)) for one in run.found.joined.storages]


def write(path: str, content: Mapping[str, Any]) -> int:
    """Write a golden file, gzip-packed JSON, and return its bytes."""
    data = golden_format.packed(content)
    write_whole(path, data)
    return len(data)


def _allocation(storage: Storage, op: Op | None) -> list[Any]:
    phase, name = ("", "") if op is None else (op.phase, op_name(op.name))
    return [storage.bytes, storage.cause, phase, name, storage.dtype, list(storage.shape)]


def op_name(name: str) -> str:
    """Return the name of an op of torch's own; `OTHER` for one that a library or the user has registered."""
    return name if name.startswith(("aten.", "prims.")) else OTHER


def _pair(run: CardRun, at: int) -> list[int]:
    return [run.counters[at].allocated, run.counters[at].reserved]


def _settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose names and texts look like settings: whoever set a variable may have written anything."""
    kept: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            kept[name] = _settings(value)
        elif not isinstance(value, str) or _SETTING.fullmatch(value):
            kept[name] = value
    return kept
