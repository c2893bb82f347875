"""Report of a whole run: its phases, the largest phase, and memory that could be freed."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan.explanation.model import LABELS
from memplan.reports.document import (
    Document,
    Field,
    Line,
    Part,
    Section,
    Table,
    document,
    name_field,
    number_field,
    table_of,
)
from memplan.studies.runs.whole_run import RunPhase, WholeRun

_SHARE = 0.05
"""Smallest share of a peak for which memory that could be freed is mentioned."""
_EPOCH_SHARE = 0.001
_VERBS = {
    "build": "building", "train": "training", "evaluate": "evaluation", "generate": "generation", "save": "saving",
    "load": "loading", "data": "loading data",
}  # fmt: skip
_ENDINGS = {
    "passes": "Two passes over the training data were followed; what comes after the last epoch was not. To see "
    "it, give the script fewer epochs.",
    "steps": "A training loop without a loader was followed for eight updates; what comes after it was not.",
    "time": "The time was over (--limit): what comes later was not followed.",
}


def report(run: WholeRun, top: int = 12) -> Document:
    """Report the peak of a whole run, a row for each phase, and memory that could be freed; ``top`` rows, 0 for all."""
    return document(
        f"{run.title}: the whole run on {run.device}",
        [_sentence(run)],
        [_table(run, top)],
        Section(tuple(_advice(run)), "What could be freed"),
        [Line(_ENDINGS[run.ending], "dim")] if run.ending in _ENDINGS else [],
    )


def _sentence(run: WholeRun) -> str:
    """Return the sentence on the peak of the run and its phase."""
    largest = max(run.phases, key=lambda phase: phase.allocated)
    reserved = "" if run.reserved == run.allocated else f", {format_bytes(run.reserved)} reserved"
    return f"{format_bytes(run.allocated)} peak, in {_name(run, largest)}{reserved}."


def _title(run: WholeRun, phase: RunPhase) -> str:
    """Return the kind of a phase, with its number if there are several: ``evaluate 2``."""
    alike = [other for other in run.phases if (other.kind, other.where) == (phase.kind, phase.where)]
    number = f" {next(n for n, other in enumerate(alike, 1) if other is phase)}" if len(alike) > 1 else ""
    return f"{_VERBS[phase.kind]}{number}"


def _name(run: WholeRun, phase: RunPhase) -> str:
    """Return the title of a phase, with its source line."""
    return _title(run, phase) + (f" ({phase.where})" if phase.where else "")


def _batches(phase: RunPhase) -> str:
    """Return the number of recorded batches, and of all batches of the loader."""
    if not phase.batches:
        return "-"
    length = phase.length if phase.length is not None else phase.batches
    return str(phase.batches) if length <= phase.batches else f"{phase.batches} of {length:,}"


def _table(run: WholeRun, top: int) -> Table:
    """Return a row for each phase of a run; ``top`` rows, 0 for all."""
    fields = [
        name_field("Phase", lambda phase: _title(run, phase)),
        Field("at", lambda phase: phase.where or "-", shrinks_to=14, from_left=True, drop=1),
        Field("batches", _batches, right=True, drop=3),
        number_field("allocated", lambda phase: phase.allocated),
        *([number_field("reserved", lambda phase: phase.reserved, drop=2)] if run.device != "cpu" else []),
        Field("mostly", lambda phase: LABELS[next(iter(phase.causes), "temporary")], shrinks_to=10, drop=4),
        number_field("left by\nearlier", lambda phase: sum(phase.left.values()), drop=1),
        number_field("at its\nend", lambda phase: phase.stays, drop=2),
        number_field("host", lambda phase: phase.host, drop=5),
    ]
    return table_of(run.phases, fields, top)


def _advice(run: WholeRun) -> Iterator[Part]:
    """Yield advice on memory to free at the peak of a phase, each kind for the phase where it is largest."""
    growing = max(run.phases, key=lambda phase: phase.per_batch * (phase.length or 0))
    growth = growing.per_batch * (growing.length or 0)
    if growth > _SHARE * growing.allocated:
        host = "" if run.device == "cpu" else ": move these tensors to the host (.cpu()), or reduce them"
        yield (
            f"Each batch of {_name(run, growing)} leaves {format_bytes(growing.per_batch)} allocated: "
            f"{format_bytes(growth)} after all {growing.length:,}{host}."
        )
    if run.per_epoch > _EPOCH_SHARE * run.allocated:
        after_100 = run.allocated + (100 - 2) * run.per_epoch  # two epochs were recorded
        yield (
            f"Each further epoch leaves {format_bytes(run.per_epoch)} allocated: after 100 epochs the peak is "
            f"{format_bytes(after_100)}."
        )
    graphs = [phase for phase in run.phases if phase.builds_graph]
    if graphs:
        yield (
            f"Gradients are enabled in {_name(run, graphs[0])}, so that autograd saves tensors for a backward pass: "
            "evaluate under torch.no_grad()."
        )
    without_training = [phase for phase in run.phases if phase.kind in ("evaluate", "generate")]
    gradients = max(without_training, key=lambda phase: phase.left.get("parameter_gradient", 0), default=None)
    size = 0 if gradients is None else gradients.left.get("parameter_gradient", 0)
    if gradients is not None and size > _SHARE * gradients.allocated:
        yield (
            f"{format_bytes(size)} of gradients of the last update stay allocated during {_name(run, gradients)}: "
            "optimizer.zero_grad() before it."
        )
    leaving = [phase for phase in run.phases if _left(phase) > _SHARE * phase.allocated]
    if leaving:
        left = max(leaving, key=lambda phase: phase.allocated)
        where = f", most of it from {left.left_at}" if left.left_at else ""
        yield (
            f"{format_bytes(_left(left))} that earlier phases left is still there at the peak of {_name(run, left)}"
            f"{where}: leave the function that holds it, or del it."
        )
    if run.reserved - run.reserved_if_emptied > _SHARE * run.reserved:
        yield (
            "torch.cuda.empty_cache() where phases begin would lower the reserved peak from "
            f"{format_bytes(run.reserved)} to {format_bytes(run.reserved_if_emptied)}."
        )


def _left(phase: RunPhase) -> int:
    """Return the bytes at a phase's peak from earlier phases, without gradients, inputs and libraries' workspaces."""
    meant = ("parameter_gradient", "input", "workspace")
    return sum(size for cause, size in phase.left.items() if cause not in meant)
