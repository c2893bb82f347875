"""Answers that the package ships: workspaces measured on real cards, and cuDNN's answers for the examples and the zoo.

``tools/cudnn_answers.py`` writes both files: the first from recorded steps of real cards, the second by asking cuDNN.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan._json import from_plain, parse
from memplan.cudnn.expected_workspace import family_of
from memplan.cudnn.questions import ExecutionPlan, Plans

FOLDER = Path(__file__).with_name("answers")
MEASURED, SHIPPED = FOLDER / "measured.json.gz", FOLDER / "shipped.json.gz"


@dataclass(frozen=True)
class CardAnswers:
    """Answers of a version of cuDNN for a card."""

    card: str
    version: int
    described: str
    """`digest_of` the card's description."""
    answers: tuple[tuple[ExecutionPlan, ...] | None, ...]
    """In the order of the file's questions; None: no answer."""


@dataclass(frozen=True)
class Shipped:
    """The file of cuDNN's answers."""

    questions: tuple[str, ...]
    cards: tuple[CardAnswers, ...]


@dataclass(frozen=True)
class Measured:
    """Bytes of the workspaces that a real card took, by `Question.key`."""

    card: str
    version: int
    torch: str
    workspaces: dict[str, int]


@dataclass(frozen=True)
class AllMeasured:
    """The file of measured workspaces."""

    cards: tuple[Measured, ...]


def digest_of(description: Mapping[str, Any]) -> str:
    """Return a short digest of a card's description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]


def shipped(card: str, version: int, description: Mapping[str, Any], *, exactly: bool = True) -> Mapping[str, Plans]:
    """Return the answers of a version of cuDNN for a card with this description, by `Question.key`; {}: none stored.

    Args:
        card: its name.
        version: of cuDNN.
        description: the card as it is described to cuDNN.
        exactly: whether answers of other versions that choose alike (`family_of`) do not count.
    """
    stored, described = _shipped(), digest_of(description)
    for entry in stored.cards:
        is_card = (entry.card, entry.described) == (card, described)
        if is_card and _counts(entry.version, version, exactly):
            answers = zip(stored.questions, entry.answers, strict=True)
            return {question: plans for question, plans in answers if plans}
    return {}


def measured(card: str, version: int, *, exactly: bool = True) -> Mapping[str, int]:
    """Return the bytes of workspaces measured on a real card with this version, by `Question.key`; {}: none stored.

    ``exactly``: whether workspaces of other versions that choose alike (`family_of`) do not count.
    """
    for entry in _measured().cards:
        if entry.card == card and _counts(entry.version, version, exactly):
            return entry.workspaces
    return {}


def versions() -> tuple[int, ...]:
    """Return the versions of cuDNN with stored answers."""
    return tuple(sorted({entry.version for entry in _shipped().cards}))


def _counts(stored: int, version: int, exactly: bool) -> bool:
    """Return whether answers of version ``stored`` count for ``version``: the same, or a version that chooses alike
    unless ``exactly``."""
    return stored == version or (not exactly and family_of(stored) == family_of(version))


@functools.cache
def _shipped() -> Shipped:
    """Return cuDNN's answers that the package ships."""
    return from_plain(Shipped, parse(_text(SHIPPED)), "it", rows=True)


@functools.cache
def _measured() -> AllMeasured:
    """Return the measured workspaces that the package ships."""
    return from_plain(AllMeasured, parse(_text(MEASURED)), "it", rows=True)


def _text(file: Path) -> str:
    """Return the text of a compressed file."""
    return gzip.decompress(file.read_bytes()).decode()
