"""A golden file of a user's step: its allocator events, with shapes and sizes, and none of the user's strings.

The format is that of the files in ``goldens/`` (tools/gpu/README.md), plus ``allocations``, without ``workspaces``.
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

NAME = "contributed"
_SETTING = re.compile(r"[A-Za-z0-9_:,.\[\]>-]{1,200}")
OTHER = "other"
"""Replaces the name of an op that a library or the user registered."""


def contribution(run: CardRun, *, number: int = 0) -> dict[str, Any]:
    """Return the content of the golden file of a run with a snapshot. ``number``: device index of the card."""
    emulated = CARD in os.environ  # marked so that it does not pass for a real card
    events, segments = golden_format.compact(run.snapshot, number)
    settings = golden_format.plain(run.snapshot.get("allocator_settings") or {})
    return {
        "format": golden_format.DRY_FORMAT if emulated else golden_format.FORMAT, "version": golden_format.VERSION,
        "name": NAME, "set": NAME, "steps": len(run.counters) - 1,
        "gpu": machine.gpu(number), "versions": machine.versions(),
        "environment": _settings(machine.environment()), "flags": machine.flags(),
        "allocator_settings": _settings(settings),
        "build": _peaks(run, part=0), "peaks": [_peaks(run, part) for part in range(1, len(run.counters))],
        "end": [run.end.allocated, run.end.reserved], "context": None,
        "events": events, "segments": segments, "workspaces": None, "calls": None, "notes": [],
        "allocations": allocations(run),
    } | ({"assumed": []} if emulated else {})  # fmt: skip


def allocations(run: CardRun) -> list[list[Any]]:
    """Return [bytes, cause, phase, op (`op_name`), dtype, shape] of each allocation, in order."""
    ops = {op.index: op for op in run.step.parts.ops}
    rows: list[list[Any]] = []
    for storage in run.step.parts.storages:
        op = None if storage.op is None else ops.get(storage.op)
        phase, name = ("", "") if op is None else (op.phase, op_name(op.name))
        rows.append([storage.bytes, storage.cause, phase, name, storage.dtype, list(storage.shape)])
    return rows


def write(path: str, content: Mapping[str, Any]) -> int:
    """Write a `contribution` as gzipped JSON, and return the size of the file in bytes."""
    data = golden_format.packed(content)
    write_whole(path, data)
    return len(data)


def op_name(name: str) -> str:
    """Return the name of a torch op; `OTHER` for an op that a library or the user registered."""
    return name if name.startswith(("aten.", "prims.")) else OTHER


def _peaks(run: CardRun, part: int) -> list[int]:
    """Return the peaks [allocated, reserved] in bytes of the build (part 0) or of a step (part 1 is the first step)."""
    return [run.counters[part].allocated, run.counters[part].reserved]


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without texts other than those of `_SETTING`: users may have put anything into a variable."""
    safe: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            safe[name] = _settings(value)
        elif not isinstance(value, str) or _SETTING.fullmatch(value):
            safe[name] = value
    return safe
