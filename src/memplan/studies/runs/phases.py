"""The parts of a run, joined to phases: training, evaluation, generation, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memplan.trace.program_facts import RunPart

PhaseKind = Literal["train", "evaluate", "generate", "save", "load", "data"]
"""``data``: batches are loaded, and no model is called."""


@dataclass(frozen=True)
class PhaseSpan:
    """Parts of a run that are one phase: of training and evaluation, those of one pass over a loader.

    What interrupts a pass, such as an evaluation after some updates, is a phase of its own.
    """

    kind: PhaseKind
    where: str | None
    """``file:line`` that iterates over the loader, saves, loads or generates."""
    parts: tuple[int, ...]
    """Numbers of its parts, which are steps of the trace, in order."""
    batches: tuple[int, ...]
    """Those of them in which a model was trained or evaluated."""
    length: int | None
    """Number of batches of the whole loader; None without one, or if unknown."""
    batch_size: int | None = None
    """Number of samples in the loader's batches but the last; None if unknown."""
    last_batch: int | None = None
    """Number of samples in the last one."""

    @property
    def last_share(self) -> float:
        """Return the size of the last batch, as a share of the others'."""
        return self.last_batch / self.batch_size if self.last_batch and self.batch_size else 1.0

    @property
    def is_cut(self) -> bool:
        """Return whether the loader has more batches than ran."""
        return self.length is not None and self.length > len(self.batches) > 0


@dataclass
class _Open:
    """A phase that later parts can belong to."""

    kind: PhaseKind
    where: str | None
    loader: int | None
    parts: list[int]
    batches: list[int]
    first: RunPart


def phases_of(parts: Sequence[RunPart]) -> tuple[PhaseSpan, ...]:
    """Return the phases of a run, in the order in which they begin.

    A part without a call of a model ends the pass over its loader if that was exhausted there; else it begins the phase
    that follows.
    """
    spans: list[_Open] = []
    closed = 0  # phases before this one have ended, but for passes over other loaders
    waiting: list[int] = []
    begins = False
    for number, part in enumerate(parts):
        kind = _kind(part)
        begins = begins or part.begins_pass
        if kind == "data":
            own = next((span for span in reversed(spans) if part.exhausted and span.loader == part.loader), None)
            if own is not None:
                own.parts += [*waiting, number]
                waiting = []
            else:
                waiting.append(number)
            continue
        if begins:
            closed = len(spans)
        span = _continued(spans, closed, kind, part, begins=begins)
        if span is None:
            span = _Open(kind, part.where, part.loader, [], [], part)
            spans.append(span)
        span.parts += [*waiting, number]
        if kind in ("train", "evaluate"):
            span.batches.append(number)
        waiting, begins = [], False
    if waiting:
        first = parts[waiting[0]]
        spans.append(_Open("data", first.where, None, waiting, [], first))
    return tuple(
        PhaseSpan(
            span.kind, span.where, tuple(span.parts), tuple(span.batches), span.first.length if span.batches else None,
            span.first.batch_size, span.first.last_batch,
        )
        for span in spans
    )  # fmt: skip


def _kind(part: RunPart) -> PhaseKind:
    if part.kind != "work":
        return part.kind
    return "data" if not part.calls and not part.updates else "train" if part.trains else "evaluate"


def _continued(spans: list[_Open], closed: int, kind: PhaseKind, part: RunPart, *, begins: bool) -> _Open | None:
    """Return the phase that a part goes on with, or None if it begins one.

    ``closed``: number of phases that began before the last pass over a loader did.
    """
    if begins:
        return None
    for number, span in reversed(list(enumerate(spans))):
        if span.kind != kind:
            continue
        if kind in ("train", "evaluate") and part.loader is not None:
            return span if span.loader == part.loader else None
        is_last = number == len(spans) - 1
        return span if is_last or (number >= closed and span.where == part.where and kind == "generate") else None
    return None
