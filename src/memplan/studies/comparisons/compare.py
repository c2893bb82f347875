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
from memplan.studies.comparisons.sides import KINDS, is_saved, of_trace, side_of
from memplan.trace.measure import measure as measure_step
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import record_for
from memplan.trace.recording.session import Environment, choose_target, public
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace

_OPTIONS = (*(one.name for one in dataclasses.fields(StepOptions)), "device", "settings")


@dataclass(frozen=True)
class Given:
    """One side as it was asked for: a step to record, or what was saved of one."""

    title: str
    what: Any
    options: StepOptions = field(default_factory=StepOptions)
    device: str | torch.device | None = None
    settings: str | None = None
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
    b_options: Mapping[str, Any] = {},  # read only
    measure: bool = False,
) -> Comparison:
    """Hold two steps against each other: bytes by cause and by layer, weights, time, shapes of outputs.

    Args:
        a, b: each a module, a callable that makes one, a ``build``, a Trace, an Explanation, a Plan, a point of a Sweep
            (``sweep.point(batch=8)``), or the path of a file with one of the last four (``"sweep.json#batch=8"``). They
            can be the same where ``b_options`` differ.
        inputs, kwargs, targets, loss, optimizer, device, autocast, train, dtype, settings: of both steps, as for
            `memplan.explain`. What was saved before takes none of them.
        b_options: those of these that are others for ``b``: ``{"autocast": "bf16"}``, ``{"inputs": ("8x3x64x64",)}``.
        measure: really run both on this CPU: bytes are the allocator's, seconds measured, and of two networks with the
            same parameters it is said how far apart results are. What makes a model is called from one random state.

    Returns:
        A Comparison; printing it gives a paragraph, ``memplan.reports.compare`` makes tables of it.

    Raises:
        TargetError, InputError, DeviceError: what was given are no two steps, or one and the same.
        StepError, DataDependentError: a step cannot be recorded.

    Example:
        >>> print(memplan.compare(resnet18, resnet18, "32x3x224x224", device="h100", b_options={"autocast": "bf16"}))
        A: resnet18
        B: resnet18 with autocast=bf16
        808.9 MiB -> 531.0 MiB peak: 277.9 MiB less, -34 % (saved activations -278.7 MiB, ...
    """
    common = {
        "inputs": inputs, "kwargs": kwargs, "targets": targets, "loss": loss, "optimizer": optimizer,
        "device": device, "autocast": autocast, "train": train, "dtype": dtype, "settings": settings,
    }  # fmt: skip
    unknown = sorted(set(b_options) - set(_OPTIONS))
    if unknown:
        raise InputError(f"b_options {unknown[0]!r}", expected=f"out of {', '.join(_OPTIONS)}", do="Name one of these")
    if a is b and not b_options:
        raise InputError(
            "the same step twice, with the same options",
            expected="two that differ",
            do="Pass another one, or say in b_options what differs",
        )
    if is_saved(a) and is_saved(b):
        _refuse_options(common, measure)
    one = _given(a, common, _title(a))
    other = _given(b, common | dict(b_options), _title(b), b_options)
    return compare_given(one, other, measure=measure)


_DEFAULTS = {"inputs": (), "kwargs": {}, "targets": (), "train": True}


def _refuse_options(common: Mapping[str, Any], measure: bool) -> None:
    given = [name for name, value in common.items() if value != _DEFAULTS.get(name) and name != "settings"]
    given += ["measure"] if measure else []
    if given:
        raise InputError(
            f"two steps that were recorded before, and {', '.join(given)}",
            expected="such two alone",
            do="Leave it out, or pass the model to record anew",
        )


def compare_given(one: Given, other: Given, *, measure: bool = False) -> Comparison:
    """Compare two sides, as `compare` does."""
    if measure:
        return _measured(one, other)
    sides = [_side(given) for given in (one, other)]
    return Comparison(sides[0], sides[1], notes=_notes(sides[0], sides[1]))


def _given(what: Any, options: Mapping[str, Any], title: str, differing: Mapping[str, Any] = {}) -> Given:
    device, settings = options["device"], options["settings"]
    rest = {name: value for name, value in options.items() if name not in ("device", "settings")}
    inputs = rest["inputs"]
    rest["inputs"] = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    step = StepOptions(**rest).checked()
    if is_saved(what):
        # the options of both are for the other side
        if differing:
            raise InputError(
                f"b_options for {title}, which was recorded before",
                expected="options only for a step that is still to be recorded",
                do="Leave them out",
            )
        return Given(title, what, settings=settings if isinstance(what, Trace) else None)
    named = ", ".join(f"{name}={_short(value)}" for name, value in differing.items())
    return Given(f"{title} with {named}" if named else title, what, step, device, settings)


def _short(value: Any) -> str:
    return getattr(value, "__qualname__", None) or str(value).removeprefix("torch.")[:40]


def _title(what: Any) -> str:
    if isinstance(what, (str, os.PathLike)):
        return os.path.basename(what) or str(what)
    if isinstance(what, nn.Module) or is_saved(what):
        return getattr(what, "title", None) or type(what).__name__
    found = getattr(what, "__qualname__", None) or getattr(getattr(what, "func", None), "__qualname__", None)
    return found or type(what).__name__


def _side(given: Given) -> Side:
    if is_saved(given.what):
        return side_of(given.what, given.title)
    _check_callable(given)
    try:
        target = choose_target(given.device, cudnn=given.cudnn)
        trace = record_for(build_of(given.what, given.options, on_card=target.card is not None), target)
    except MemplanError as error:
        raise error.about(given.title) from error.__cause__
    side = of_trace(trace, given.title, train=_train(given), settings=given.settings)
    zeros = zeros_of(given.what) if isinstance(given.what, nn.Module) else ()
    return replace(side, zeros=zeros) if zeros else side


def _train(given: Given) -> bool | None:
    return None if given.options.train else False


def _check_callable(given: Given) -> None:
    if not callable(given.what):
        raise TargetError(
            f"{type(given.what).__name__} {given.what!r:.60}",
            expected=f"two steps to compare, each {KINDS}",
            do="Pass the two first, then their inputs",
        )


def _measured(one: Given, other: Given) -> Comparison:
    """Run both sides: births and deaths come from the allocator, then seconds, then results."""
    for given in (one, other):
        if is_saved(given.what):
            raise InputError(
                f"{given.title} was recorded before, and measuring was asked for",
                expected="two steps that can be run",
                do="Leave measuring out, or name the callable",
            )
        _check_callable(given)
        if choose_target(given.device or HOST).card is not None:
            raise InputError(
                f"device {given.device} and measuring",
                expected="the CPU: only what it allocates is measured",
                do="Leave the device out",
            )
    sides = [_measured_side(given) for given in (one, other)]
    models = [output_errors.made(given.what) for given in (one, other)]
    reason = output_errors.why_not_comparable(models[0], models[1], one.options, other.options)
    notes = _notes(sides[0], sides[1]) + (() if reason is None else (reason,))
    if models[0] is None or models[1] is None or reason is not None:
        return Comparison(sides[0], sides[1], notes=notes)
    same = output_errors.same_weights(models[0], models[1])
    apart = output_errors.apart(models[0], models[1], one.options, other.options)
    return Comparison(sides[0], sides[1], apart, same, notes)


def _measured_side(given: Given) -> Side:
    try:
        build = build_of(given.what, given.options)
        trace = measure_step(build, device=HOST)
        seconds = output_errors.seconds_of(build())
    except MemplanError as error:
        raise error.about(given.title) from error.__cause__
    side = of_trace(trace, given.title, train=_train(given))
    model = output_errors.made(given.what)
    zeros = zeros_of(model) if model is not None else ()
    return replace(side, seconds=seconds, seconds_by="measured on this CPU", zeros=zeros or side.zeros)


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    notes: list[str] = []
    if a.device != b.device:
        notes.append(f"A is for {a.device}, B for {b.device}: other kernels run, and other tensors are saved")
    if a.origin != b.origin and not {a.origin, b.origin} <= {"recorded", "explained", "swept"}:
        notes.append(f"A was {a.origin}, B {b.origin}: that alone can make a difference")
    swept = [name for name, side in (("A", a), ("B", b)) if side.origin == "swept"]
    if swept:
        one = "is a point of a sweep, which has" if len(swept) == 1 else "are points of a sweep, which have"
        notes.append(f"{' and '.join(swept)} {one} no layers: causes and totals alone are compared")
    copies = [CAST_COPIES in side.by_cause for side in (a, b) if side.origin in ("recorded", "measured", "dry")]
    if any(copies) and len(copies) < 2:
        notes.append("copies of weights in another dtype stand apart on the side that was recorded here alone")
    if a.layers and b.layers and not {part.name for part in a.layers} & {part.name for part in b.layers}:
        notes.append("no layer of the two has the same name: only causes and totals can be compared")
    return tuple(notes)
