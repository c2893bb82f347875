"""Recognizes checks for nan and inf, and returns their results for finite values."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.trace.recording.ledger import Entry, Note

_DEPTH = 4
"""Most ops between a check and the scalar that is read: ``torch.isnan(x).any() | ...``"""
_ANY = ("aten.any", "aten.logical_or", "aten.bitwise_or", "aten.max")
_ALL = ("aten.all", "aten.logical_and", "aten.bitwise_and", "aten.min")
_NOT = ("aten.logical_not", "aten.bitwise_not")


def answer_of_healthy(entry: Entry | None, notes: Sequence[Note], entries: Sequence[Entry]) -> bool | None:
    """Return the result of a check for nan or inf (`torch.isnan(x).any()`) if all values are finite; None for a scalar
    that is no such check.

    `torch.isfinite` is ``(x == x) * (x.abs() != inf)`` (ATen, TensorCompare.cpp), seen in torch 2.11 and 2.13.
    """
    return _answer(entry, notes, entries, _DEPTH)


def _answer(entry: Entry | None, notes: Sequence[Note], entries: Sequence[Entry], depth: int) -> bool | None:
    """Return the result of a check for finite values by the ops that computed it, up to ``depth`` ops back; None if
    these are no check for nan or inf. ``entry``: the check's result; ``notes``, ``entries``: all ops and storages."""
    if entry is None or entry.op is None or entry.dtype != "bool":
        return None
    note = notes[entry.op]
    if note.name.startswith(("aten.isnan", "aten.isinf", "aten.isposinf", "aten.isneginf")):
        return False
    if note.name == "aten.mul.Tensor" and _is_finite(note, notes, entries):
        return True
    if depth == 0 or not note.name.startswith((*_ANY, *_ALL, *_NOT)):
        return None
    answers = [_answer(entries[read], notes, entries, depth - 1) for _, read in note.reads]
    if note.name.startswith(_NOT):
        return None if answers[0] is None else not answers[0]
    decisive = not note.name.startswith(_ANY)  # all finite: "any" is False by one False, "all" is True by one True
    return decisive if decisive in answers else None


def _is_finite(note: Note, notes: Sequence[Note], entries: Sequence[Entry]) -> bool:
    """Return whether a multiplication is the last op of `torch.isfinite`: ``(x == x) * (x.abs() != inf)``."""
    factors = [entries[read].op for _, read in note.reads]
    if len(factors) != 2 or None in factors:
        return False
    equal, unequal = (notes[op] for op in factors if op is not None)
    compares_to_itself = equal.name == "aten.eq.Tensor" and len({read for _, read in equal.reads}) == 1
    return compares_to_itself and unequal.name == "aten.ne.Scalar"
