"""Cache of cuDNN's answers on disk, with a file for each card and version of cuDNN."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan._json import Unreadable, from_plain, parse, read_text
from memplan._text import write_whole
from memplan.cudnn.questions import Plans, Question
from memplan.cudnn.worker_process import DRIVER, SCRIPT
from memplan.dry.library import cache_folder

_FORMAT = "memplan.cudnn 1"
_DAMAGED = ".damaged"
"""Suffix of files that could not be read."""


@dataclass(frozen=True)
class _Content:
    format: str
    answers: dict[str, Plans]
    """By `Question.key`."""


def answers_folder() -> Path:
    """Return the folder of the cache, in memplan's folder below ``XDG_CACHE_HOME``."""
    return cache_folder().parent / "cudnn"


class AnswerCache:
    """The answers of a version of cuDNN for a card. Another description or worker script means another file."""

    def __init__(self, card: str, version: int, properties: Mapping[str, Any]) -> None:
        """Name the cache's file. ``card`` is a name of the catalogue, ``version`` that of cuDNN, and ``properties`` are
        what cuDNN reads of the card (`memplan.cudnn.described_card.properties`)."""
        digest = hashlib.sha256(json.dumps(properties, sort_keys=True).encode())
        for source in (SCRIPT, DRIVER):  # they decide which engines cuDNN offers, and which are left out
            digest.update(source.read_bytes())
        self.file = answers_folder() / f"{card}-{version}-{digest.hexdigest()[:8]}.json"
        self.notes: tuple[str, ...] = ()
        """Messages for the user: why the file could not be read or written."""

    def read(self) -> dict[str, Plans]:
        """Return all answers by `Question.key`; {} if there is no readable file. A damaged file is renamed."""
        try:
            return _read(self.file)
        except FileNotFoundError:
            return {}
        except (OSError, Unreadable) as error:
            renamed = self.file.with_suffix(_DAMAGED)
            self.notes = (f"the cache of cuDNN's answers was damaged ({error}) and is now {renamed}",)
            try:
                self.file.replace(renamed)
            except OSError:
                self.notes = (f"the cache of cuDNN's answers {self.file} cannot be read ({error})",)
            return {}

    def add(self, answers: Mapping[Question, Plans]) -> None:
        """Add answers to the file. If two processes write at once, answers of either process may be lost."""
        stored = self.read() | {question.key: plans for question, plans in answers.items()}
        content = {key: [[plan.engine, plan.workspace] for plan in plans] for key, plans in stored.items()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps([_FORMAT, content], separators=(",", ":")))
        except OSError as error:
            self.notes = (*self.notes, f"cuDNN's answers cannot be kept in {self.file} ({error.strerror})")


def _read(file: Path) -> dict[str, Plans]:
    """Return the answers in a file of the cache, by `Question.key`. Raises OSError or Unreadable."""
    if file.exists() and not file.is_file():  # a pipe would wait for a writer
        raise Unreadable("it is no file")
    content = from_plain(_Content, parse(read_text(file)), "it", rows=True)
    if content.format != _FORMAT:
        raise Unreadable(f"it has the format {content.format!r:.40}")
    if not all(content.answers.values()):
        raise Unreadable("an answer has no plan")
    return content.answers


@dataclass(frozen=True)
class Kept:
    """A file of answers, or the folder of built libraries."""

    path: Path
    what: str
    number: int
    """Count of answers or libraries in it."""
    bytes: int


def kept() -> list[Kept]:
    """Return everything that memplan caches on disk. A file of answers that cannot be read counts 0 answers."""
    entries = list[Kept]()
    for file in sorted(answers_folder().glob("*")):
        try:
            number = len(_read(file))
        except (OSError, Unreadable):
            number = 0
        entries.append(Kept(file, "answers of cuDNN", number, file.lstat().st_size))
    libraries = [path for path in cache_folder().rglob("*.so") if path.is_file()]
    if libraries:
        size = sum(path.stat().st_size for path in libraries)
        entries.append(Kept(cache_folder(), "libraries of emulated cards", len(libraries), size))
    return entries


def clear() -> None:
    """Delete the caches of answers and of built libraries."""
    for folder in (answers_folder(), cache_folder()):
        shutil.rmtree(folder, ignore_errors=True)
