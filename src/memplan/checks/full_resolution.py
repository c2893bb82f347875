"""Check: most saved bytes belong to a long run of layers at full resolution; what a stride there would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch.nn.functional as F  # torch's own name for it
from torch import nn

from memplan._bytes import format_bytes
from memplan.checks.fields.tensor_fields import resolved, size_of
from memplan.checks.fields.walk import Followed, follow
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.changed_step import Change, ChangeError, module_at
from memplan.checks.mended.savings import peak_of, rows_of
from memplan.checks.op_names import base_name
from memplan.explanation.layers import tick_of_most_saved
from memplan.simulation.simulate import live_at
from memplan.trace.trace import Trace

ID = "full-resolution"
TITLE = "Most of what is saved is at full resolution"

_MIN_SHARE = 0.75
"""Smallest share of the saved bytes that the run of layers must have for a finding."""
_MIN_RUN = 6
"""Fewest convolutions in the run for a finding."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, as it runs an op at the input's resolution."""

    name: str
    where: str | None
    is_convolution: bool
    """Whether it has a kernel of more than one pixel."""
    shapes: frozenset[tuple[int, ...]]
    """Of the results."""


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding: a long run of layers works at the input's resolution and saves most bytes."""
    trace, followed = subject.trace, follow(subject.trace)
    run = _longest_run(trace, followed)
    convolutions = [layer for layer in run if layer.is_convolution]
    if len(convolutions) < _MIN_RUN:
        return []
    begin, end = (*trace.steps, trace.end)[:2]
    saved = [s for s in live_at(trace, tick_of_most_saved(trace, begin, end)) if s.cause == "saved"]
    shapes = {shape for layer in run for shape in layer.shapes}
    full_size = [s for s in saved if s.shape in shapes]
    total, full = sum(s.bytes for s in saved), sum(s.bytes for s in full_size)
    if not total or full < _MIN_SHARE * total:
        return []
    names = {layer.name for layer in run}
    of_run = [s for s in full_size if trace.ops[s.op or 0].layer in names]
    rows = rows_of(trace, of_run)
    return [_finding(subject, convolutions, rows, full, total)]


def _longest_run(trace: Trace, followed: Followed) -> list[_Layer]:
    """Return the run of forward ops at the input's resolution with the most convolutions, as layers."""
    best: list[_Layer] = []
    run: list[_Layer] = []
    for form in trace.forms:
        strides = _strides(followed, form.op)
        if not strides:
            continue
        op = trace.ops[form.op]
        if any(stride != 1 for stride in strides):
            best, run = max(best, run, key=_convolutions), []
            continue
        weight = form.read("weight")
        is_convolution = "convolution" in base_name(op.name) and weight is not None and max(weight.shape[2:]) > 1
        run.append(_Layer(op.layer, op.where, is_convolution, frozenset(view.shape for view in form.writes)))
    return max(best, run, key=_convolutions)


def _convolutions(run: Sequence[_Layer]) -> int:
    return sum(layer.is_convolution for layer in run)


def _strides(followed: Followed, op: int) -> list[Fraction]:
    """Return the strides of the spatial dimensions of an op's first result, in positions of the input; [] if it has
    none."""
    first_result = followed.results.get(op, ((),))[0]
    return [field.stride(size_of(dim)) for dim in first_result for field in resolved(dim)[:1] if field.is_spatial]


def _finding(subject: Subject, run: list[_Layer], rows: list[dict[str, Any]], full: int, total: int) -> Finding:
    """Return the finding, with the bytes that a recording of the model with a stride of 2 in the run saves. Of
    ``total`` saved bytes, ``full`` are at the input's resolution; ``rows`` has them by layer and line."""
    trace, first, last = subject.trace, run[0], run[-1]
    mended = subject.recorder.record(strided(first.name, last.name)) if subject.recorder is not None else None
    size = max(0, peak_of(trace) - peak_of(mended)) if isinstance(mended, Trace) else 0
    effect = f"save {format_bytes(size)} at the peak"
    if not isinstance(mended, Trace):
        why = mended.why if mended is not None else "that takes the model, not a recording of it"
        effect = f"save a part of that (how much is not known: {why})"
    message = (
        f"{len(run)} convolutions in a row, {first.name} to {last.name}, work at the input's own resolution and save "
        f"{100 * full / total:.0f} % of all that is saved ({format_bytes(full)})"
    )
    advice = (
        f"A stride of 2 in {first.name}, and upsampling before {last.name}, would {effect}: it keeps the field of "
        "view, which cropping or leaving out padding do not, but it is another model",
        "Or keep the model as it is and let memplan.fit recompute: the result stays the same",
    )
    details = {"saved": full, "share": full / total, "known": isinstance(mended, Trace), "layers": rows}
    return Finding(ID, "info", first.name, first.where, size, message, advice, details)


def strided(first: str, last: str) -> Change:
    """Return a change that doubles the stride of convolution ``first`` and upsamples by 2 before layer ``last``."""

    def change(modules: dict[str, nn.Module]) -> None:
        begin, end = module_at(modules, first), module_at(modules, last)
        if not isinstance(begin, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            raise ChangeError(f"{first} is no convolution")
        if begin is end:
            raise ChangeError(f"{first} and {last} are the same layer")
        begin.stride = tuple(2 * step for step in begin.stride)
        end.register_forward_pre_hook(lambda _, inputs: (F.interpolate(inputs[0], scale_factor=2.0), *inputs[1:]))

    return change
