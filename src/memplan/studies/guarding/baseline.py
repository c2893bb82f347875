"""The baseline of `memplan guard`: the accepted memory of steps. All sizes are bytes.

It has no line numbers: a comment added above a layer must not change a file under version control.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import ClassVar

from memplan._json import Saved, Unreadable, compact, text_of, to_plain
from memplan.errors import BaselineError
from memplan.studies.comparisons.comparison import Side


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of a layer and cause that are live at the allocated peak."""

    layer: str
    cause: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The distinct forward ops of a layer, in order: ``("linear", "scaled_dot_product_flash_attention")``."""

    layer: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Predicted memory of a step on a device."""

    target: str
    """TARGET argument of the command, with forward slashes."""
    options: str
    """Options of the step as typed: ``--input 8x512 --optimizer adamw``."""
    device: str
    torch: str
    """Version without its local part (``+cu126``)."""
    cudnn: bool
    """Whether an installed cuDNN computed the workspaces."""
    train: bool
    peak: int
    """Peak of allocated bytes."""
    reserved: int
    """Peak of reserved bytes; equal to ``peak`` without a caching allocator."""
    at: str
    """The op that runs at the peak: ``backward: linear's gradient of head``."""
    held: tuple[LayerBytes, ...]
    """Bytes live at the peak, which add up to ``peak``."""
    ran: tuple[LayerOps, ...]
    """Forward ops of each layer."""
    expected: bool = False
    """Whether cuDNN's workspaces are those of this torch's version of cuDNN, stored or expected. Baselines of former
    versions of memplan, and those with ``--cudnn off``, have the lower bounds instead."""

    def _check(self) -> None:
        """Raise Unreadable for figures from a file whose bytes do not add up to the peak."""
        total = sum(part.bytes for part in self.held)
        if total != self.peak:
            raise Unreadable(f"holds {total} bytes at a peak of {self.peak}")

    @property
    def title(self) -> str:
        """The target and its options."""
        return f"{self.target} {self.options}".strip()

    @property
    def by_cause(self) -> dict[str, int]:
        """Bytes at the peak by cause, which add up to ``peak``."""
        totals: dict[str, int] = {}
        for part in self.held:
            totals[part.cause] = totals.get(part.cause, 0) + part.bytes
        return totals

    def side(self, name: str) -> Side:
        """Return the figures as a side of a comparison, with causes but without layers."""
        return Side(name, "recorded", self.device, self.train, self.peak, self.reserved, self.by_cause, ())

    def same_step(self, target: str, options: str) -> bool:
        """Return whether the figures are of this target and these options, on any device."""
        return (self.target, self.options) == (target, options)


@dataclass(frozen=True, slots=True)
class Baseline(Saved):
    """Figures of steps, each identified by target, options and device."""

    FORMAT: ClassVar[str] = "memplan.baseline"
    AGAIN: ClassVar[str] = "Take it from version control again, or delete it and write its steps with --update"

    steps: tuple[Figures, ...] = ()

    def find(self, target: str, options: str, device: str) -> Figures | None:
        """Return the figures of a step on a device; None if there are none."""
        return next((step for step in self.steps if step.device == device and step.same_step(target, options)), None)

    def updated(self, figures: Figures) -> Baseline:
        """Return a copy in which ``figures`` are added, or replace those of the same step and device."""
        old = self.find(figures.target, figures.options, figures.device)
        steps = [*(step for step in self.steps if step is not old), figures]
        return replace(self, steps=tuple(sorted(steps, key=lambda step: (step.title, step.device))))

    def to_json(self) -> str:
        """Return JSON text with a line for each layer and cause, so that diffs can be reviewed."""
        head = f'{{"format":{compact(self.FORMAT)},"schema":{self.SCHEMA},\n"steps":[\n'
        return head + ",\n".join(text_of(to_plain(step)).rstrip("\n") for step in self.steps) + "\n]}\n"

    def _check(self) -> None:
        """Raise Unreadable for a file with the same step twice for a device."""
        if len({(step.target, step.options, step.device) for step in self.steps}) < len(self.steps):
            raise Unreadable("has a step twice for one device")


def read_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read a baseline from a file. Raises FormatError; BaselineError if the file cannot be read."""
    try:
        return Baseline.load(path)
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
        raise BaselineError(
            f"there is no baseline {path}{reason}", expected="one in version control", do=UPDATE
        ) from None


UPDATE = "Run memplan guard with --update, look at what changes, and commit the file"
