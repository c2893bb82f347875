"""Questions to cuDNN for a card: answered from the cache, the rest by cuDNN itself in one go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from memplan.cudnn.answer_cache import AnswerCache
from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.described_card import properties
from memplan.cudnn.questions import Plans, Question
from memplan.cudnn.worker_process import WorkerError, ask_worker
from memplan.devices import Device
from memplan.errors import DeviceError


@dataclass(frozen=True)
class Answers:
    """What cuDNN said, by question, and what has to be said where it did not."""

    plans: dict[Question, Plans]
    said: tuple[str, ...] = ()


def ask(library: Cudnn, card: Device, questions: Iterable[Question]) -> Answers:
    """Ask cuDNN for its plans on a card, which need not be there. Never raises: what is not answered is said.

    Example:
        >>> ask(find_cudnn("~/cuda-torch"), find("h100"), [question]).plans[question][0]
        ExecutionPlan(engine='eng38', workspace=13139984)
    """
    asked = tuple(dict.fromkeys(questions))
    try:
        described = properties(card)
    except DeviceError as error:
        return Answers({}, (f"{library.title} was not asked: {error.found}",))
    cache = AnswerCache(card.name, library.version, described)
    known = cache.read()
    found = {question: known[question.key] for question in asked if question.key in known}
    rest = [question for question in asked if question not in found]
    new, reasons = dict[Question, Plans](), Counter[str]()
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
    if new:
        cache.add(new)
    said = tuple(
        f"{library.title} did not answer for {count} of {len(asked)} convolutions, whose workspaces stay intervals: "
        f"{reason}" for reason, count in reasons.items()
    )  # fmt: skip
    return Answers(found | new, (*cache.said, *said))
