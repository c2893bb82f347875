"""An upper limit of a step's peak, as a test states it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memplan._bytes import format_bytes, parse_bytes
from memplan._text import printable
from memplan.errors import PeakError, UsageError
from memplan.explanation.explain import explain
from memplan.explanation.model import LABELS, Explanation, peak_sentence
from memplan.studies.guarding.alike import name_of, pattern
from memplan.studies.guarding.baseline import Held
from memplan.studies.guarding.taken import held
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import Environment, public

_CAUSES = 5
_LAYERS = 8


@public
def assert_peak(
    what: Any,
    *inputs: Any,
    at_most: str | int | None = None,
    reserved: str | int | None = None,
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
) -> Explanation:
    """Assert that a step takes at most so many bytes, without running it.

    Args:
        what: a module, a callable that makes one, a ``build`` that returns a step, or a Trace.
        inputs: what the module is called with.
        at_most: the highest peak of allocated bytes that is right: "2 GiB", or a number of bytes.
        reserved: the same of what the caching allocator holds. One of the two has to be given.
        kwargs, targets, loss, optimizer, device, autocast, train, dtype, settings, assume, cudnn: as for
            `memplan.explain`. The test depends on the machine unless it names a device.

    Returns:
        The Explanation of the step.

    Raises:
        PeakError: the step takes more. It is an AssertionError, and says what holds the peak.
        UsageError: no limit, or one that is no number of bytes.
        TargetError, InputError, DeviceError: what was given does not describe a step.
        StepError, DataDependentError: the step cannot be recorded.

    Where it is not known which algorithm cuDNN takes, the low case counts, as `memplan.explain` prints it.

    Example:
        >>> memplan.assert_peak(model, images, optimizer=torch.optim.AdamW, at_most="80 MiB", device="h100")
        <Explanation of 'Sequential' on h100: 65.8 MiB peak, 10 layers>
    """
    __tracebackhide__ = True  # of pytest: the failure is shown at the user's line
    limits = {"allocated": at_most, "reserved": reserved}
    bounds = {name: parse_bytes(limit) for name, limit in limits.items() if limit is not None}
    if not bounds:
        raise UsageError(
            "no limit was given", expected="the highest peak that is right", do='Pass at_most="2 GiB", or reserved'
        )
    explanation = explain(
        what, *inputs, kwargs=kwargs, targets=targets, loss=loss, optimizer=optimizer, device=device,
        autocast=autocast, train=train, dtype=dtype, settings=settings, assume=assume, cudnn=cudnn,
    )  # fmt: skip
    check_peak(explanation, bounds)
    return explanation


def check_peak(explanation: Explanation, bounds: Mapping[str, int]) -> None:
    """Raise PeakError where a step takes more than it may.

    Args:
        explanation: the step.
        bounds: bytes by ``allocated`` and ``reserved``, either or both.
    """
    __tracebackhide__ = True
    peaks = {"allocated": explanation.timeline.peak_allocated, "reserved": explanation.timeline.peak_reserved}
    over = [name for name, bound in bounds.items() if peaks[name] > bound]
    if not over:
        return
    name, by_reserved = over[0], over[0] == "reserved"
    peak, bound = peaks[name], bounds[name]
    more = f"{format_bytes(peak - bound)} more than the {format_bytes(bound)} that it may"
    raise PeakError(
        f"{printable(explanation.title)} takes {format_bytes(peak)} {name} at its peak on {explanation.device}, {more}",
        expected=f"at most {bound} bytes, found {peak}",
        do="See what memplan.check finds, let memplan.fit plan the step for a budget, or raise the limit where the "
        "growth is meant",
        details=tuple(_details(explanation, by_reserved)),
        explanation=explanation,
    )


def _details(explanation: Explanation, by_reserved: bool) -> Iterator[str]:
    by_cause = explanation.by_cause_reserved if by_reserved else explanation.by_cause
    causes = sorted(((size, cause) for cause, size in by_cause.items() if size), reverse=True)
    yield "by cause: " + ", ".join(f"{LABELS[cause]} {format_bytes(size)}" for size, cause in causes[:_CAUSES])
    yield "by layer, at the allocated peak:"
    for name, size, labels in largest_layers(held(explanation.holders))[:_LAYERS]:
        yield f"  {printable(name)}: {format_bytes(size)} ({labels})"
    where = peak_sentence(explanation)
    if where is not None:
        yield printable(where)


def largest_layers(parts: Sequence[Held]) -> list[tuple[str, int, str]]:
    """Return layers, those that are alike together, with their bytes at the peak and the causes, the largest first."""
    found: dict[str, list[Held]] = {}
    for part in parts:
        found.setdefault(pattern(part.layer), []).append(part)
    rows = []
    for group in found.values():
        causes: dict[str, int] = {}
        for part in group:
            causes[part.cause] = causes.get(part.cause, 0) + part.bytes
        ordered = sorted(causes, key=lambda cause: -causes[cause])
        labels = ", ".join(LABELS[cause] for cause in ordered[:3]) + (", ..." if len(ordered) > 3 else "")
        rows.append((name_of(list(dict.fromkeys(part.layer for part in group))), sum(causes.values()), labels))
    return sorted(rows, key=lambda row: (-row[1], row[0]))
