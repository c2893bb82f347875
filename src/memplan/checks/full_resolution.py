"""Full resolution for too long: where most saved bytes sit, and what an explicit stride there would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # torch's own name for it
from torch import nn

from memplan._bytes import format_bytes
from memplan.checks.fields.tensor_fields import resolved, size_of
from memplan.checks.fields.walk import Followed, follow
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.changed_step import Change, ChangeError, module_at
from memplan.checks.mended.savings import peak_of
from memplan.checks.op_names import base_name
from memplan.explanation.layers import fullest
from memplan.simulation.simulate import live_at
from memplan.trace.trace import Trace

ID = "full-resolution"
TITLE = "Most of what is saved is at full resolution"

_SHARE = 0.75
_RUN = 6
"""Layers with a kernel that follow each other at full resolution before it is worth a word."""


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    where: str | None
    kernel: bool
    shapes: frozenset[tuple[int, ...]]


def find(subject: Subject) -> list[Finding]:
    """Return a note where a long run of layers works at the input's own resolution, and most saved bytes are theirs."""
    trace, followed = subject.trace, follow(subject.trace)
    run = _longest_run(trace, followed)
    kernels = [layer for layer in run if layer.kernel]
    if len(kernels) < _RUN:
        return []
    begin, end = (*trace.steps, trace.end)[:2]
    saved = [s for s in live_at(trace, fullest(trace, begin, end)) if s.cause == "saved"]
    shapes = {shape for layer in run for shape in layer.shapes}
    here = [s for s in saved if s.shape in shapes]
    total, full = sum(s.bytes for s in saved), sum(s.bytes for s in here)
    if not total or full < _SHARE * total:
        return []
    names = {layer.name for layer in run}
    rows: dict[tuple[str, str | None], int] = {}
    for storage in here:
        op = trace.ops[storage.op or 0]
        if op.layer in names:
            rows[op.layer, op.where] = rows.get((op.layer, op.where), 0) + storage.bytes
    return [_finding(subject, kernels, sorted(rows.items(), key=lambda item: -item[1]), full, total)]


def _longest_run(trace: Trace, followed: Followed) -> list[_Layer]:
    """Return the longest stretch of forward ops whose results are at the input's resolution, as layers."""
    best: list[_Layer] = []
    run: list[_Layer] = []
    for form in trace.forms:
        strides = _strides(followed, form.op)
        if not strides:
            continue
        op = trace.ops[form.op]
        if any(stride != 1 for stride in strides):
            best, run = max(best, run, key=_kernels), []
            continue
        weight = form.read("weight")
        kernel = "convolution" in base_name(op.name) and weight is not None and max(weight.shape[2:]) > 1
        run.append(_Layer(op.layer, op.where, kernel, frozenset(view.shape for view in form.writes)))
    return max(best, run, key=_kernels)


def _kernels(run: Sequence[_Layer]) -> int:
    return sum(layer.kernel for layer in run)


def _strides(followed: Followed, op: int) -> list[Any]:
    """Return the strides of the spatial dimensions of an op's first result; none where it has none."""
    results = followed.results.get(op, ())
    if not results:
        return []
    found = [(size_of(dim), field) for dim in results[0] for field in resolved(dim)[:1] if field.windowed]
    return [field.stride(size) for size, field in found]


def _finding(
    subject: Subject, run: list[_Layer], rows: list[tuple[tuple[str, str | None], int]], full: int, total: int
) -> Finding:
    trace, first, last = subject.trace, run[0], run[-1]
    mended = subject.remaker.record(strided(first.name, last.name)) if subject.remaker is not None else None
    size = max(0, peak_of(trace) - peak_of(mended)) if isinstance(mended, Trace) else 0
    would = f"save {format_bytes(size)} at the peak"
    if not isinstance(mended, Trace):
        why = mended.why if mended is not None else "that takes the model, not a recording of it"
        would = f"save a part of that (how much is not known: {why})"
    message = (
        f"{len(run)} convolutions in a row, {first.name} to {last.name}, work at the input's own resolution and save "
        f"{100 * full / total:.0f} % of all that is saved ({format_bytes(full)})"
    )
    advice = (
        f"A stride of 2 in {first.name}, and upsampling before {last.name}, would {would}: it keeps the field of "
        "view, which cropping or leaving out padding do not, but it is another model",
        "Or keep the model as it is and let memplan.fit recompute: the result stays the same",
    )
    details = {
        "saved": full, "share": full / total, "known": isinstance(mended, Trace),
        "layers": [{"layer": layer, "where": where, "bytes": bytes_} for (layer, where), bytes_ in rows],
    }  # fmt: skip
    return Finding(ID, "info", first.name, first.where, size, message, advice, details)


def strided(first: str, last: str) -> Change:
    """Return a change that halves the resolution from one convolution on, and doubles it again before another."""

    def change(modules: dict[str, nn.Module]) -> None:
        begin, end = module_at(modules, first), module_at(modules, last)
        if not isinstance(begin, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or begin is end:
            raise ChangeError(f"{first} is no convolution")
        begin.stride = tuple(2 * step for step in begin.stride)
        end.register_forward_pre_hook(_doubled)

    return change


def _doubled(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (F.interpolate(inputs[0], scale_factor=2.0), *inputs[1:])
