"""cuDNN's answers on disk: a file for each card and version of cuDNN."""

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
from memplan.cudnn.questions import ExecutionPlan, Plans, Question
from memplan.cudnn.worker_process import DRIVER, SCRIPT
from memplan.dry.library import cache_folder

_FORMAT = "memplan.cudnn 1"
_ASIDE = ".damaged"


@dataclass(frozen=True)
class _Content:
    format: str
    answers: dict[str, tuple[ExecutionPlan, ...]]


def answers_folder() -> Path:
    """Return the folder of the files: beside that of the dry card, below ``XDG_CACHE_HOME``."""
    return cache_folder().parent / "cudnn"


class AnswerCache:
    """The answers of one cuDNN for one card as it is described, to questions as they are asked now."""

    def __init__(self, card: str, version: int, properties: Mapping[str, Any]) -> None:
        asked = hashlib.sha256(json.dumps(properties, sort_keys=True).encode())
        for source in (SCRIPT, DRIVER):  # other engines are left out, or offered
            asked.update(source.read_bytes())
        self.file = answers_folder() / f"{card}-{version}-{asked.hexdigest()[:8]}.json"
        self.said: tuple[str, ...] = ()
        """What has to be said of the file."""

    def read(self) -> dict[str, Plans]:
        """Return all answers by the key of their question; a damaged file is moved aside."""
        try:
            return _read(self.file)
        except FileNotFoundError:
            return {}
        except (OSError, Unreadable) as error:
            aside = self.file.with_suffix(_ASIDE)
            self.said = (f"the cache of cuDNN's answers was damaged ({error}) and is now {aside}",)
            try:
                self.file.replace(aside)
            except OSError:
                self.said = (f"the cache of cuDNN's answers {self.file} cannot be read ({error})",)
            return {}

    def add(self, answers: Mapping[Question, Plans]) -> None:
        """Write new answers beside those that are there; of two processes at once one may have to ask again."""
        known = self.read() | {question.key: plans for question, plans in answers.items()}
        content = {key: [[plan.engine, plan.workspace] for plan in plans] for key, plans in known.items()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps([_FORMAT, content], separators=(",", ":")))
        except OSError as error:
            self.said = (*self.said, f"cuDNN's answers cannot be kept in {self.file} ({error.strerror})")


def _read(file: Path) -> dict[str, Plans]:
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
    """A part of what memplan keeps on disk."""

    path: Path
    what: str
    number: int
    """Answers of cuDNN, or built libraries."""
    bytes: int


def kept() -> list[Kept]:
    """Return what memplan keeps on disk: files of answers, of which one that cannot be read has 0, and the libraries
    that were built."""
    found = list[Kept]()
    for file in sorted(answers_folder().glob("*")):
        try:
            number = len(_read(file))
        except (OSError, Unreadable):
            number = 0
        found.append(Kept(file, "answers of cuDNN", number, file.lstat().st_size))
    libraries = [path for path in cache_folder().rglob("*.so") if path.is_file()]
    if libraries:
        size = sum(path.stat().st_size for path in libraries)
        found.append(Kept(cache_folder(), "libraries of emulated cards", len(libraries), size))
    return found


def clear() -> None:
    """Remove all of it."""
    for folder in (answers_folder(), cache_folder()):
        shutil.rmtree(folder, ignore_errors=True)
