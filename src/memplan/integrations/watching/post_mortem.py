"""What is written when memory ends: what was asked for, who held the rest, which levers would have fitted."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes, parse_bytes
from memplan.errors import UnitError
from memplan.explanation.model import LABELS, HolderRow
from memplan.integrations.watching.inputs import LastInputs
from memplan.integrations.watching.levers import failed_step, levers_for
from memplan.integrations.watching.prediction import Prediction
from memplan.integrations.watching.window import Subject
from memplan.planning.graph.placement import Home
from memplan.verification.measurement.free_memory import available

SCHEMA = 1
_ON_HOST = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_ON_CARD = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_ROWS = 15
"""Rows of the text; the JSON file has all."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that an allocator of torch's has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _ON_HOST.search(str(error)) is not None
    )


def asked_for(error: BaseException) -> int | None:
    """Return how many bytes were asked for, as far as the message says it; None where it does not."""
    text = str(error)
    exact = _ON_HOST.search(text)
    if exact is not None:
        return int(exact[1])
    rounded = _ON_CARD.search(text)
    try:
        return None if rounded is None else parse_bytes(rounded[1])
    except UnitError:
        return None


def post_mortem(
    error: BaseException,
    step: int,
    subject: Subject,
    seen: Prediction | None,
    *,
    within: bool,
    device: torch.device,
    folder: str | os.PathLike[str],
    inputs: LastInputs | None,
) -> Path:
    """Write what is known of a step that ran out of memory, as JSON and as text of the same name.

    Nothing of it needs memory on the card. Both files are there before levers are looked for, which takes a while.

    Args:
        error: what was raised.
        step: that it ended, from 1.
        subject: what was watched.
        seen: the steps that were observed last; None: none.
        within: whether the failed step is the last of them.
        device: that ran out.
        folder: of the files, whose names are new ones.
        inputs: what the model was called with last.

    Returns:
        The path of the JSON file.

    Raises:
        OSError: the folder cannot be written to.
    """
    held = _held(subject)
    room = _room(device, sum(held.values()))
    data: dict[str, Any] = {
        "format": "memplan.post_mortem",
        "schema": SCHEMA,
        "error": f"{type(error).__name__}: {error}",
        "step": step,
        "asked": asked_for(error),
        "device": str(device) if subject.card is None else subject.card.name,
        "torch": torch.__version__,
        **room,
        "held_now": held,
        **_alive(seen, "the failed step" if within else "the step observed last"),
        "levers": None,
        "command": _command(subject, inputs, room["budget"]),
        "snapshot": None,
    }
    path = _new_file(Path(folder))
    data["snapshot"] = _snapshot(path, device)
    _write(path, data)
    if inputs is not None:
        predicted = None if within else failed_step(subject, inputs)
        if predicted is not None:
            data |= _alive(predicted, "the failed step, as predicted for its inputs without its loss")
        if room["budget"]:
            data["levers"] = levers_for(subject, inputs, room["budget"])
        _write(path, data)
    return path


def _alive(seen: Prediction | None, of: str) -> dict[str, Any]:
    """Return what is alive at the peak of a step, by cause and by layer."""
    rows = () if seen is None else seen.holders()
    return {
        "alive_of": None if seen is None else of,
        "peak": None if seen is None else seen.peak,
        "by_cause": _sums((row.cause, row.bytes) for row in rows),
        "by_layer": _by_layer(rows),
    }


def _room(device: torch.device, held: int) -> dict[str, Any]:
    """Return what the allocator held and what there was for it, in bytes; ``budget``: what a step can fit into."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved = stats["reserved_bytes.all.current"]
        return {
            "allocated": stats["allocated_bytes.all.current"], "reserved": reserved, "free": free, "capacity": total,
            "budget": reserved + free,
        }  # fmt: skip
    free = available(Home())
    return {
        "allocated": None, "reserved": None, "free": free, "capacity": None,
        "budget": None if free is None else free + held,
    }  # fmt: skip


def _held(subject: Subject) -> dict[str, int]:
    """Return what the model and its optimizers hold, each storage once, by cause."""
    seen, sizes = set[int](), dict[str, int]()
    for cause, tensor in subject.by_cause():
        if tensor.layout == torch.strided and _torch.has_shape(tensor):
            storage = tensor.untyped_storage()
            key = _torch.storage_key(storage)
            sizes[cause] = sizes.get(cause, 0) + (0 if key in seen else storage.nbytes())
            seen.add(key)
    return sizes


def _sums(pairs: Any) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for key, size in pairs:
        found[key] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _by_layer(rows: tuple[HolderRow, ...]) -> list[dict[str, Any]]:
    sizes: dict[tuple[str, str | None, str], int] = defaultdict(int)
    for row in rows:
        sizes[row.layer, row.where, row.cause] += row.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return [{"layer": key[0], "where": key[1], "cause": key[2], "bytes": size} for key, size in largest]


def _command(subject: Subject, inputs: LastInputs | None, budget: int | None) -> str:
    parts = ["memplan fit TARGET", *([] if inputs is None else inputs.texts())]
    if subject.optimizers:
        parts.append(f"--optimizer {type(subject.optimizers[0]).__name__.lower()}")
    parts.append(f"--budget {budget if budget else 'BYTES'}")
    return " ".join(parts)


def _new_file(folder: Path) -> Path:
    """Make a file of a new name, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / f"memplan-oom-{os.getpid()}-{number}.json"
        if path.with_suffix(".txt").exists() or path.with_suffix(".pickle").exists():
            continue
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return path
    raise AssertionError


def _snapshot(path: Path, device: torch.device) -> str | None:
    """Write torch's own snapshot, where its memory history was on; return its path."""
    if device.type != "cuda" or not _torch.history():
        return None
    file = path.with_suffix(".pickle")
    _torch.dump_history(file)
    return str(file)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    path.with_suffix(".txt").write_text(text_of(data), encoding="utf-8")


def text_of(data: dict[str, Any]) -> str:
    """Write a post-mortem for people."""
    asked = "memory" if data["asked"] is None else format_bytes(data["asked"])
    lines = [f"Step {data['step']} on {data['device']} asked for {asked} and there was no room.", data["error"], ""]
    if data["capacity"] is not None:
        lines.append(
            f"allocated {format_bytes(data['allocated'])}, reserved {format_bytes(data['reserved'])}, "
            f"free {format_bytes(data['free'])} of {format_bytes(data['capacity'])}"
        )
    lines += ["held by the model and its optimizers:", *_lines(data["held_now"]), ""]
    if data["by_layer"]:
        lines += [
            f"alive at the peak of {data['alive_of']} ({format_bytes(data['peak'])}), by cause:",
            *_lines(data["by_cause"]),
            "",
            "by layer:",
        ]
        for row in data["by_layer"][:_ROWS]:
            place = " ".join(part for part in (row["layer"], row["where"] and f"({row['where']})") if part)
            lines.append(f"  {format_bytes(row['bytes']):>10}  {LABELS.get(row['cause'], row['cause'])}  {place}")
        lines.append("")
    lines += [*_lever_lines(data["levers"]), f"to try it: {data['command']}"]
    lines.append("  (TARGET is path/to/file.py:callable, a callable that makes the model)")
    if data["snapshot"]:
        lines.append(f"torch's snapshot: {data['snapshot']} (memplan replay reads it)")
    return "\n".join(lines) + "\n"


def _lines(sizes: dict[str, int]) -> list[str]:
    return [f"  {format_bytes(size):>10}  {LABELS.get(cause, cause)}" for cause, size in sizes.items() if size]


def _lever_lines(levers: dict[str, Any] | None) -> list[str]:
    if levers is None:
        return ["levers were not looked for"]
    budget = format_bytes(levers["budget"])
    if levers["fits"] is None:
        return [f"levers are not known: {levers['why_not']}"]
    if not levers["fits"]:
        return [f"no plan fits {budget}; the smallest budget is {format_bytes(levers['smallest_budget'])}"]
    used = [f"{name} ({one['values']}, {format_bytes(one['bytes'])})" for name, one in levers["levers"].items()]
    return [f"in {budget} it fits with {', '.join(used) or 'no lever at all'}: {format_bytes(levers['peak'])} peak"]
