"""A step beside its baseline: what grew, by layer and by cause, and why. All sizes are bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from memplan._bytes import format_bytes, parse_bytes
from memplan._display import Printed
from memplan.errors import BaselineError, UnitError, UsageError
from memplan.studies.comparisons.comparison import CAUSE_LABELS, CauseRow, Comparison, signed
from memplan.studies.guarding.alike import name_of, pattern
from memplan.studies.guarding.baseline import Baseline, Figures
from memplan.studies.guarding.taken import Chosen, Taken

_UPDATE = "Run memplan guard with --update, look at what changes, and commit the file"


@dataclass(frozen=True, slots=True)
class Change(Printed):
    """Layers that are alike, and hold more (or less) at the peak than in the baseline."""

    layers: tuple[str, ...]
    causes: tuple[CauseRow, ...]
    """Of all of them together, the largest difference first."""
    why: str
    """A kernel that is another one, a layer that is new; "" where nothing of that kind is seen."""
    where: str | None
    """``file:line`` of the first."""

    @property
    def difference(self) -> int:
        """Bytes now less those of the baseline."""
        return sum(row.difference for row in self.causes)

    @property
    def name(self) -> str:
        """Name of all of the layers together."""
        return name_of(self.layers)

    def __str__(self) -> str:
        parts = ", ".join(f"{CAUSE_LABELS.get(row.cause, row.cause)} {signed(row.difference)}" for row in self.causes)
        return f"{self.name}: {signed(self.difference)} ({parts})" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step beside its baseline."""

    before: Figures
    now: Figures
    allowed: int
    """Bytes by which the peak may be higher."""
    allowed_reserved: int
    """Bytes by which the reserved peak may be higher."""
    changes: tuple[Change, ...]
    """Add up to the difference of the peaks, the largest first."""
    notes: tuple[str, ...] = ()

    @property
    def grew(self) -> bool:
        """Return whether it takes more than the tolerance allows: allocated, or reserved."""
        more = self.now.reserved - self.before.reserved
        return self.now.peak - self.before.peak > self.allowed or more > self.allowed_reserved

    @property
    def comparison(self) -> Comparison:
        """Return both as the sides of a comparison: by cause, without layers."""
        return Comparison(self.before.side("the baseline"), self.now.side("now"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        changes = [
            dataclasses.asdict(change) | {"name": change.name, "difference": change.difference}
            for change in self.changes
        ]
        return dataclasses.asdict(self) | {"grew": self.grew, "changes": changes}


def baseline_of(baseline: Baseline, now: Figures, source: str) -> Figures:
    """Return the figures that a step is compared with.

    Raises:
        BaselineError: the baseline has none of the step, or they are of another device, torch or cuDNN.
    """
    found = baseline.find(now.target, now.options, now.device)
    if found is None:
        others = [one for one in baseline.steps if one.same_step(now.target, now.options)]
        devices = ", ".join(one.device for one in others)
        has = f"has it for {devices}, not for {now.device}" if others else f"has no figures of it{_steps(baseline)}"
        raise BaselineError(
            f"{now.title}: the baseline {source} {has}",
            expected=f"figures of this target, with these options, on {now.device}",
            do=_UPDATE,
        )
    differing = []
    if found.torch != now.torch:
        differing.append(f"was written by torch {found.torch}, and this is torch {now.torch}")
    if found.cudnn != now.cudnn:
        differing.append(f"was written {_CUDNN[found.cudnn]} --cudnn, and this is {_CUDNN[now.cudnn]} it")
    if differing:
        raise BaselineError(
            f"{now.title}: the baseline {source} {'; it '.join(differing)}",
            expected="both of one kind, else the bytes of a change and of a version cannot be told apart",
            do=f"{_UPDATE}, or go back to what it was written with",
        )
    return found


_CUDNN = {True: "with", False: "without"}


def _steps(baseline: Baseline) -> str:
    titles = list(dict.fromkeys(one.title for one in baseline.steps))
    return f"; it has {', '.join(titles[:3])}" + (" and others" if len(titles) > 3 else "") if titles else ""


def allowance(tolerance: str, size: int) -> int:
    """Return how many bytes more than ``size`` a tolerance such as ``1%`` or ``64 MiB`` allows.

    Raises:
        UsageError: text of another form.

    Example:
        >>> allowance("1%", 1000), allowance("2 KiB", 1000)
        (10, 2048)
    """
    share = _SHARE.fullmatch(tolerance.strip())
    if share is not None:
        return int(size * Fraction(share[1]) / 100)
    try:
        if tolerance.strip().isdigit() and tolerance.strip() != "0":
            raise UnitError(f"{tolerance} of what", expected="a unit")
        return parse_bytes(tolerance)
    except UnitError:
        raise UsageError(
            f"the tolerance {tolerance!r:.40}", expected="a share of the baseline, or bytes", do="Write 1%, or 64 MiB"
        ) from None


_SHARE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*%", re.ASCII)


def compare_with(before: Figures, taken: Taken, tolerance: str = "0%") -> Outcome:
    """Compare what a step takes with figures of the same step.

    Args:
        before: out of a baseline.
        taken: the step.
        tolerance: how much higher the peaks may be: ``1%``, ``64 MiB``.

    Raises:
        UsageError: the tolerance is no such text.
    """
    now = taken.figures
    changes = tuple(sorted(_changes(before, taken), key=lambda one: (-abs(one.difference), one.layers)))
    allowed = allowance(tolerance, before.peak), allowance(tolerance, before.reserved)
    return Outcome(before, now, *allowed, changes, tuple(_notes(before, taken)))


def _changes(before: Figures, taken: Taken) -> Iterator[Change]:
    """Yield what differs at the two peaks: of each layer, then of layers that are alike together."""
    sizes: dict[str, dict[str, CauseRow]] = {}
    for part in before.held:
        sizes.setdefault(part.layer, {})[part.cause] = CauseRow(part.cause, part.bytes, 0)
    for part in taken.figures.held:
        rows = sizes.setdefault(part.layer, {})
        rows[part.cause] = replace(rows.get(part.cause, CauseRow(part.cause, 0, 0)), b=part.bytes)
    ran = [{one.layer: one.ops for one in figures.ran} for figures in (before, taken.figures)]
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for layer, rows in sizes.items():
        difference = sum(row.difference for row in rows.values())
        if any(row.difference for row in rows.values()):
            why = op_change(ran[0].get(layer), ran[1].get(layer), taken.chosen.get(layer))
            groups.setdefault((pattern(layer), why, difference > 0), []).append(layer)
    for (_, why, _), layers in groups.items():
        chosen = taken.chosen.get(layers[0]) if why else None
        where = chosen.where if chosen is not None else taken.where.get(layers[0])
        yield Change(tuple(layers), _together([sizes[one] for one in layers]), why, where)


def _together(parts: list[dict[str, CauseRow]]) -> tuple[CauseRow, ...]:
    """Add up the rows of several layers by cause; causes that stayed the same are left out."""
    found: dict[str, CauseRow] = {}
    for rows in parts:
        for row in rows.values():
            one = found.get(row.cause, CauseRow(row.cause, 0, 0))
            found[row.cause] = CauseRow(row.cause, one.a + row.a, one.b + row.b)
    return tuple(sorted((row for row in found.values() if row.difference), key=lambda row: -abs(row.difference)))


def op_change(before: tuple[str, ...] | None, now: tuple[str, ...] | None, chosen: Chosen | None) -> str:
    """Say which ops of a layer are others than before; of one whose attention runs another kernel, that alone.

    Args:
        before, now: the ops of the layer; None where it ran none.
        chosen: why its attention runs the kernel that it runs, if that is known.

    Example:
        >>> op_change(("scaled_dot_product_flash_attention",), ("matmul", "softmax"), Chosen("a mask", None))
        'attention is no longer fused: flash attention became matmul, softmax (a mask)'
    """
    if before is not None and now is not None and set(before) == set(now):
        return ""
    if before is None or now is None:
        return "" if before is now else _CALLS[now is not None]
    gone, new = ([op for op in one if op not in other] for one, other in ((before, now), (now, before)))
    fused = [[op for op in ops if op.startswith(_FUSED) and "attention" in op] for ops in (before, now)]
    if fused[0] == fused[1]:
        return f"{_listed(gone)} became {_listed(new)}" if gone and new else f"{_listed(gone or new)} {_IS[bool(new)]}"
    because = f" ({chosen.reason})" if chosen is not None else ""
    if not fused[1]:
        return f"attention is no longer fused: {_listed(fused[0])} became {_listed(new)}{because}"
    return f"{_listed(fused[0] or gone)} became {_listed(fused[1])}{because}"


_FUSED = "scaled_dot_product_"
_NAMES = {
    "scaled_dot_product_flash_attention": "flash attention",
    "scaled_dot_product_efficient_attention": "memory-efficient attention",
    "scaled_dot_product_cudnn_attention": "cuDNN's attention",
}
_IS = {True: "is new", False: "is gone"}
_CALLS = {True: "the layer ran nothing before", False: "the layer no longer runs"}


def _listed(ops: list[str]) -> str:
    words = [_NAMES.get(op, op) for op in ops]
    return (", ".join(words[:4]) + (f" and {len(words) - 4} more" if words[4:] else "")) or "nothing"


def _notes(before: Figures, taken: Taken) -> Iterator[str]:
    now = taken.figures
    one, other = before.by_cause.get("input", 0), now.by_cause.get("input", 0)
    if one and other and one != other:
        yield (
            f"the inputs take {format_bytes(other)}, {other / one:.3g} times the {format_bytes(one)} of the baseline: "
            "another batch, size or dtype"
        )
    if before.at != now.at and before.peak != now.peak:
        yield f"the peak was in {before.at}; it is in {now.at}"
    if before.reserved != now.reserved and now.reserved != now.peak:
        more = signed(now.reserved - before.reserved)
        yield f"the allocator holds {format_bytes(now.reserved)} at most, {more}"
    for one_unsure in taken.unsure:
        yield f"assumed: {one_unsure.text}" + (f", at {one_unsure.where}" if one_unsure.where else "")
