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
    active: tuple[int, ...]
    """Those of them in which a model was trained or evaluated."""
    batches: tuple[int, ...]
    """Those of them that began with a batch of the loader; without a loader, those of ``active``."""
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
        return self.length is not None and self.length > len(self.batches) and len(self.active) > 0


@dataclass
class _Open:
    """A phase that later parts can belong to."""

    kind: PhaseKind
    where: str | None
    source: tuple[int, int] | None
    """Numbers of the data set and of the pass over it; None without a loader."""
    parts: list[int]
    active: list[int]
    first: RunPart


def phases_of(parts: Sequence[RunPart]) -> tuple[PhaseSpan, ...]:
    """Return the phases of a run, in the order in which they begin.

    A part without a call of a model ends the pass over its loader if that was exhausted there; else it begins the phase
    that follows.
    """
    spans: list[_Open] = []
    passes: dict[int, int] = {}
    closed = 0  # phases before this one have ended, but for passes over other loaders
    waiting: list[int] = []
    begins = False
    for number, part in enumerate(parts):
        kind = _kind(part)
        if part.begins_pass and part.loader is not None:
            passes[part.loader] = passes.get(part.loader, 0) + 1
            begins = True
        source = None if part.loader is None else (part.loader, passes.get(part.loader, 0))
        own = next((span for span in reversed(spans) if source is not None and span.source == source), None)
        if part.exhausted and (kind == "data" or (own is not None and kind != own.kind)):
            source = None  # what follows the last batch
        if kind == "data":
            if part.exhausted and own is not None:
                own.parts += [*waiting, number]
                waiting = []
            else:
                waiting.append(number)
            continue
        if begins:
            closed = len(spans)
        span = None if begins and source is not None else _continued(spans[closed:], spans, kind, part, source)
        if span is None:
            span = _Open(kind, part.where, source, [], [], part)
            spans.append(span)
        span.parts += [*waiting, number]
        if kind in ("train", "evaluate"):
            span.active.append(number)
        waiting, begins = [], False
    if waiting:
        first = parts[waiting[0]]
        spans.append(_Open("data", first.where, None, waiting, [], first))
    return tuple(_closed(span, parts, spans) for span in spans)


def _closed(span: _Open, parts: Sequence[RunPart], spans: Sequence[_Open]) -> PhaseSpan:
    """Return the finished phase. Batches that were loaded for a rollout belong to the training on it."""
    same_pass = [span, *(other for other in spans if other.kind == "generate" and other.source == span.source)]
    loaded = sorted(n for one in same_pass for n in one.parts if parts[n].loads and not parts[n].exhausted)
    has_loader = span.source is not None and span.kind in ("train", "evaluate")
    return PhaseSpan(
        span.kind, span.where, tuple(span.parts), tuple(span.active), tuple(loaded if has_loader else span.active),
        span.first.length if has_loader else None, span.first.batch_size, span.first.last_batch,
    )  # fmt: skip


def _kind(part: RunPart) -> PhaseKind:
    if part.kind != "work":
        return part.kind
    return "data" if not part.calls and not part.updates else "train" if part.trains else "evaluate"


def _continued(
    recent: Sequence[_Open], spans: Sequence[_Open], kind: PhaseKind, part: RunPart, source: tuple[int, int] | None
) -> _Open | None:
    """Return the phase that a part goes on with, or None if it begins one.

    ``recent``: those of ``spans`` that began with the last pass over a loader, or after it.
    """
    if kind in ("train", "evaluate") and source is not None:
        return next((span for span in reversed(spans) if (span.kind, span.source) == (kind, source)), None)
    if kind == "generate":
        return next((span for span in recent if (span.kind, span.where) == (kind, part.where)), None)
    last = spans[-1] if spans else None
    return last if last is not None and (last.kind, last.source) == (kind, None) else None
