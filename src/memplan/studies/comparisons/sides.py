"""Sides of a comparison: from a Trace, an Explanation, a Plan, a point of a Sweep, or a file of these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memplan import _json
from memplan._json import Unreadable
from memplan._text import whole_number
from memplan.errors import InputError, TargetError
from memplan.explanation.explain import explain_trace
from memplan.explanation.layers import OUTSIDE
from memplan.explanation.model import Explanation, LayerRow
from memplan.planning.plan.plan import Plan
from memplan.simulation.simulate import live_at
from memplan.studies.axes.ranges import parts_of
from memplan.studies.comparisons.comparison import CAST_COPIES, STEP, Decided, LayerPart, Side
from memplan.studies.comparisons.pruned_weights import masks_of
from memplan.studies.step_time import rates_for, step_time
from memplan.studies.sweeps.points import KNOWN
from memplan.studies.sweeps.sweep import Point, Sweep
from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.records import Storage
from memplan.trace.trace import Trace, at_least

_CAST = "aten._to_copy.default"
KINDS = (
    "a module, a callable that makes one, a build, a Trace, an Explanation, a Plan, a point of a Sweep, or the file of "
    "one of these"
)


def side_of(what: Any, title: str, *, settings: str | None = None) -> Side:
    """Return one side of a comparison.

    Raises:
        InputError: the file has none of these, or ``settings`` with anything but a Trace.
        TargetError: the file cannot be read, or ``what`` is of another type.
    """
    if isinstance(what, (str, os.PathLike)):
        what = read(what)
    if isinstance(what, Sweep):
        what = what.point()
    if isinstance(what, Trace):
        return of_trace(what, title, settings=settings)
    if settings is not None:
        raise InputError(
            f"{title} and settings of an allocator", expected="these only where a step is recorded", do="Leave them out"
        )
    if isinstance(what, Explanation):
        return of_explanation(what, title)
    if isinstance(what, Plan):
        return of_plan(what, title)
    if isinstance(what, Point):
        return of_point(what, title)
    raise TargetError(f"{title} is of type {type(what).__name__}", expected=KINDS, do="Name one of these")


def is_saved(what: Any) -> bool:
    """Return whether this is a path or an already recorded, explained, planned or swept step."""
    return isinstance(what, (Trace, Explanation, Plan, Point, Sweep, str, os.PathLike))


def split_point(name: str) -> tuple[str, str]:
    """Split ``sweep.json#3`` or ``sweep.json#batch=8`` into the path and the point, which is "" without a ``#``."""
    path, sharp, point = name.rpartition("#")
    return (path, point) if sharp and not os.path.exists(name) else (name, "")


def read(name: str | os.PathLike[str]) -> Any:
    """Read a file: a Trace, a Plan, a Sweep or one point of it, or an Explanation.

    Args:
        name: the path, with the point after a ``#``.

    Raises:
        TargetError: there is no such file.
        InputError: it has another format, or no such point.
        FormatError: it is damaged, or of another schema version.
    """
    text, point = split_point(os.fspath(name))
    path = Path(text)
    saved = _read_result(path)
    if isinstance(saved, Sweep):
        return _find_point(saved, point)
    if point:
        raise InputError(
            f"{path} holds no sweep, and #{point} names a point of one", expected="the path alone", do="Leave it out"
        )
    return saved


def _find_point(sweep: Sweep, query: str) -> Point:
    """Return the point of ``query``: its number, from 1 on, or values of axes as in ``batch=8,precision=bf16``."""
    if not query:
        return sweep.point()
    if (number := whole_number(query)) is not None:
        return sweep.point(number)
    values = {}
    for pair in parts_of(query, "a point"):
        name, equals, value = pair.rpartition("=")
        if not equals:
            raise InputError(f"the point {pair!r}", expected="its number, or batch=8,precision=bf16", do="Write it so")
        values[name.strip()] = value.strip()
    return sweep.point(**values)


def _read_result(path: Path) -> Any:
    """Return the Trace, Sweep, Plan or Explanation in a file; of a saved fit, its plan."""
    try:
        text = _json.read_text(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path, or unreadable
        reason = getattr(error, "strerror", None) or error
        raise TargetError(f"{path} cannot be read ({reason})", expected=KINDS, do="Check the path") from error
    try:
        data = _json.parse(text)
    except Unreadable as error:
        raise InputError(f"{path}: {error}", expected=_FILES, do="Name such a file") from None
    kind = data.get("format") if isinstance(data, Mapping) else None
    for result in (Trace, Sweep, Plan, Explanation):
        if kind == result.FORMAT:
            return result.from_dict(data, str(path))
    if kind == "memplan.fit" and data.get("plan") is None:
        raise InputError(
            f"{path} holds no plan: the step did not fit", expected=_FILES, do="Fit it into more, or name another file"
        )
    if kind == "memplan.fit":
        return Plan.from_dict(data["plan"], str(path))
    raise InputError(f"{path} holds something else", expected=_FILES, do="Name such a file")


_FILES = "what explain --json or --trace, fit --json or --plan, or sweep --json wrote"


def of_trace(trace: Trace, title: str, *, train: bool | None = None, settings: str | None = None) -> Side:
    """Return the side of a recorded or measured step, with its roofline time if the device's rates are known.

    ``train``: whether the step trains; None to infer it from the ops.
    """
    explanation = explain_trace(trace, title=title, train=train, settings=settings)
    low = at_least(trace)
    weights = [storage for storage in low.counted if storage.cause == "weight"]
    peak = explanation.timeline.peak_tick
    copies = cast_copies(low)
    by_cause = dict(explanation.by_cause)
    for storage in live_at(low, peak):  # these copies become a cause of their own
        if storage.id in copies:
            by_cause[storage.cause] -= storage.bytes
            by_cause[CAST_COPIES] = by_cause.get(CAST_COPIES, 0) + storage.bytes
    rates, rates_title = rates_for(trace.device) or (None, "")
    time = None if rates is None else step_time(trace, rates)
    activations = {s.id for s in low.counted if s.cause in ("saved", "activation")} - copies
    return Side(
        title, trace.origin, trace.device, explanation.train, peak=explanation.timeline.peak_allocated,
        reserved=explanation.timeline.peak_reserved, by_cause=by_cause, layers=_layer_parts(explanation.layers),
        saved_bytes=explanation.saved_bytes, weight_bytes=sum(storage.bytes for storage in weights),
        cast_bytes=_peak_of(low, copies), activation_bytes=_peak_of(low, activations),
        parameters=sum(map(_elements, weights)), outputs=outputs_of(trace),
        seconds=None if time is None else time.seconds, seconds_by="" if time is None else rates_title,
        zeros=masks_of(trace), notes=tuple(trace.notes),
    )  # fmt: skip


def cast_copies(trace: Trace) -> set[int]:
    """Return the numbers of the storages with a copy of a weight in another dtype, as autocast makes them."""
    copies: set[int] = set()
    for storage in trace.counted:
        op = trace.ops[storage.op] if storage.op is not None else None
        if op is None or op.name != _CAST or len(op.reads) != 1:
            continue
        source = trace.storages[op.reads[0].storage]
        if source.cause == "weight" and source.dtype != storage.dtype and storage.cause != "temporary":
            copies.add(storage.id)
    return copies


def _peak_of(trace: Trace, storages: set[int]) -> int:
    return peak_live_bytes(storage for storage in trace.counted if storage.id in storages)


def outputs_of(trace: Trace) -> tuple[str, ...] | None:
    """Return shape and dtype of each output of the model, as in ``8x10 float32``; None if no module was called."""
    tensors = next((returned.tensors for returned in trace.returned if returned.tensors), None)
    if tensors is None:
        return None
    texts: list[str] = []
    for view in tensors:
        dtype = f" {trace.storages[view.storage].dtype}" if view.storage >= 0 else ""  # -1: it was not recorded
        texts.append(("x".join(map(str, view.shape)) or "scalar") + dtype)
    return tuple(texts)


def _elements(storage: Storage) -> int:
    dtype = getattr(torch, storage.dtype, None)
    return storage.bytes // (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)


def _layer_parts(rows: tuple[LayerRow, ...]) -> tuple[LayerPart, ...]:
    return tuple(LayerPart(row.name, row.kind, row.output_bytes, row.saved_bytes, row.weight_bytes) for row in rows)


def of_explanation(explanation: Explanation, title: str) -> Side:
    """Return the side of an explained step."""
    timeline = explanation.timeline
    return Side(
        title, "explained", explanation.device, explanation.train, timeline.peak_allocated, timeline.peak_reserved,
        dict(explanation.by_cause), _layer_parts(explanation.layers), explanation.saved_bytes,
        explanation.by_cause_most.get("weight"),
    )  # fmt: skip


def of_point(point: Point, title: str) -> Side:
    """Return the side of a point of a sweep. It has no layers."""
    row = point.row
    causes = {cause: row[cause] for cause in (*KNOWN, "rounding")} | {"workspace": row["workspace_low"]}
    title = title if title == point.title else f"{title}: {point.place}"
    return Side(
        title, "swept", point.device, train=None, peak=row["peak"], reserved=row["reserved"], by_cause=causes, layers=()
    )


def of_plan(plan: Plan, title: str) -> Side:
    """Return the side of a planned step: resident bytes by cause, and as `STEP` what the step adds at its peak."""
    saved: dict[str, int] = {}
    values = [decision for decision in plan.decisions if decision.scope.kind == "value"]
    for decision in values:
        size = decision.bytes if decision.lever == "keep" else int(decision.details.get("encoded_bytes", 0))
        layer = decision.layer or OUTSIDE
        saved[layer] = saved.get(layer, 0) + size
    decided = tuple(Decided(str(decision.scope), decision.layer, decision.lever, decision.bytes) for decision in values)
    resident = {cause: size for cause, size in plan.resident.items() if size}
    layers = tuple(
        LayerPart(name, kind="", output_bytes=0, saved_bytes=size, weight_bytes=0) for name, size in saved.items()
    )
    return Side(
        title, "planned", plan.device, train=True, peak=plan.peak, reserved=plan.predicted.peak_reserved,
        by_cause=resident | {STEP: plan.peak - sum(resident.values())}, layers=layers,
        saved_bytes=sum(saved.values()), weight_bytes=plan.resident.get("weight"),
        seconds=plan.total_seconds, seconds_by="as the plan has it", decided=decided, notes=plan.notes,
    )  # fmt: skip
