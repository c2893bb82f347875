"""Comparison of a step with its baseline: changes by layer and cause, with their reasons. All sizes are bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from memplan._bytes import format_bytes, parse_bytes, signed
from memplan._display import Printed
from memplan._json import Saved
from memplan.errors import BaselineError, UnitError, UsageError
from memplan.studies.comparisons.comparison import CAUSE_LABELS, CauseRow, Comparison
from memplan.studies.guarding.alike import name_of, pattern
from memplan.studies.guarding.baseline import UPDATE, Baseline, Figures
from memplan.studies.guarding.recorded_figures import KernelChoice, RecordedFigures, limit_in_band


@dataclass(frozen=True, slots=True)
class Change(Printed):
    """Repeated layers whose bytes at the peak grew, or shrank, for the same reason."""

    DERIVED: ClassVar[tuple[str, ...]] = ("name", "difference")

    layers: tuple[str, ...]
    causes: tuple[CauseRow, ...]
    """Sums over these layers, the largest difference first."""
    why: str
    """A change of the layers' ops: another kernel, a new layer; "" if they run the same ops."""
    where: str | None
    """``file:line`` of the first layer."""

    @property
    def difference(self) -> int:
        """Bytes now minus those of the baseline."""
        return sum(row.difference for row in self.causes)

    @property
    def name(self) -> str:
        """Common name of the layers."""
        return name_of(self.layers)

    def __str__(self) -> str:
        parts = ", ".join(f"{CAUSE_LABELS.get(row.cause, row.cause)} {signed(row.difference)}" for row in self.causes)
        return f"{self.name}: {signed(self.difference)} ({parts})" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Outcome(Saved):
    """A step compared with its baseline."""

    FORMAT: ClassVar[str] = "memplan.guard"
    DERIVED: ClassVar[tuple[str, ...]] = ("grew",)

    before: Figures
    now: Figures
    allowed: int
    """Tolerance: bytes by which the allocated peak may exceed the baseline."""
    allowed_reserved: int
    """Tolerance for the reserved peak, in bytes."""
    changes: tuple[Change, ...]
    """They add up to the difference of the peaks; the largest first."""
    notes: tuple[str, ...] = ()

    @property
    def grew(self) -> bool:
        """Whether the allocated or the reserved peak grew by more than the tolerance."""
        reserved = self.now.reserved - self.before.reserved
        return self.now.peak - self.before.peak > self.allowed or reserved > self.allowed_reserved

    @property
    def comparison(self) -> Comparison:
        """The comparison of baseline and step by cause, without layers."""
        return Comparison(self.before.side("the baseline"), self.now.side("now"))


def baseline_of(baseline: Baseline, now: Figures, source: str) -> Figures:
    """Return the baseline's figures of the step ``now``; errors name the baseline ``source``. Raises BaselineError if
    it has no figures of the step on this device, or they are of another torch or cuDNN."""
    before = baseline.find(now.target, now.options, now.device)
    if before is None:
        others = [step for step in baseline.steps if step.same_step(now.target, now.options)]
        devices = ", ".join(step.device for step in others)
        has = (
            f"has it for {devices}, not for {now.device}" if others else f"has no figures of it{_other_steps(baseline)}"
        )
        raise BaselineError(
            f"{now.title}: the baseline {source} {has}",
            expected=f"figures of this target, with these options, on {now.device}",
            do=UPDATE,
        )
    differing = []
    if before.torch != now.torch:
        differing.append(f"was written by torch {before.torch}, and this is torch {now.torch}")
    if (before.cudnn, before.expected) != (now.cudnn, now.expected):
        differing.append(f"has {_workspaces(before)}, and this has {_workspaces(now)}")
    if differing:
        raise BaselineError(
            f"{now.title}: the baseline {source} {'; it '.join(differing)}",
            expected="both of one kind, else the bytes of a change and of a version cannot be told apart",
            do=f"{UPDATE}, or go back to what it was written with",
        )
    return before


def _workspaces(figures: Figures) -> str:
    """Say which of cuDNN's workspaces the figures contain."""
    if figures.cudnn:
        return "cuDNN's workspaces of the --cudnn that was named"
    if figures.expected:
        return "cuDNN's workspaces as they are expected, the default"
    return "the least workspaces of cuDNN (--cudnn off, and the default of former versions)"


def _other_steps(baseline: Baseline) -> str:
    """Describe the steps that a baseline has, as the end of a sentence; empty if it has none."""
    titles = list(dict.fromkeys(step.title for step in baseline.steps))
    return f"; it has {', '.join(titles[:3])}" + (" and others" if len(titles) > 3 else "") if titles else ""


def allowance(tolerance: str, size: int) -> int:
    """Return the bytes that a tolerance, a share of ``size`` such as ``1%`` or bytes such as ``64 MiB``, amounts to.
    Raises UsageError if the tolerance has another form.

    Example:
        >>> allowance("1%", 1000), allowance("2 KiB", 1000)
        (10, 2048)
    """
    share = _SHARE.fullmatch(tolerance.strip())
    if share is not None:
        return int(size * Fraction(share[1]) / 100)
    try:
        if tolerance.strip().isdigit() and tolerance.strip() != "0":  # bytes, or percent?
            raise UnitError(f"{tolerance} of what", expected="a unit")
        return parse_bytes(tolerance)
    except UnitError:
        raise UsageError(
            f"the tolerance {tolerance!r:.40}", expected="a share of the baseline, or bytes", do="Write 1%, or 64 MiB"
        ) from None


_SHARE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*%", re.ASCII)


def compare_with(before: Figures, step: RecordedFigures, tolerance: str = "0%") -> Outcome:
    """Compare a step with its baseline.

    ``tolerance``: growth to accept of both peaks: ``1%``, ``64 MiB``. Raises UsageError if the tolerance has another
    form.
    """
    changes = tuple(sorted(_changes(before, step), key=lambda change: (-abs(change.difference), change.layers)))
    allowed = allowance(tolerance, before.peak), allowance(tolerance, before.reserved)
    notes = *_notes(before, step), *limit_in_band(before.peak + allowed[0], step.band)
    return Outcome(before, step.figures, *allowed, changes, notes)


def _changes(before: Figures, step: RecordedFigures) -> Iterator[Change]:
    """Yield the differences between the two peaks, grouped by pattern of layers, reason and direction."""
    rows_of_layers: dict[str, dict[str, CauseRow]] = {}
    for part in before.held:
        rows_of_layers.setdefault(part.layer, {})[part.cause] = CauseRow(part.cause, a=part.bytes, b=0)
    for part in step.figures.held:
        rows = rows_of_layers.setdefault(part.layer, {})
        rows[part.cause] = replace(rows.get(part.cause, CauseRow(part.cause, a=0, b=0)), b=part.bytes)
    ops_before, ops_now = ({row.layer: row.ops for row in figures.ran} for figures in (before, step.figures))
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for layer, rows in rows_of_layers.items():
        difference = sum(row.difference for row in rows.values())
        if any(row.difference for row in rows.values()):
            why = op_change(ops_before.get(layer), ops_now.get(layer), step.kernel_choices.get(layer))
            groups.setdefault((pattern(layer), why, difference > 0), []).append(layer)
    for (_, why, _), layers in groups.items():
        choice = step.kernel_choices.get(layers[0]) if why else None
        where = choice.where if choice is not None else step.where.get(layers[0])
        yield Change(tuple(layers), _sum_by_cause([rows_of_layers[layer] for layer in layers]), why, where)


def _sum_by_cause(layers: list[dict[str, CauseRow]]) -> tuple[CauseRow, ...]:
    """Add up the rows of several layers by cause, without causes whose sums are equal."""
    sums: dict[str, CauseRow] = {}
    for rows in layers:
        for row in rows.values():
            total = sums.get(row.cause, CauseRow(row.cause, a=0, b=0))
            sums[row.cause] = CauseRow(row.cause, total.a + row.a, total.b + row.b)
    return tuple(sorted((row for row in sums.values() if row.difference), key=lambda row: -abs(row.difference)))


def op_change(before: tuple[str, ...] | None, now: tuple[str, ...] | None, choice: KernelChoice | None) -> str:
    """Describe how the ops of a layer changed; "" if they did not. If its attention kernel changed, only that.

    Args:
        before, now: the ops of the layer; None if it ran none.
        choice: why torch chose the attention kernel that runs now, if known.

    Example:
        >>> op_change(("scaled_dot_product_flash_attention",), ("matmul", "softmax"), KernelChoice("a mask", None))
        'attention is no longer fused: flash attention became matmul, softmax (a mask)'
    """
    if before is not None and now is not None and set(before) == set(now):
        return ""
    if before is None or now is None:
        return "" if before is now else _CALLS[now is not None]  # not called, or called for the first time
    removed, new = [op for op in before if op not in now], [op for op in now if op not in before]
    fused_before, fused_now = (
        [op for op in ops if op.startswith(_FUSED) and "attention" in op] for ops in (before, now)
    )
    if fused_before == fused_now:
        if removed and new:
            return f"{_ops_text(removed)} became {_ops_text(new)}"
        return f"{_ops_text(removed or new)} {_APPEARS[bool(new)]}"
    because = f" ({choice.reason})" if choice is not None else ""
    if not fused_now:
        return f"attention is no longer fused: {_ops_text(fused_before)} became {_ops_text(new)}{because}"
    return f"{_ops_text(fused_before or removed)} became {_ops_text(fused_now)}{because}"


_FUSED = "scaled_dot_product_"
_NAMES = {
    "scaled_dot_product_flash_attention": "flash attention",
    "scaled_dot_product_efficient_attention": "memory-efficient attention",
    "scaled_dot_product_cudnn_attention": "cuDNN's attention",
}
_APPEARS = {True: "is new", False: "is gone"}
_CALLS = {True: "the layer ran nothing before", False: "the layer no longer runs"}


def _ops_text(ops: list[str]) -> str:
    """Return the first four ops by their names in reports, and the number of the others."""
    words = [_NAMES.get(op, op) for op in ops]
    return (", ".join(words[:4]) + (f" and {len(words) - 4} more" if words[4:] else "")) or "nothing"


def _notes(before: Figures, step: RecordedFigures) -> Iterator[str]:
    """Yield notes on other inputs, another place of the peak, reserved bytes, and assumptions of the recording."""
    now = step.figures
    old, new = before.by_cause.get("input", 0), now.by_cause.get("input", 0)
    if old and new and old != new:
        yield (
            f"the inputs take {format_bytes(new)}, {new / old:.3g} times the {format_bytes(old)} of the baseline: "
            "another batch, size or dtype"
        )
    if before.at != now.at and before.peak != now.peak:
        yield f"the peak was in {before.at}; it is in {now.at}"
    if before.reserved != now.reserved and now.reserved != now.peak:
        growth = signed(now.reserved - before.reserved)
        yield f"the allocator holds {format_bytes(now.reserved)} at most, {growth}"
    for assumption in step.assumptions:
        yield f"assumed: {assumption.text}" + (f", at {assumption.where}" if assumption.where else "")
