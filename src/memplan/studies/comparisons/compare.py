"""Two steps side by side: models, precisions, plans, or what was saved of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, MemplanError, TargetError
from memplan.studies.comparisons import output_errors
from memplan.studies.comparisons.comparison import CAST_COPIES, Comparison, Side
from memplan.studies.comparisons.pruned_weights import zeros_of
from memplan.studies.comparisons.sides import KINDS, is_saved, of_trace, read, side_of
from memplan.trace.measure import measure as measure_step
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import record_for
from memplan.trace.recording.session import Environment, choose_target, public
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of, title_of
from memplan.trace.trace import Trace

_OUTSIDE_STEP = ("device", "settings", "assume", "cudnn")
_OPTIONS = (*(option.name for option in dataclasses.fields(StepOptions)), *_OUTSIDE_STEP)


@dataclass(frozen=True)
class SideRequest:
    """Input for one side of a comparison: a step to record, or a saved result, which ignores ``options``."""

    title: str
    what: Any
    options: StepOptions = field(default_factory=StepOptions)
    device: str | torch.device | None = None
    settings: str | None = None
    assume: Mapping[str, float] | None = None
    cudnn: Environment = None


@public
def compare(
    a: Any,
    b: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | str | None = None,
    train: bool = True,
    dtype: torch.dtype | str | None = None,
    settings: str | None = None,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    a_options: Mapping[str, Any] = {},  # read only
    b_options: Mapping[str, Any] = {},  # read only
    measure: bool = False,
) -> Comparison:
    """Compare two steps: bytes by cause and by layer, weights, time, shapes of outputs.

    Args:
        a, b: each a module, a callable that makes one, a ``build``, a Trace, an Explanation, a Plan, a point of a Sweep
            (``sweep.point(batch=8)``), or the path of a file with one of the last four (``"sweep.json#batch=8"``). They
            can be the same where their options differ.
        inputs, kwargs, targets, loss, optimizer, device, autocast, train, dtype, settings, assume, cudnn: of both
            steps, as for `memplan.explain`. Saved results take none of them.
        a_options, b_options: options of one step alone: ``{"autocast": "bf16"}``, ``{"inputs": ("8x3x64x64",)}``.
        measure: really run both on this CPU: bytes come from its allocator, seconds are measured, and two networks with
            the same parameters are compared by their outputs and gradients. Models are made from the same random state.

    Returns:
        A Comparison; printing it gives a paragraph, ``memplan.reports.compare`` makes tables of it.

    Raises:
        TargetError, InputError, DeviceError: ``a`` and ``b`` are not two different steps, or an option does not fit.
        StepError, DataDependentError: a step cannot be recorded.

    Example:
        >>> print(memplan.compare(resnet18, resnet18, "32x3x224x224", device="h100", b_options={"autocast": "bf16"}))
        A: resnet18 (recorded, training step, h100)
        B: resnet18 with autocast=bf16 (recorded, training step, h100)
        824.7 MiB -> 535.3 MiB peak: 289.3 MiB less, -35 % (saved activations ...
    """
    common = {
        "inputs": inputs, "kwargs": kwargs, "targets": targets, "loss": loss, "optimizer": optimizer,
        "device": device, "autocast": autocast, "train": train, "dtype": dtype, "settings": settings,
        "assume": assume, "cudnn": cudnn,
    }  # fmt: skip
    for name, options in (("a_options", a_options), ("b_options", b_options)):
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            expected = f"out of {', '.join(_OPTIONS)}"
            raise InputError(f"{name} {unknown[0]!r}", expected=expected, do="Name one of these")
    if a is b and a_options == b_options:
        raise InputError(
            "the same step twice, with the same options",
            expected="two that differ",
            do="Pass another one, or say in b_options what differs",
        )
    if is_saved(a) and is_saved(b):
        _refuse_options(common, measure)
    side_a = _side_request(a, common, _title(a), "a_options", a_options)
    side_b = _side_request(b, common, _title(b), "b_options", b_options)
    return compare_requests(side_a, side_b, measure=measure)


_DEFAULTS = {"inputs": (), "kwargs": {}, "targets": (), "train": True}


def _refuse_options(common: Mapping[str, Any], measure: bool) -> None:
    """Raise InputError if there are options of a recording and both sides are saved."""
    options = [name for name, value in common.items() if value != _DEFAULTS.get(name) and name != "settings"]
    options += ["measure"] if measure else []
    if options:
        raise InputError(
            f"two steps that were recorded before, and {', '.join(options)}",
            expected="such two alone",
            do="Leave it out, or pass the model to record anew",
        )


def compare_requests(a: SideRequest, b: SideRequest, *, measure: bool = False) -> Comparison:
    """Compare two sides. ``measure``, and the errors: see `compare`."""
    if measure:
        return _compare_measured(a, b)
    side_a, side_b = _record_side(a), _record_side(b)
    return Comparison(side_a, side_b, notes=_notes(side_a, side_b))


def _side_request(
    what: Any, common: Mapping[str, Any], title: str, side: str, own_options: Mapping[str, Any]
) -> SideRequest:
    """Return the request of a side, whose own options take precedence over those in common.

    ``side``: name of the argument with its own options, for errors.
    """
    options = dict(common) | dict(own_options)
    target_options = {name: options[name] for name in _OUTSIDE_STEP}
    step_options = {name: value for name, value in options.items() if name not in _OUTSIDE_STEP}
    inputs = step_options["inputs"]
    step_options["inputs"] = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    step = StepOptions(**step_options).checked()
    if is_saved(what):
        # common options then apply to the other side
        if own_options:
            raise InputError(
                f"{side} for {title}, which was recorded before",
                expected="options only for a step that is still to be recorded",
                do="Leave them out",
            )
        return SideRequest(title, what, settings=options["settings"])
    names = {option: getattr(value, "__qualname__", None) for option, value in own_options.items()}  # of callables
    texts = {option: names[option] or str(value).removeprefix("torch.")[:40] for option, value in own_options.items()}
    listed = ", ".join(f"{option}={text}" for option, text in texts.items())
    return SideRequest(f"{title} with {listed}" if listed else title, what, step, **target_options)


def _title(what: Any) -> str:
    """Return the name of a side in reports: of a file, a saved result's title, or the name of a class or function."""
    if isinstance(what, (str, os.PathLike)):
        return os.path.basename(what) or str(what)
    title = getattr(what, "title", None) if isinstance(what, nn.Module) or is_saved(what) else None
    return title or title_of(what, otherwise=type(what).__name__)


def _record_side(request: SideRequest) -> Side:
    """Return a side: read from a saved result, or of the step, which is recorded. Raises MemplanError."""
    if is_saved(request.what):
        what = read(request.what) if isinstance(request.what, (str, os.PathLike)) else request.what
        # settings of both sides are for those that are simulated here
        return side_of(what, request.title, settings=request.settings if isinstance(what, Trace) else None)
    _check_callable(request)
    try:
        target = choose_target(request.device, request.assume, request.cudnn)
        trace = record_for(build_of(request.what, request.options, on_card=target.card is not None), target)
    except MemplanError as error:
        raise error.about(request.title) from error.__cause__
    side = of_trace(trace, request.title, train=_trains(request), settings=request.settings)
    zeros = zeros_of(request.what) if isinstance(request.what, nn.Module) else ()
    return replace(side, zeros=zeros) if zeros else side


def _trains(request: SideRequest) -> bool | None:
    """Return False for inference, else None: a ``build`` can run inference all the same."""
    return None if request.options.train else False


def _check_callable(request: SideRequest) -> None:
    """Raise TargetError for a side that is neither a saved result nor callable."""
    if not callable(request.what):
        raise TargetError(
            f"{type(request.what).__name__} {request.what!r:.60}",
            expected=f"two steps to compare, each {KINDS}",
            do="Pass the two first, then their inputs",
        )


def _compare_measured(a: SideRequest, b: SideRequest) -> Comparison:
    """Run both sides on this CPU: memory, seconds and, of two networks of the same shape, their results."""
    for request in (a, b):
        if is_saved(request.what):
            raise InputError(
                f"{request.title} was recorded before, and measuring was asked for",
                expected="two steps that can be run",
                do="Leave measuring out, or name the callable",
            )
        _check_callable(request)
        if choose_target(request.device or HOST).card is not None:
            raise InputError(
                f"device {request.device} and measuring",
                expected="the CPU: only what it allocates is measured",
                do="Leave the device out",
            )
    side_a, side_b = _measure_side(a), _measure_side(b)
    model_a, model_b = output_errors.make_model(a.what), output_errors.make_model(b.what)
    reason = output_errors.why_not_comparable(model_a, model_b, a.options, b.options)
    notes = _notes(side_a, side_b) + (() if reason is None else (reason,))
    if model_a is None or model_b is None or reason is not None:
        return Comparison(side_a, side_b, notes=notes)
    same_weights = output_errors.same_weights(model_a, model_b)
    differences = output_errors.result_differences(model_a, model_b, a.options, b.options)
    return Comparison(side_a, side_b, differences, same_weights, notes)


def _measure_side(request: SideRequest) -> Side:
    """Run a step on this CPU and return its side, with measured bytes and seconds."""
    try:
        build = build_of(request.what, request.options)
        trace = measure_step(build, device=HOST)
        seconds = output_errors.seconds_of(build())
    except MemplanError as error:
        raise error.about(request.title) from error.__cause__
    side = of_trace(trace, request.title, train=_trains(request))
    model = output_errors.make_model(request.what)
    zeros = zeros_of(model) if model is not None else ()
    return replace(side, seconds=seconds, seconds_by="measured on this CPU", zeros=zeros or side.zeros)


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    """Return the notes on what cannot be compared between two sides."""
    notes: list[str] = []
    if a.device != b.device:
        notes.append(f"A is for {a.device}, B for {b.device}: other kernels run, and other tensors are saved")
    if a.origin != b.origin and not {a.origin, b.origin} <= {"recorded", "explained", "swept"}:
        notes.append(f"A was {a.origin}, B {b.origin}: that alone can make a difference")
    swept = [name for name, side in (("A", a), ("B", b)) if side.origin == "swept"]
    if swept:
        verb = "is a point of a sweep, which has" if len(swept) == 1 else "are points of a sweep, which have"
        notes.append(f"{' and '.join(swept)} {verb} no layers: causes and totals alone are compared")
    copies = [CAST_COPIES in side.by_cause for side in (a, b) if side.origin in ("recorded", "measured", "dry")]
    if any(copies) and len(copies) < 2:
        notes.append("copies of weights in another dtype stand apart on the side that was recorded here alone")
    if a.layers and b.layers and not {part.name for part in a.layers} & {part.name for part in b.layers}:
        notes.append("no layer of the two has the same name: only causes and totals can be compared")
    return tuple(notes)
