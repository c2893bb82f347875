"""Replaces the workspace intervals in a trace by cuDNN's answers, or by expected workspaces."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

from memplan._bytes import round_to_blocks
from memplan.cudnn.ask import AnyQuestion, ask
from memplan.cudnn.cudnn_library import OLDEST_CAPABILITY, Cudnn
from memplan.cudnn.expected_workspace import ExpectedWorkspace, is_unlearned
from memplan.cudnn.questions import ExecutionPlan, Plans, Question, stairs
from memplan.cudnn.recurrent import RecurrentQuestion
from memplan.devices import Device
from memplan.trace.live_bytes import live_bytes
from memplan.trace.records import Engines, ExpectedSize, Storage
from memplan.trace.semantics.kinds import WorkspaceQuery
from memplan.trace.trace import Trace

_DESCRIBED = "for a described card; a real one can choose others, mostly for weight gradients and kernels of 1"
"""Source: benchmarks/results/cudnn.md."""
BAND = 0.95
"""Probability with which the peak lies in the band of `ExpectedSize`."""
_FORMULA, _NOTHING = 0.01, 64 << 10
"""Error of the formulas: this share of a workspace; and bytes up to which a workspace counts as 0."""


def with_workspaces(trace: Trace, queries: Mapping[int, WorkspaceQuery], library: Cudnn, card: Device) -> Trace:
    """Return the trace with workspaces in bytes if cuDNN or a model of its choice has an answer; others stay intervals.

    A measurement on a real card of this name with this version of cuDNN takes precedence over cuDNN's answer for a
    described card, and the latter over an expected workspace. ``queries``: storage -> query to cuDNN.
    """
    library = library.for_card(card.architecture)
    answers = ask(library, card, (query.question for query in queries.values()))
    storages, engines, measured, answered = list(trace.storages), list[Engines](), list[int](), 0
    predicted = dict[int, AnyQuestion]()
    for storage, query in queries.items():
        plans = answers.plans.get(query.question, ())
        if query.plan == "first" and query.question in answers.measured:
            measured.append(storage)
            plans = _as_measured(answers.measured[query.question], plans)
        elif plans:
            answered += 1
        elif query.plan == "first" and query.question in answers.expected:
            predicted[storage] = query.question
            size = answers.expected[query.question].bytes
            storages[storage] = dataclasses.replace(storages[storage], bytes=size, low=None)
        if not plans:
            continue
        if query.plan == "any":  # the fastest, which is not known here: an interval
            sizes = [plan.workspace for plan in plans]
            low = None if min(sizes) == max(sizes) else min(sizes)
            storages[storage] = dataclasses.replace(storages[storage], bytes=max(sizes), low=low)
            continue
        if query.plan == "largest":  # all are tried, in a workspace for the largest
            plans = tuple(sorted(plans, key=lambda plan: -plan.workspace))
        tried = stairs(plans)  # the plans that torch tries one after the other, each with less workspace
        engines.append(Engines(storage, tried))
        storages[storage] = dataclasses.replace(storages[storage], bytes=tried[0].workspace, low=None)
    notes = _notes(library, card, answered, [queries[storage].question for storage in measured], [*predicted.values()])
    trace = dataclasses.replace(
        trace, storages=tuple(storages), notes=(*trace.notes, *notes, *answers.notes), engines=tuple(engines),
        measured=tuple(measured),
    )  # fmt: skip
    return dataclasses.replace(trace, expected=_band(trace, predicted, answers.expected)) if predicted else trace


def _notes(
    library: Cudnn, card: Device, answered: int, measured: Sequence[AnyQuestion], predicted: Sequence[AnyQuestion]
) -> list[str]:
    """Return the notes on where the bytes of workspaces come from.

    ``answered``: number of workspaces from cuDNN itself. ``measured``, ``predicted``: the questions of workspaces that
    are measured on a real card, or expected.
    """
    build = (
        "builds of torch with CUDA 12.6 come"
        if card.architecture < OLDEST_CAPABILITY
        else "the CUDA build of this torch comes"
    )
    name = library.title + (f", which {build} with," if library.is_default and library.packages is None else "")
    notes: list[str] = []
    if answered:
        notes.append(f"{name} chose the workspaces of {answered} convolutions {_DESCRIBED}")
    if measured:
        notes.append(
            f"a real {card.name} took the workspaces of {_counted(measured)} with {name.rstrip(',')}, and these count"
        )
    recurrent = sum(isinstance(question, RecurrentQuestion) for question in predicted)
    if len(predicted) > recurrent:
        notes.append(
            f"the workspaces of {len(predicted) - recurrent} convolutions are those that {name} is expected to choose; "
            "for its own answer: pip install memplan[cudnn], or --cudnn ENVIRONMENT (cudnn= in Python)"
        )
    unlearned = sum(isinstance(question, Question) and is_unlearned(question) for question in predicted)
    if unlearned:
        notes.append(
            f"{unlearned} of these convolutions have tensors of 2^31 elements or more, beyond all from which that is "
            "expected: the band is wide for them"
        )
    if recurrent:
        notes.append(
            f"the workspaces of {recurrent} calls of recurrent networks are expected by a formula from seven that an "
            "H100 and an H200 ran; cuDNN names them on a card only"
        )
    return notes


def _counted(questions: Iterable[AnyQuestion]) -> str:
    """Return a count of the questions by kind: "3 convolutions and 2 calls of recurrent networks"."""
    kinds = Counter(
        "calls of recurrent networks" if isinstance(question, RecurrentQuestion) else "convolutions"
        for question in questions
    )
    return " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), reverse=True))


def _as_measured(size: int, plans: Plans) -> Plans:
    """Return a plan with the measured workspace of ``size`` bytes, followed by cuDNN's plans with smaller workspaces,
    which torch tries if memory runs out."""
    same = (plan.engine for plan in plans if round_to_blocks(plan.workspace) == round_to_blocks(size))
    first = ExecutionPlan(next(same, "an engine that it did not name"), size)
    return (first, *(plan for plan in plans if plan.workspace < size))


def _band(
    trace: Trace, predicted: Mapping[int, AnyQuestion], expected: Mapping[AnyQuestion, ExpectedWorkspace]
) -> tuple[ExpectedSize, ...]:
    """Return the workspaces at both ends of the band that contains the allocated peak with probability `BAND`.

    The choices for different convolutions are independent, and equal convolutions get the same workspace. So the
    probability of a peak of at most P is the product, over convolutions, of the probability that the workspace fits
    into P minus the other live bytes. At an end of the band, all workspaces are at the same quantile, for which the
    peak is that end.

    Args:
        trace: with the expected workspaces as the bytes of their storages.
        predicted: storage of an expected workspace -> its question.
        expected: question -> the possible workspaces, with probabilities.
    """
    counted = (storage for storage in trace.counted if storage.id not in predicted)
    levels = list(live_bytes(counted, size=lambda storage: round_to_blocks(storage.bytes)))
    peak_of_others = max((level for _, level in levels), default=0)
    distinct = {question: _Sizes(expected[question]) for question in predicted.values()}
    most_others = dict[AnyQuestion, int]()  # peak of the other live bytes while the workspace is allocated
    for storage, question in predicted.items():
        most_others[question] = max(most_others.get(question, 0), _most_live(levels, trace.storages[storage]))

    def peak_at(quantile: float) -> int:
        """Return the allocated peak with all expected workspaces at a quantile."""
        moments = (most_others[question] + sizes.blocks_at(quantile) for question, sizes in distinct.items())
        return max(peak_of_others, *moments)

    def probability(peak: int) -> float:
        """Return the probability that the allocated peak is at most ``peak`` bytes, if no other peak is larger."""
        product = 1.0
        for question, sizes in distinct.items():
            product *= sizes.probability_of_at_most(peak - most_others[question])
        return product

    moments = (most_others[question] + size for question, sizes in distinct.items() for size in sizes.blocks)
    peaks = sorted({max(peak_of_others, moment) for moment in moments})
    quantiles = sorted({0.0, *(quantile for sizes in distinct.values() for quantile in sizes.cumulative)})
    tail = (1 - BAND) / 2
    ends = [bisect_left(peaks, quantile, key=probability) for quantile in (tail, 1 - tail)]
    low, high = (peaks[min(end, len(peaks) - 1)] for end in ends)
    # the last quantile whose peak is at most `low`, and the first whose peak is at least `high`
    lowest = quantiles[max(0, bisect_right(quantiles, low, key=peak_at) - 1)]
    highest = quantiles[min(bisect_left(quantiles, high, key=peak_at), len(quantiles) - 1)]
    # widened by the error of the formulas for the sizes
    return tuple(
        ExpectedSize(
            storage,
            int(min(distinct[question].at(lowest), trace.storages[storage].bytes) * (1 - _FORMULA)),
            int(max(distinct[question].at(highest), trace.storages[storage].bytes) * (1 + _FORMULA)) + _NOTHING,
        )
        for storage, question in sorted(predicted.items())
    )


class _Sizes:
    """The possible workspaces of a convolution, in ascending order, with their cumulative probabilities."""

    def __init__(self, expected: ExpectedWorkspace) -> None:
        """``expected``: possible sizes in ascending order, with their probabilities."""
        self.sizes = expected.sizes
        """Bytes as requested."""
        self.blocks = [round_to_blocks(size) for size in expected.sizes]
        """Bytes in the allocator's blocks."""
        self.cumulative = [min(1.0, total) for total in accumulate(expected.probabilities)]
        """By workspace: the probability that it is this one or a smaller one."""
        self.cumulative[-1] = 1.0  # whatever the rounding of the sum

    def at(self, quantile: float) -> int:
        """Return the workspace in bytes at a quantile."""
        return self.sizes[bisect_left(self.cumulative, quantile)]

    def blocks_at(self, quantile: float) -> int:
        """Return the bytes of the allocator's blocks for the workspace at a quantile."""
        return self.blocks[bisect_left(self.cumulative, quantile)]

    def probability_of_at_most(self, size: int) -> float:
        """Return the probability that the workspace fits into ``size`` bytes of blocks."""
        count = bisect_right(self.blocks, size)
        return self.cumulative[count - 1] if count else 0.0


def _most_live(levels: list[tuple[int, int]], storage: Storage) -> int:
    """Return the peak of ``levels``, (tick, live bytes after it), during the lifetime of a storage."""
    first = max(0, bisect_left(levels, storage.born, key=itemgetter(0)) - 1)  # the level at the allocation
    end = len(levels) if storage.died is None else bisect_left(levels, storage.died, key=itemgetter(0))
    return max((level for _, level in levels[first:end]), default=0)
