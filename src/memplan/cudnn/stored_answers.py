"""What the package knows by itself: workspaces that a real card took, and cuDNN's answers for the examples and the zoo.

Both files are made by ``tools/cudnn_answers.py``: the first of the steps that a real card has run, the second by
asking cuDNN.
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
from memplan.cudnn.questions import ExecutionPlan, Plans

FOLDER = Path(__file__).with_name("answers")
MEASURED, SHIPPED = FOLDER / "measured.json.gz", FOLDER / "shipped.json.gz"


@dataclass(frozen=True)
class OfCard:
    """Answers for one card and one version of cuDNN, in the order of the file's questions; None: it has none."""

    card: str
    version: int
    described: str
    """`digest_of` the card's description."""
    answers: tuple[tuple[ExecutionPlan, ...] | None, ...]


@dataclass(frozen=True)
class Shipped:
    """cuDNN's answers."""

    questions: tuple[str, ...]
    cards: tuple[OfCard, ...]


@dataclass(frozen=True)
class Measured:
    """Bytes of workspaces that a real card took, by the key of the question."""

    card: str
    version: int
    torch: str
    workspaces: dict[str, int]


@dataclass(frozen=True)
class AllMeasured:
    """What each real card took."""

    cards: tuple[Measured, ...]


def digest_of(described: Mapping[str, Any]) -> str:
    """Return a short text that is equal for equal descriptions of a card."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]


def shipped(card: str, version: int, described: Mapping[str, Any]) -> Mapping[str, Plans]:
    """Return the stored answers of a cuDNN for a card as it is described now, by the key of the question."""
    key = (card, version, digest_of(described))
    stored = _shipped()
    of = next((one for one in stored.cards if (one.card, one.version, one.described) == key), None)
    if of is None:
        return {}
    return {question: plans for question, plans in zip(stored.questions, of.answers, strict=True) if plans}


def measured(card: str, version: int) -> Mapping[str, int]:
    """Return the bytes that workspaces took on the real card with this cuDNN, by the key of the question."""
    of = (one for one in _measured().cards if (one.card, one.version) == (card, version))
    return next((one.workspaces for one in of), {})


def versions() -> tuple[int, ...]:
    """Return the versions of cuDNN that answers are stored of."""
    return tuple(sorted({one.version for one in _shipped().cards}))


@functools.cache
def _shipped() -> Shipped:
    return from_plain(Shipped, parse(_text(SHIPPED)), "it", rows=True)


@functools.cache
def _measured() -> AllMeasured:
    return from_plain(AllMeasured, parse(_text(MEASURED)), "it", rows=True)


def _text(file: Path) -> str:
    return gzip.decompress(file.read_bytes()).decode()
