"""What the missing padding saves, and what it would take instead: recorded wherever that is possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from torch import nn

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.checks.borders.border_fix import Padding, padded, same_padding
from memplan.checks.borders.mirror import Mirror, Mirrored, mirrored
from memplan.checks.fields.rules import kernel_of
from memplan.checks.fields.walk import Followed, Output, follow
from memplan.checks.finding import Subject, number
from memplan.checks.mended.changed_step import ChangeError, NotRecorded, Remaker
from memplan.checks.mended.savings import peak_of
from memplan.checks.op_names import base_name
from memplan.checks.rerun.aligned import changed
from memplan.planning.plan.plan import Plan
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes at the peak that it takes to keep the border."""

    sentence: str
    """Bytes that padding inside of the model takes, or why they are unknown, in words."""
    saved: int | None = None
    """Bytes less at the peak without the padding; None where they are not known."""
    mirrored: int | None = None
    """The peak with the input mirror-padded once."""
    details: Mapping[str, Any] = field(default_factory=dict)


def costs(subject: Subject, output: Output, followed: Followed, layers: Sequence[str]) -> Costs:
    """Return the cost of keeping the border that these layers lose.

    The model is padded and its step recorded. Where there is only the step, or a model that does not run with padding,
    the ops of the step are run again with padding: that gives the bytes just as exactly, but no plan.
    """
    remaker = subject.remaker
    if remaker is None:
        return _worked_out(subject.trace, layers, None)
    found = _recorded(subject.trace, remaker, layers)
    if isinstance(found, NotRecorded):
        found = _worked_out(subject.trace, layers, found)
    mirror = mirrored(subject.trace, output, followed)
    return found if mirror is None else _with_mirror(found, remaker, mirror)


def _with_mirror(found: Costs, remaker: Remaker, mirror: Mirror) -> Costs:
    """Add the cost of mirror-padding the input, recorded on a model that is wrapped so."""
    wrapped: list[Mirrored] = []

    def wrap(model: nn.Module) -> nn.Module:
        wrapped[:] = [Mirrored(model, mirror)]
        return wrapped[0]

    trace = remaker.record(wrap=wrap)
    peak = None if isinstance(trace, NotRecorded) else peak_of(trace)
    if isinstance(trace, NotRecorded):  # a loss whose targets have the size of the smaller output: model alone, then
        trace = remaker.record(wrap=wrap, options=replace(remaker.options, loss=None, targets=()))
    if isinstance(trace, NotRecorded) or not wrapped:
        return found
    whole = [output for output in trace.returned if output.tensors][-1:]
    first = next((number for number, crop in enumerate(mirror.crops) if crop is not None), 0)
    sizes = [list(view.shape[-len(mirror.pads) :]) for one in whole for view in one.tensors]
    details = {
        **found.details, "mirror_pad": [list(pair) for pair in mirror.pads], "mirrored_peak": peak,
        "mirror_crops": [crop and [list(pair) for pair in crop] for crop in mirror.crops],
        "mirror_reflects": mirror.reflects, "mirrored_output": sizes[first] if sizes else None,
        "mirror_returns": wrapped[0].kind, "mirror_names": list(wrapped[0].names),
        "mirror_given": list(wrapped[0].padded),
    }  # fmt: skip
    return replace(found, mirrored=peak, details=details)


def _recorded(trace: Trace, remaker: Remaker, layers: Sequence[str]) -> Costs | NotRecorded:
    """Record the padded model, and return its cost."""
    padding = Padding()
    change = padded(layers, padding)
    mended = remaker.record(change)
    before, alone_said = peak_of(trace), ""
    left = [layer for layer in layers if layer not in padding.changes and _has_kernel(trace, layer)]
    if left:
        return NotRecorded(f"{left[0] or 'the step'} calls a function, and no module has the padding")
    if isinstance(mended, NotRecorded):  # a loss whose targets have the size of the smaller output: model alone, then
        bare = replace(remaker.options, loss=None, targets=())
        plain, alone = remaker.record(options=bare), remaker.record(change, options=bare)
        if isinstance(plain, NotRecorded) or isinstance(alone, NotRecorded):
            return mended
        before, mended, alone_said = peak_of(plain), alone, " (without the loss, whose targets have the smaller size)"
    after = peak_of(mended)
    details: dict[str, Any] = {"peak": before, "padded_peak": after, "padding": padding.changes}
    whole = [o for o in follow(mended).outputs if o.spatial][:1]
    if whole:
        details["padded_output"] = [size for size, _ in whole[0].spatial]
        details["padded_lost"] = [[number(max(Fraction(0), s)) for s in f.lost(size)] for size, f in whole[0].spatial]
    text, planned = _more(before, after) + alone_said, remaker.planned(change, before) if after > before else None
    if isinstance(planned, Plan):
        share = f" ({100 * planned.seconds / planned.step_seconds:.1f} % of the step)" if planned.step_seconds else ""
        text += f", or none with a plan that adds an estimated {format_seconds(planned.seconds)}{share}, bit for bit "
        text += "the same result"
        details["plan_seconds"], details["plan_peak"] = planned.seconds, planned.peak
    elif planned is not None and planned < after:
        text += f", of which an exact plan takes back {format_bytes(after - planned)}: {format_bytes(planned)} is the "
        text += "least that the padded step can be planned for"
        details["plan_smallest_budget"] = planned
    return Costs(text, after - before, details=details)


def _has_kernel(trace: Trace, layer: str) -> bool:
    """Return whether a layer itself runs a convolution or a pool."""
    ops = trace.ops
    return any(ops[f.op].layer == layer and kernel_of(base_name(ops[f.op].name), f) is not None for f in trace.forms)


def _more(before: int, after: int) -> str:
    return f"{format_bytes(after - before)} more at the peak" if after > before else "no byte more at the peak"


def _worked_out(trace: Trace, layers: Sequence[str], unmended: NotRecorded | None) -> Costs:
    """Run the ops of the step again with padding, and return its cost."""
    try:
        found = changed(trace, _paddings(trace, layers))
    except ChangeError as error:
        found = NotRecorded.by(error)
    if isinstance(found, NotRecorded):
        why = found.why if unmended is None else f"padded, {unmended.why}"
        return Costs(f"how much it takes is not known: {why}", details={"unknown": why})
    before, after = peak_of(trace), peak_of(found)
    details: dict[str, Any] = {"peak": before, "padded_peak": after}
    if unmended is not None:
        details["not_padded"] = unmended.why
    return Costs(_more(before, after), after - before, details=details)


def _paddings(trace: Trace, layers: Sequence[str]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the padding that the ops of layers would need, by the op.

    Raises:
        ChangeError: there is none, or one side would need more than the other.
    """
    wanted: dict[int, dict[str, tuple[int, ...]]] = {}
    for form in trace.forms:
        op = trace.ops[form.op]
        window = kernel_of(base_name(op.name), form)
        if window is None or op.layer not in layers:
            continue
        kernel, stride, _, dilation = window
        if any((k - 1) * d % 2 and s == 1 for k, s, d in zip(kernel, stride, dilation, strict=True)):
            raise ChangeError(f"{op.layer} has a kernel of even size, which needs more padding on one side")
        amounts = tuple(map(same_padding, kernel, stride, dilation))
        pool = form.read("weight") is None
        wanted[op.index] = {"padding": tuple(map(min, amounts, (k // 2 for k in kernel))) if pool else amounts}
    if not wanted:
        raise ChangeError("no convolution and no pool among the layers")
    return wanted
