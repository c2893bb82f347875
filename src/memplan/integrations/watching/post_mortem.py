"""The out-of-memory report: the failed request, what was live, and the levers with which the step would fit."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes, parse_bytes
from memplan.errors import UnitError
from memplan.explanation.model import LABELS, OwnerRow
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
"""Greatest number of layers in the text; the JSON file has all."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether one of torch's allocators raised an error for lack of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _ON_HOST.search(str(error)) is not None
    )


def requested_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed request, as precisely as the message has them; None: not in the message."""
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
    prediction: Prediction | None,
    *,
    is_failed_step: bool,
    device: torch.device,
    folder: str | os.PathLike[str],
    inputs: LastInputs | None,
    ranks: tuple[int, int] = (0, 1),
) -> Path:
    """Write a report of a step that ran out of memory, as JSON and as text of the same name.

    This allocates nothing on the card. Both files are written first without levers, as the search for a plan is slow.
    ``is_failed_step``: whether the failed step is among those of the prediction, so that it is about it.

    Returns:
        The path of the JSON file.

    Raises:
        OSError: the folder cannot be written to.
    """
    resident = _resident_bytes(subject)
    memory = _available_memory(device, sum(resident.values()))
    data: dict[str, Any] = {
        "format": "memplan.post_mortem",
        "schema": SCHEMA,
        "error": f"{type(error).__name__}: {error}",
        "step": step,
        "rank": ranks[0],
        "world": ranks[1],
        "asked": requested_bytes(error),
        "device": str(device) if subject.card is None else subject.card.name,
        "torch": torch.__version__,
        **memory,
        "held_now": resident,
        **_live_at_peak(prediction, "the failed step" if is_failed_step else "the step observed last"),
        "levers": None,
        "command": _fit_command(subject, inputs, memory["budget"]),
        "snapshot": None,
    }
    path = _new_file(Path(folder), f"rank{ranks[0]}-" if ranks[1] > 1 else "")
    if device.type == "cuda" and _torch.history():
        snapshot = path.with_suffix(".pickle")
        _torch.dump_history(snapshot)
        data["snapshot"] = str(snapshot)
    _write(path, data)
    if inputs is not None:
        predicted = None if is_failed_step else failed_step(subject, inputs)
        if predicted is not None:
            data |= _live_at_peak(predicted, "the failed step, as predicted for its inputs without its loss")
        if memory["budget"]:
            data["levers"] = levers_for(subject, inputs, memory["budget"])
        _write(path, data)
    return path


def _live_at_peak(prediction: Prediction | None, step: str) -> dict[str, Any]:
    """Return the report's part on what is live at the peak, by cause and by layer. ``step`` names the step in words."""
    rows = () if prediction is None else prediction.owners()
    return {
        "alive_of": None if prediction is None else step,
        "peak": None if prediction is None else prediction.peak,
        "by_cause": _sum_by_key((row.cause, row.bytes) for row in rows),
        "by_layer": _by_layer(rows),
    }


def _available_memory(device: torch.device, resident: int) -> dict[str, Any]:
    """Return the report's part on memory, in bytes: the allocator's, the device's, and ``budget``, available to a
    step. ``resident``: bytes of the model and its optimizers, which on the CPU count as available in addition to
    free memory."""
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
        "budget": None if free is None else free + resident,
    }  # fmt: skip


def _resident_bytes(subject: Subject) -> dict[str, int]:
    """Return the bytes of the model and its optimizers by cause, each storage counted once."""
    seen, sizes = set[int](), dict[str, int]()
    for cause, tensor in subject.by_cause():
        if tensor.layout == torch.strided and _torch.has_shape(tensor):
            storage = tensor.untyped_storage()
            key = _torch.storage_key(storage)
            sizes[cause] = sizes.get(cause, 0) + (0 if key in seen else storage.nbytes())
            seen.add(key)
    return sizes


def _sum_by_key(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of the numbers of each key, the largest first."""
    sums: dict[str, int] = defaultdict(int)
    for key, size in pairs:
        sums[key] += size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _by_layer(rows: tuple[OwnerRow, ...]) -> list[dict[str, Any]]:
    """Return the bytes by layer, line and cause, the largest first."""
    sizes: dict[tuple[str, str | None, str], int] = defaultdict(int)
    for row in rows:
        sizes[row.layer, row.where, row.cause] += row.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return [{"layer": layer, "where": where, "cause": cause, "bytes": size} for (layer, where, cause), size in largest]


def _fit_command(subject: Subject, inputs: LastInputs | None, budget: int | None) -> str:
    """Return the command that plans the model for a budget in bytes, with the inputs that options can describe."""
    parts = ["memplan fit TARGET", *([] if inputs is None else inputs.texts())]
    if subject.optimizers:
        parts.append(f"--optimizer {type(subject.optimizers[0]).__name__.lower()}")
    parts.append(f"--budget {budget if budget else 'BYTES'}")
    return " ".join(parts)


def _new_file(folder: Path, rank: str) -> Path:
    """Create an empty JSON file with an unused name in the folder and return its path; ``rank`` is part of the name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / f"memplan-oom-{rank}{os.getpid()}-{number}.json"
        if path.with_suffix(".txt").exists() or path.with_suffix(".pickle").exists():
            continue
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return path
    raise AssertionError


def _write(path: Path, data: dict[str, Any]) -> None:
    """Write a post-mortem as JSON, and as text to a file of the same name."""
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    path.with_suffix(".txt").write_text(text_of(data), encoding="utf-8")


def text_of(data: dict[str, Any]) -> str:
    """Return a post-mortem as text."""
    request = "memory" if data["asked"] is None else format_bytes(data["asked"])
    who = f" of rank {data['rank']}" if data["world"] > 1 else ""
    lines = [
        f"Step {data['step']}{who} on {data['device']} asked for {request} and there was no room.",
        data["error"],
        "",
    ]
    if data["capacity"] is not None:
        lines.append(
            f"allocated {format_bytes(data['allocated'])}, reserved {format_bytes(data['reserved'])}, "
            f"free {format_bytes(data['free'])} of {format_bytes(data['capacity'])}"
        )
    lines += ["held by the model and its optimizers:", *_size_lines(data["held_now"]), ""]
    if data["by_layer"]:
        lines += [
            f"alive at the peak of {data['alive_of']} ({format_bytes(data['peak'])}), by cause:",
            *_size_lines(data["by_cause"]),
            "",
            "by layer:",
        ]
        for row in data["by_layer"][:_ROWS]:
            owner = " ".join(part for part in (row["layer"], row["where"] and f"({row['where']})") if part)
            lines.append(f"  {format_bytes(row['bytes']):>10}  {LABELS.get(row['cause'], row['cause'])}  {owner}")
        lines.append("")
    lines += [*_lever_lines(data["levers"]), f"to try it: {data['command']}"]
    lines.append("  (TARGET is path/to/file.py:callable, a callable that makes the model)")
    if data["snapshot"]:
        lines.append(f"torch's snapshot: {data['snapshot']} (memplan replay reads it)")
    return "\n".join(lines) + "\n"


def _size_lines(sizes: dict[str, int]) -> list[str]:
    """Return a line of text for each cause with its bytes."""
    return [f"  {format_bytes(size):>10}  {LABELS.get(cause, cause)}" for cause, size in sizes.items() if size]


def _lever_lines(levers: dict[str, Any] | None) -> list[str]:
    """Return the text about a plan; ``levers`` is the result of `levers_for`, None if it was not computed."""
    if levers is None:
        return ["levers were not looked for"]
    budget = format_bytes(levers["budget"])
    if levers["fits"] is None:
        return [f"levers are not known: {levers['why_not']}"]
    if not levers["fits"]:
        return [f"no plan fits {budget}; the smallest budget is {format_bytes(levers['smallest_budget'])}"]
    used = [f"{name} ({lever['values']}, {format_bytes(lever['bytes'])})" for name, lever in levers["levers"].items()]
    return [f"in {budget} it fits with {', '.join(used) or 'no lever at all'}: {format_bytes(levers['peak'])} peak"]
