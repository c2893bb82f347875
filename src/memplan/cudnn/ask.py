"""Questions to cuDNN for a card: answered from the cache, the rest by cuDNN itself in one go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.cudnn.answer_cache import AnswerCache
from memplan.cudnn.cudnn_library import Cudnn, title_of
from memplan.cudnn.described_card import properties
from memplan.cudnn.questions import Plans, Question
from memplan.cudnn.stored_answers import measured, shipped, versions
from memplan.cudnn.worker_process import WorkerError, ask_worker
from memplan.devices import Device
from memplan.errors import DeviceError


@dataclass(frozen=True)
class Answers:
    """What cuDNN said, by question, and what has to be said where it did not."""

    plans: dict[Question, Plans]
    said: tuple[str, ...] = ()
    measured: dict[Question, int] = field(default_factory=dict[Question, int])
    """Bytes that a real card took with this very cuDNN."""


def ask(library: Cudnn, card: Device, questions: Iterable[Question]) -> Answers:
    """Ask cuDNN for its plans on a card, which need not be there. Never raises: what is not answered is said.

    Example:
        >>> ask(find_cudnn("~/cuda-torch"), find("h100"), [question]).plans[question][0]
        ExecutionPlan(engine='eng38', workspace=13139984)
    """
    asked = tuple(dict.fromkeys(questions))
    took = measured(card.name, library.version)
    real = {question: took[question.key] for question in asked if question.key in took}
    try:
        described = properties(card)
    except DeviceError as error:
        return Answers({}, (f"{library.title} was not asked: {error.found}",), real)
    cache = AnswerCache(card.name, library.version, described)
    known = {**shipped(card.name, library.version, described), **cache.read()}
    found = {question: known[question.key] for question in asked if question.key in known}
    rest = [question for question in asked if question not in found]
    new, reasons = _asked(library, described, rest)
    if new:
        cache.add(new)
    said = tuple(
        f"{library.title} did not answer for {count} of {len(asked)} convolutions, whose workspaces stay intervals: "
        f"{reason}" for reason, count in reasons.items()
    )  # fmt: skip
    return Answers(found | new, (*cache.said, *said), real)


def _asked(
    library: Cudnn, described: dict[str, Any], rest: Sequence[Question]
) -> tuple[dict[Question, Plans], Counter[str]]:
    """Return the library's answers, and how many questions have none, by the reason."""
    new, reasons = dict[Question, Plans](), Counter[str]()
    if rest and library.packages is None:
        stored = ", ".join(map(title_of, versions()))
        reasons[f"its version alone was named, and memplan has stored answers of {stored} for its examples and zoo; "
                "name an environment that has it"] = len(rest)  # fmt: skip
        return new, reasons
    try:
        for question, answer in ask_worker(library, described, rest) if rest else ():
            if isinstance(answer, str):
                reasons[answer] += 1
            else:
                new[question] = answer
    except WorkerError as error:
        reasons[str(error)] = len(rest) - len(new)
    except DeviceError as error:
        reasons[error.found] = len(rest) - len(new)
    return new, reasons
