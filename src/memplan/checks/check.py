"""`memplan.check`: run all checks on a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memplan.checks.finding import SEVERITIES, Check, Finding, Subject
from memplan.checks.ignores import Ignore, not_ignored, parse_ignore
from memplan.checks.mended.changed_step import StepRecorder
from memplan.checks.registry import CHECKS, COST_MORE_THAN_BYTES, IDS
from memplan.devices import Device, find
from memplan.errors import DeviceError, InputError, MemplanError
from memplan.explanation.explain import device_of
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import record_for
from memplan.trace.recording.session import Environment, choose_target, public
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace


@public
def check(
    what: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | str | None = None,
    train: bool = True,
    dtype: torch.dtype | str | None = None,
    context: int = 0,
    ignore: Sequence[str] = (),
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    world: int | None = None,
    rank: int = 0,
) -> list[Finding]:
    """Find where a step wastes memory, or saves it the wrong way, before it runs.

    Args:
        what: a module, a callable that makes one, a ``build`` that returns a step, or a Trace. Of a
            Trace, costs that take a recording of the mended model are left out.
        inputs, kwargs, targets, loss, optimizer, device, autocast, train, dtype, assume, cudnn: as for
            `memplan.explain`.
        context: pixels on each side that the input brings along beyond what the output is wanted for (tiles that
            overlap): a border lost up to that is no finding.
        ignore: findings to leave out: ``"border-erosion"``, ``"border-erosion:encoder.*"``. A comment
            ``# memplan: ignore[border-erosion]`` does it for the line that makes or calls a layer.

    Returns:
        Findings, warnings first, then by bytes.

    Raises:
        TargetError, InputError, DeviceError: the arguments do not describe a step.
        StepError, DataDependentError: the step cannot be recorded.

    Example:
        >>> stack = torch.nn.Sequential(*[torch.nn.Conv2d(1, 1, 3) for _ in range(10)])
        >>> memplan.check(stack, "1x1x128x128")[0].details["lost"]
        [(10, 10), (10, 10)]
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, train, dtype).checked()
    ignores = [parse_ignore(text, IDS) for text in ((ignore,) if isinstance(ignore, str) else ignore)]
    if isinstance(what, Trace):
        options.refuse_with_trace()
        return check_trace(what, context=context, ignores=ignores)
    target = choose_target(device_of(what) if device is None else device, assume, cudnn, world, rank)
    recorder = StepRecorder(what, options, target)
    return check_trace(record_again(recorder), recorder=recorder, context=context, ignores=ignores)


def record_again(recorder: StepRecorder) -> Trace:
    """Return the trace of the recorder's step, without a change. Raises StepError or DataDependentError if the step
    cannot be recorded."""
    on_card = recorder.target.card is not None
    return record_for(build_of(recorder.what, recorder.options, on_card=on_card), recorder.target)


def check_trace(
    trace: Trace, *, recorder: StepRecorder | None = None, context: int = 0, ignores: Sequence[Ignore] = ()
) -> list[Finding]:
    """Return the findings about a recorded step, in the order of `check`. ``recorder`` records it again after a change;
    without it, costs are only those that follow from the trace. Raises InputError for a context that is no number of
    pixels, or a trace file whose ops have impossible arguments."""
    if isinstance(context, bool) or not isinstance(context, int) or context < 0:
        raise InputError(f"context {context!r}", expected="a whole number of pixels, 0 or more", do="Give that")
    subject = Subject(trace, _card_of(trace) if recorder is None else recorder.target.card, recorder, context)
    findings = [finding for check in CHECKS for finding in _findings_of(check, subject)]
    created_at = {layer.name: layer.made for layer in trace.layers}
    shown = _merged(map(_with_severity, not_ignored(findings, ignores, created_at)))
    return sorted(shown, key=lambda f: (-SEVERITIES.index(f.severity), -f.bytes))


def _card_of(trace: Trace) -> Device | None:
    """Return the card in the catalogue that a trace names; None for the CPU or an unknown card."""
    try:
        return None if trace.device == HOST else find(trace.device)
    except DeviceError:
        return None


def _findings_of(check: Check, subject: Subject) -> list[Finding]:
    """Return the findings of a check. Raises InputError if the trace came from a file, and an op in it has impossible
    shapes or arguments: loading does not compare them with the ops' schemas."""
    try:
        return check.find(subject)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        if subject.recorder is not None or isinstance(error, MemplanError):
            raise
        raise InputError(
            f"the check {check.id} cannot follow the trace ({type(error).__name__}: {error})",
            expected="ops with the shapes and arguments that they are recorded with",
            do="Record the step again",
        ) from error


def _with_severity(finding: Finding) -> Finding:
    """Return the finding, as "info" if it costs no bytes and its check is not about other costs."""
    costs = finding.bytes > 0 or finding.id in COST_MORE_THAN_BYTES
    return finding if costs else replace(finding, severity="info")


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge the findings of a kind that cost no bytes into one about their layers; others stay as they are."""
    groups: dict[Any, list[Finding]] = {}
    for index, finding in enumerate(findings):
        # a finding that costs bytes is not merged
        key = (finding.id, finding.severity, finding.details.get("kind")) if finding.bytes == 0 else index
        groups.setdefault(key, []).append(finding)
    merged: list[Finding] = []
    for first, *others in groups.values():
        if others:
            rows = [
                {"layer": f.layer, "where": f.where, "message": f.message, "details": dict(f.details)}
                for f in (first, *others)
            ]
            message = f"{first.message} (and so in {len(others)} more place{'' if len(others) == 1 else 's'})"
            first = replace(first, message=message, details={**first.details, "layers": rows})
        merged.append(first)
    return merged
