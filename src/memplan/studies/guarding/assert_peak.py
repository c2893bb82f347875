"""`memplan.assert_peak`, the assertion that a step's peak stays below a limit."""

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
from memplan.studies.guarding.baseline import LayerBytes
from memplan.studies.guarding.recorded_figures import bytes_by_layer, limit_in_band
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
    world: int | None = None,
    rank: int = 0,
) -> Explanation:
    """Assert that a step's predicted peak is within a limit, without running it.

    Args:
        what: a module, a callable that makes one, a ``build`` that returns a step, or a Trace.
        inputs: what the module is called with.
        at_most: the limit of allocated bytes: "2 GiB", or a number of bytes.
        reserved: the limit of bytes reserved by the caching allocator. At least one of the two limits is required.
        kwargs, targets, loss, optimizer, device, autocast, train, dtype: as for `memplan.explain`. The test depends on
            the machine unless it names a device.
        settings, assume, cudnn, world, rank: as for `memplan.explain`.

    Returns:
        The Explanation of the step.

    Raises:
        PeakError: the peak is above the limit. It is an AssertionError, and lists causes and layers at the peak.
        UsageError: no limit, or not a number of bytes.
        TargetError, InputError, DeviceError: the arguments do not describe a step.
        StepError, DataDependentError: the step cannot be recorded.

    Where cuDNN's workspaces are expected, the expected peak counts, as in `memplan.explain`; where they are known as an
    interval, the lower bound.

    Example:
        >>> memplan.assert_peak(model, images, optimizer=torch.optim.AdamW, at_most="80 MiB", device="h100")
        <Explanation of 'Sequential' on h100: 65.9 MiB peak, 10 layers>
    """
    __tracebackhide__ = True  # pytest then shows the failure at the user's line
    limits = {"allocated": at_most, "reserved": reserved}
    bounds = {name: parse_bytes(limit) for name, limit in limits.items() if limit is not None}
    if not bounds:
        raise UsageError(
            "no limit was given", expected="the highest peak that is right", do='Pass at_most="2 GiB", or reserved'
        )
    explanation = explain(
        what, *inputs, kwargs=kwargs, targets=targets, loss=loss, optimizer=optimizer, device=device,
        autocast=autocast, train=train, dtype=dtype, settings=settings, assume=assume, cudnn=cudnn,
        world=world, rank=rank,
    )  # fmt: skip
    check_peak(explanation, bounds)
    return explanation


def check_peak(explanation: Explanation, bounds: Mapping[str, int]) -> None:
    """Raise PeakError if a peak of the step is above its bound.

    ``bounds``: bytes by ``allocated`` and ``reserved``, of which it may have both.
    """
    __tracebackhide__ = True
    peaks = {"allocated": explanation.timeline.peak_allocated, "reserved": explanation.timeline.peak_reserved}
    exceeded = [name for name, bound in bounds.items() if peaks[name] > bound]
    if not exceeded:
        return
    name = exceeded[0]
    peak, bound = peaks[name], bounds[name]
    more = f"{format_bytes(peak - bound)} more than the {format_bytes(bound)} that it may"
    raise PeakError(
        f"{printable(explanation.title)} takes {format_bytes(peak)} {name} at its peak on {explanation.device}, {more}",
        expected=f"at most {bound} bytes, found {peak}",
        do="See what memplan.check finds, let memplan.fit plan the step for a budget, or raise the limit where the "
        "growth is meant",
        details=tuple(_details(explanation, bound, by_reserved=name == "reserved")),
        explanation=explanation,
    )


def _details(explanation: Explanation, bound: int, *, by_reserved: bool) -> Iterator[str]:
    """Yield the lines below the error's message: 95 % band, causes, largest layers, and the op at the peak."""
    if explanation.card is not None and not by_reserved:
        yield from limit_in_band(bound, explanation.card.allocated_band)
    by_cause = explanation.by_cause_reserved if by_reserved else explanation.by_cause
    causes = sorted(((size, cause) for cause, size in by_cause.items() if size), reverse=True)
    yield "by cause: " + ", ".join(f"{LABELS[cause]} {format_bytes(size)}" for size, cause in causes[:_CAUSES])
    yield "by layer, at the allocated peak:"
    for name, size, labels in largest_layers(bytes_by_layer(explanation.holders))[:_LAYERS]:
        yield f"  {printable(name)}: {format_bytes(size)} ({labels})"
    where = peak_sentence(explanation)
    if where is not None:
        yield printable(where)


def largest_layers(parts: Sequence[LayerBytes]) -> list[tuple[str, int, str]]:
    """Return (name, bytes at the peak, causes) of each group of layers with the same pattern, the largest first."""
    groups: dict[str, list[LayerBytes]] = {}
    for part in parts:
        groups.setdefault(pattern(part.layer), []).append(part)
    rows = []
    for group in groups.values():
        causes: dict[str, int] = {}
        for part in group:
            causes[part.cause] = causes.get(part.cause, 0) + part.bytes
        ordered = sorted(causes, key=lambda cause: -causes[cause])
        labels = ", ".join(LABELS[cause] for cause in ordered[:3]) + (", ..." if len(ordered) > 3 else "")
        rows.append((name_of(list(dict.fromkeys(part.layer for part in group))), sum(causes.values()), labels))
    return sorted(rows, key=lambda row: (-row[1], row[0]))
