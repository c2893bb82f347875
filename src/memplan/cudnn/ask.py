"""Answers questions to cuDNN from stored answers and the cache, and all others by cuDNN itself, in one batch."""

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
    """cuDNN's execution plans by question."""

    plans: dict[Question, Plans]
    notes: tuple[str, ...] = ()
    """Messages for the user: why questions have no answer."""
    measured: dict[Question, int] = field(default_factory=dict[Question, int])
    """Bytes of workspace that a real card took with this version of cuDNN."""


def ask(library: Cudnn, card: Device, questions: Iterable[Question]) -> Answers:
    """Return cuDNN's plans for convolutions on a card, which this machine need not have.

    Never raises: questions without an answer are left out of ``plans``, and ``notes`` say why.

    Example:
        >>> ask(find_cudnn("~/cuda-torch"), find("h100"), [question]).plans[question][0]
        ExecutionPlan(engine='eng38', workspace=13139984)
    """
    distinct = tuple(dict.fromkeys(questions))
    workspaces = measured(card.name, library.version)
    by_measurement = {question: workspaces[question.key] for question in distinct if question.key in workspaces}
    try:
        description = properties(card)
    except DeviceError as error:
        return Answers({}, (f"{library.title} was not asked: {error.found}",), by_measurement)
    cache = AnswerCache(card.name, library.version, description)
    stored = {**shipped(card.name, library.version, description), **cache.read()}
    plans = {question: stored[question.key] for question in distinct if question.key in stored}
    new, reasons = _ask_library(library, description, [question for question in distinct if question not in plans])
    if new:
        cache.add(new)
    notes = tuple(
        f"{library.title} did not answer for {count} of {len(distinct)} convolutions, whose workspaces stay intervals: "
        f"{reason}" for reason, count in reasons.items()
    )  # fmt: skip
    return Answers(plans | new, (*cache.notes, *notes), by_measurement)


def _ask_library(
    library: Cudnn, description: dict[str, Any], questions: Sequence[Question]
) -> tuple[dict[Question, Plans], Counter[str]]:
    """Return the library's answers, and the number of questions without one by reason."""
    plans, reasons = dict[Question, Plans](), Counter[str]()
    if questions and library.packages is None:
        stored = ", ".join(map(title_of, versions()))
        reasons[f"its version alone was named, and memplan has stored answers of {stored} for its examples and zoo; "
                "name an environment that has it"] = len(questions)  # fmt: skip
        return plans, reasons
    try:
        for question, answer in ask_worker(library, description, questions) if questions else ():
            if isinstance(answer, str):
                reasons[answer] += 1
            else:
                plans[question] = answer
    except WorkerError as error:
        reasons[str(error)] = len(questions) - len(plans)
    except DeviceError as error:
        reasons[error.found] = len(questions) - len(plans)
    return plans, reasons
