"""What padding that keeps the border costs in memory, recorded where possible, else computed from the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from torch import nn

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.checks.borders.border_fix import Padding, needs_uneven_padding, padded, same_padding
from memplan.checks.borders.mirror import Mirror, Mirrored, mirrored
from memplan.checks.fields.rules import kernel_of
from memplan.checks.fields.walk import Followed, Output, follow
from memplan.checks.finding import Subject, number
from memplan.checks.mended.changed_step import Change, ChangeError, NotRecorded, StepRecorder
from memplan.checks.mended.savings import peak_of
from memplan.checks.op_names import base_name
from memplan.checks.rerun.aligned import replayed_with
from memplan.planning.plan.plan import Plan
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Costs:
    """What it costs at the peak to keep the border."""

    sentence: str
    """Bytes that padding inside of the model takes, or why they are unknown, in words."""
    saved: int | None = None
    """Bytes that the missing padding saves at the peak; None where they are not known."""
    mirrored: int | None = None
    """Bytes of the peak with the input mirror-padded; None where that was not recorded."""
    details: Mapping[str, Any] = field(default_factory=dict)


def costs(subject: Subject, output: Output, followed: Followed, layers: Sequence[str]) -> Costs:
    """Return the cost of keeping the border that these layers lose.

    The model is padded and its step recorded. If there is no model, or it does not run with padding, the ops of the
    trace are replayed with padding, which gives the same bytes, but no plan.

    Args:
        output: loses the border; mirror-padding the input, so that this output covers it whole, is the alternative.
        followed: receptive fields of the step's tensors.
        layers: their names.
    """
    recorder = subject.recorder
    if recorder is None:  # no model that a mirror-padded input could be recorded with
        return _costs_by_replay(subject.trace, layers, failure=None)
    cost = _costs_by_recording(subject.trace, recorder, layers)
    if isinstance(cost, NotRecorded):
        cost = _costs_by_replay(subject.trace, layers, cost)
    mirror = mirrored(subject.trace, output, followed)
    return cost if mirror is None else _with_mirror(cost, recorder, mirror)


def _without_loss(recorder: StepRecorder) -> StepOptions:
    """Return the options of the step without its loss, whose targets do not fit a padded model's larger output."""
    return replace(recorder.options, loss=None, targets=())


def _with_mirror(cost: Costs, recorder: StepRecorder, mirror: Mirror) -> Costs:
    """Add the peak with a mirror-padded input, from a recording of the wrapped model."""
    wrapped: list[Mirrored] = []

    def wrap(model: nn.Module) -> nn.Module:
        wrapped[:] = [Mirrored(model, mirror)]
        return wrapped[0]

    trace = recorder.record(wrap=wrap)
    peak = None if isinstance(trace, NotRecorded) else peak_of(trace)
    if isinstance(trace, NotRecorded):
        trace = recorder.record(wrap=wrap, options=_without_loss(recorder))
    if isinstance(trace, NotRecorded) or not wrapped:
        return cost
    output_shape = None
    returned = [call.tensors for call in trace.returned if call.tensors]
    if returned:
        first_cropped = next((index for index, crop in enumerate(mirror.crops) if crop is not None), 0)
        output_shape = list(returned[-1][first_cropped].shape[-len(mirror.pads) :])
    details = {
        **cost.details, "mirror_pad": [list(pair) for pair in mirror.pads], "mirrored_peak": peak,
        "mirror_crops": [crop and [list(pair) for pair in crop] for crop in mirror.crops],
        "mirror_reflects": mirror.reflects, "mirrored_output": output_shape,
        "mirror_returns": wrapped[0].kind, "mirror_names": list(wrapped[0].names),
        "mirror_given": list(wrapped[0].padded),
    }  # fmt: skip
    return replace(cost, mirrored=peak, details=details)


def _costs_by_recording(trace: Trace, recorder: StepRecorder, layers: Sequence[str]) -> Costs | NotRecorded:
    """Return the cost from a recording of the padded model, or why it cannot be recorded."""
    padding = Padding()
    change = padded(layers, padding)
    mended = recorder.record(change)
    before, remark = peak_of(trace), ""
    unpadded = [layer for layer in layers if layer not in padding.changes and _has_kernel(trace, layer)]
    if unpadded:
        return NotRecorded(f"{unpadded[0] or 'the step'} calls a function, and no module has the padding")
    if isinstance(mended, NotRecorded):
        options = _without_loss(recorder)
        lossless, padded_lossless = recorder.record(options=options), recorder.record(change, options=options)
        if isinstance(lossless, NotRecorded) or isinstance(padded_lossless, NotRecorded):
            return mended
        before, mended = peak_of(lossless), padded_lossless
        remark = " (without the loss, whose targets have the smaller size)"
    after = peak_of(mended)
    details: dict[str, Any] = {"peak": before, "padded_peak": after, "padding": padding.changes}
    output = next((output for output in follow(mended).outputs if output.spatial), None)
    if output is not None:
        details["padded_output"] = [size for size, _ in output.spatial]
        details["padded_lost"] = [[number(max(Fraction(0), s)) for s in f.lost(size)] for size, f in output.spatial]
    text, plan_details = _plan_within(recorder, change, before, after)
    return Costs(_more(before, after) + remark + text, after - before, details=details | plan_details)


def _plan_within(recorder: StepRecorder, change: Change, budget: int, peak: int) -> tuple[str, dict[str, Any]]:
    """Return what an exact plan of the changed step within a budget costs, as the end of a sentence and as details.
    ``peak`` is that of the changed step without a plan. Empty if it is within the budget, or if no plan lowers it."""
    planned = recorder.planned(change, budget) if peak > budget else None
    if isinstance(planned, Plan):
        share = f" ({100 * planned.seconds / planned.step_seconds:.1f} % of the step)" if planned.step_seconds else ""
        text = (
            f", or none with a plan that adds an estimated {format_seconds(planned.seconds)}{share}, bit for bit "
            "the same result"
        )
        return text, {"plan_seconds": planned.seconds, "plan_peak": planned.peak}
    if planned is not None and planned < peak:
        text = (
            f", of which an exact plan takes back {format_bytes(peak - planned)}: {format_bytes(planned)} is the "
            "least that the padded step can be planned for"
        )
        return text, {"plan_smallest_budget": planned}
    return "", {}


def _has_kernel(trace: Trace, layer: str) -> bool:
    """Return whether a layer itself runs a convolution or a pool."""
    forms = [form for form in trace.forms if trace.ops[form.op].layer == layer]
    return any(kernel_of(base_name(trace.ops[form.op].name), form) is not None for form in forms)


def _more(before: int, after: int) -> str:
    return f"{format_bytes(after - before)} more at the peak" if after > before else "no byte more at the peak"


def _costs_by_replay(trace: Trace, layers: Sequence[str], failure: NotRecorded | None) -> Costs:
    """Return the cost from a replay of the trace's ops with padding; ``failure`` is why the model was not recorded."""
    try:
        mended = replayed_with(trace, _paddings(trace, layers))
    except ChangeError as error:
        mended = NotRecorded.from_error(error)
    if isinstance(mended, NotRecorded):
        why = mended.why if failure is None else f"padded, {failure.why}"
        return Costs(f"how much it takes is not known: {why}", details={"unknown": why})
    before, after = peak_of(trace), peak_of(mended)
    details: dict[str, Any] = {"peak": before, "padded_peak": after}
    if failure is not None:
        details["not_padded"] = failure.why
    return Costs(_more(before, after), after - before, details=details)


def _paddings(trace: Trace, layers: Sequence[str]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Map the index of each convolution or pool of these layers to ``{"padding": ...}``, which keeps the border. Raises
    ChangeError if the layers have no convolution or pool, or one side would need more padding than the other."""
    paddings: dict[int, dict[str, tuple[int, ...]]] = {}
    for form in trace.forms:
        op = trace.ops[form.op]
        window = kernel_of(base_name(op.name), form)
        if window is None or op.layer not in layers:
            continue
        kernel, stride, _, dilation = window
        if needs_uneven_padding(kernel, stride, dilation):
            raise ChangeError(f"{op.layer} has a kernel of even size, which needs more padding on one side")
        padding = tuple(map(same_padding, kernel, stride, dilation))
        if form.read("weight") is None:  # torch refuses to pad a pool by more than half its kernel
            padding = tuple(min(amount, size // 2) for amount, size in zip(padding, kernel, strict=True))
        paddings[op.index] = {"padding": padding}
    if not paddings:
        raise ChangeError("no convolution and no pool among the layers")
    return paddings
