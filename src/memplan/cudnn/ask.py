"""Answers questions to cuDNN: by stored answers and the cache, else by cuDNN itself, else by a model of its choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.cudnn.answer_cache import AnswerCache
from memplan.cudnn.cudnn_library import LAST_FOR_OLDER, OLDEST_CAPABILITY, Cudnn, title_of
from memplan.cudnn.described_card import properties
from memplan.cudnn.expected_workspace import ExpectedWorkspace, expected_workspaces
from memplan.cudnn.questions import Plans, Question
from memplan.cudnn.recurrent import RecurrentQuestion, expected_recurrent
from memplan.cudnn.stored_answers import measured, shipped
from memplan.cudnn.worker_process import WorkerError, ask_worker
from memplan.devices import Device
from memplan.errors import DeviceError

AnyQuestion = Question | RecurrentQuestion


@dataclass(frozen=True)
class Answers:
    """cuDNN's execution plans by question."""

    plans: dict[AnyQuestion, Plans]
    notes: tuple[str, ...] = ()
    """Messages for the user: why questions have no answer."""
    measured: dict[AnyQuestion, int] = field(default_factory=dict[AnyQuestion, int])
    """Bytes of workspace that a real card took with this version of cuDNN, or one that chooses alike."""
    expected: dict[AnyQuestion, ExpectedWorkspace] = field(default_factory=dict[AnyQuestion, ExpectedWorkspace])
    """The workspaces of questions without plans: of convolutions by the model of cuDNN's choice, if there is one for
    this card; of recurrent networks by formula."""


def ask(library: Cudnn, card: Device, questions: Iterable[AnyQuestion]) -> Answers:
    """Return cuDNN's plans for convolutions on a card, which this machine need not have, and the workspaces of
    recurrent networks.

    Never raises: questions without an answer are left out of ``plans``. A library that is not installed has only the
    stored answers, of its version or one that chooses alike.

    Example:
        >>> ask(find_cudnn("~/cuda-torch"), find("h100"), [question]).plans[question][0]
        ExecutionPlan(engine='eng38', workspace=13139984)
    """
    library = library.for_card(card.architecture)
    distinct = tuple(dict.fromkeys(questions))
    convolutions = [question for question in distinct if isinstance(question, Question)]
    # an installed library is asked: what other versions answered does not count for it
    workspaces = measured(card.name, library.version, exactly=library.packages is not None)
    by_measurement = {question: workspaces[question.key] for question in distinct if question.key in workspaces}
    answers = _of_convolutions(library, card, convolutions, by_measurement) if convolutions else Answers({})
    recurrent: dict[AnyQuestion, ExpectedWorkspace] = {
        question: expected_recurrent(question, card.architecture)
        for question in distinct if isinstance(question, RecurrentQuestion) and question not in by_measurement
    }  # fmt: skip
    return replace(answers, measured=by_measurement, expected=answers.expected | recurrent)


def _of_convolutions(
    library: Cudnn, card: Device, questions: Sequence[Question], by_measurement: Mapping[AnyQuestion, int]
) -> Answers:
    """Return cuDNN's plans for convolutions, and the expected workspaces of those with neither plans nor a measured
    workspace (``by_measurement``)."""
    plans, notes, reasons = _plans(library, card, questions)
    missing = [question for question in questions if question not in plans and question not in by_measurement]
    expected: dict[AnyQuestion, ExpectedWorkspace] = {**expected_workspaces(card, library.version, missing)}
    if missing and not expected and not reasons:
        reasons[f"there is no model of its choice {_lacking(library, card)}"] = len(missing)
    consequence = "are expected by a model of its choice" if expected else "stay intervals"
    texts = (
        f"{library.title} did not answer for {count} of {len(questions)} convolutions, whose workspaces {consequence}: "
        f"{reason}" for reason, count in reasons.items()
    )  # fmt: skip
    return Answers({**plans}, (*notes, *texts), expected=expected)


def _plans(
    library: Cudnn, card: Device, questions: Sequence[Question]
) -> tuple[dict[Question, Plans], tuple[str, ...], Counter[str]]:
    """Return the plans of convolutions that are stored, cached or that an installed cuDNN answers with.

    Returns:
        The plans; messages about the cache, for the user; reason -> number of questions that an installed cuDNN did not
        answer for it.
    """
    if card.architecture < OLDEST_CAPABILITY and library.version > LAST_FOR_OLDER:
        return {}, (), Counter()  # this cuDNN has no kernels for the card
    installed = library.packages is not None
    try:
        description = properties(card)
    except DeviceError as error:
        return {}, (), Counter({f"it was not queried: {error.found}": len(questions)} if installed else {})
    stored = dict(shipped(card.name, library.version, description, exactly=installed))
    if not installed:
        return {question: stored[question.key] for question in questions if question.key in stored}, (), Counter()
    cache = AnswerCache(card.name, library.version, description)
    stored |= cache.read()
    plans = {question: stored[question.key] for question in questions if question.key in stored}
    new, reasons = _ask_library(library, description, [question for question in questions if question not in plans])
    if new:
        cache.add(new)
    return plans | new, cache.notes, reasons


def _lacking(library: Cudnn, card: Device) -> str:
    """Return what the model of cuDNN's choice does not cover, a version or a compute capability, and why."""
    capability = "for compute capability {}.{}".format(*card.architecture)
    if card.architecture < OLDEST_CAPABILITY:
        last = title_of(LAST_FOR_OLDER).rpartition(".")[0]
        return f"{capability}, for which the last cuDNN is {last} and the last builds of torch are those with CUDA 12.6"
    oldest_modelled = 91900  # 9.19.0
    return "before 9.19" if library.version < oldest_modelled else capability


def _ask_library(
    library: Cudnn, description: dict[str, Any], questions: Sequence[Question]
) -> tuple[dict[Question, Plans], Counter[str]]:
    """Return an installed library's answers, and reason -> number of questions without an answer for it.

    ``description``: of the card, by `memplan.cudnn.described_card.properties`.
    """
    plans, reasons = dict[Question, Plans](), Counter[str]()
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
