"""Group the parts of a run into phases: training, evaluation, generation, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memplan.trace.program_facts import RunPart

PhaseKind = Literal["train", "evaluate", "generate", "save", "load", "data"]
"""``data``: batches are loaded, and no model is called."""


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a run: for training and evaluation, the parts of a single pass over a loader.

    An evaluation that interrupts a pass of training is a phase of its own, and the pass goes on after it.
    """

    kind: PhaseKind
    where: str | None
    """``file:line`` that iterates over the loader, saves, loads or generates."""
    parts: tuple[int, ...]
    """Numbers of the parts, which are steps of the trace, in order."""
    active: tuple[int, ...]
    """Parts in which a model was trained or evaluated."""
    batches: tuple[int, ...]
    """Parts that began with a batch of the loader; without a loader, the same as ``active``."""
    length: int | None
    """Number of batches of the whole loader; None without a loader, or if unknown."""
    batch_size: int | None = None
    """Number of samples in every batch of the loader but the last; None if unknown."""
    last_batch: int | None = None
    """Number of samples in the last batch."""

    @property
    def last_share(self) -> float:
        """Size of the last batch as a share of the size of the others."""
        return self.last_batch / self.batch_size if self.last_batch and self.batch_size else 1.0

    @property
    def is_cut(self) -> bool:
        """Whether the loader has more batches than ran."""
        return self.length is not None and self.length > len(self.batches) and len(self.active) > 0


@dataclass
class _OpenPhase:
    """A phase while its parts are collected."""

    kind: PhaseKind
    where: str | None
    source: tuple[int, int] | None
    """Number of the data set, and of the pass over it; None without a loader."""
    parts: list[int]
    """Positions of its parts in the run."""
    active: list[int]
    """Those of them in which a model was called."""
    first: RunPart
    """The first of them."""


def phases_of(parts: Sequence[RunPart]) -> tuple[PhaseSpan, ...]:
    """Return the phases of a run, in the order in which they begin.

    A part without a call of a model belongs to the pass over its loader if the loader was exhausted in it, else to the
    next phase.
    """
    phases: list[_OpenPhase] = []
    passes: dict[int, int] = {}  # number of passes by loader
    pass_began = 0  # number of phases when the last pass over a loader began
    idle: list[int] = []  # parts without a call of a model, for the next phase
    begins = False  # whether a pass began since the last part that called a model
    for number, part in enumerate(parts):
        kind = _kind(part)
        if part.begins_pass and part.loader is not None:
            passes[part.loader] = passes.get(part.loader, 0) + 1
            begins = True
        source = None if part.loader is None else (part.loader, passes.get(part.loader, 0))
        of_pass = [phase for phase in phases if source is not None and phase.source == source]
        same_pass = of_pass[-1] if of_pass else None
        if part.exhausted and (kind == "data" or (same_pass is not None and kind != same_pass.kind)):
            source = None  # the part runs after the last batch
        if kind == "data":
            if part.exhausted and same_pass is not None:
                same_pass.parts += [*idle, number]
                idle = []
            else:
                idle.append(number)
            continue
        if begins:
            pass_began = len(phases)
        phase = None if begins and source else _phase_to_continue(phases, pass_began, kind, part, source)
        if phase is None:
            phase = _OpenPhase(kind, part.where, source, [], [], part)
            phases.append(phase)
        phase.parts += [*idle, number]
        if kind in ("train", "evaluate"):
            phase.active.append(number)
        idle, begins = [], False
    if idle:
        first = parts[idle[0]]
        phases.append(_OpenPhase("data", first.where, source=None, parts=idle, active=[], first=first))
    return tuple(_finished(phase, parts, phases) for phase in phases)


def _finished(phase: _OpenPhase, parts: Sequence[RunPart], phases: Sequence[_OpenPhase]) -> PhaseSpan:
    """Return a complete phase. Batches loaded for generation count for the training on what was generated."""
    same_pass = [phase, *(other for other in phases if other.kind == "generate" and other.source == phase.source)]
    numbers = sorted(number for other in same_pass for number in other.parts)
    loaded = [number for number in numbers if parts[number].loads and not parts[number].exhausted]
    has_loader = phase.source is not None and phase.kind in ("train", "evaluate")
    return PhaseSpan(
        phase.kind, phase.where, tuple(phase.parts), tuple(phase.active), tuple(loaded if has_loader else phase.active),
        phase.first.length if has_loader else None, phase.first.batch_size, phase.first.last_batch,
    )  # fmt: skip


def _kind(part: RunPart) -> PhaseKind:
    """Return the kind of a part: its own, or by what its models do: train, evaluate, or nothing (``data``)."""
    if part.kind != "work":
        return part.kind
    if not part.calls and not part.updates:
        return "data"
    return "train" if part.trains else "evaluate"


def _phase_to_continue(
    phases: Sequence[_OpenPhase], pass_began: int, kind: PhaseKind, part: RunPart, source: tuple[int, int] | None
) -> _OpenPhase | None:
    """Return the phase to which a part belongs, or None if the part begins a phase.

    Args:
        phases: phases so far; ``phases[pass_began:]`` began with the last pass over a loader, or after it.
        source: number of the data set and of the pass over it; None without a loader.
    """
    if kind in ("train", "evaluate") and source is not None:
        return next((phase for phase in reversed(phases) if (phase.kind, phase.source) == (kind, source)), None)
    if kind == "generate":
        return next((p for p in phases[pass_began:] if (p.kind, p.where) == (kind, part.where)), None)
    last = phases[-1] if phases else None
    return last if last is not None and (last.kind, last.source) == (kind, None) else None
