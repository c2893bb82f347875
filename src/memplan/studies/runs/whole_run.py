"""What a whole run takes: its phases to their ends, and the largest of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from memplan._display import Displayed
from memplan._json import Saved
from memplan.simulation.host import host_use
from memplan.simulation.simulate import live_at, simulate
from memplan.simulation.timeline import StepPeak, Timeline
from memplan.studies.runs.extended import extended
from memplan.studies.runs.phases import PhaseKind, PhaseSpan, phases_of
from memplan.trace.program_facts import Ending, Facts
from memplan.trace.records import HOST, Call, Storage
from memplan.trace.trace import Trace

_OF_THE_RUN = ("weight", "buffer", "optimizer_state")
"""Causes of storages that are meant to stay throughout."""


@dataclass(frozen=True)
class RunPhase:
    """A phase of a run, in bytes."""

    kind: Literal[PhaseKind, "build"]
    """``build``: all before the first batch."""
    where: str | None
    batches: int
    """Number of batches that were run."""
    length: int | None
    """Number of batches of the whole loader; None without one, or if unknown."""
    allocated: int
    reserved: int
    """Peaks, with all batches of the loader."""
    causes: dict[str, int]
    """Cause -> bytes at the allocated peak."""
    left: dict[str, int]
    """Cause -> bytes at that peak that an earlier phase left, without weights, buffers and optimizer states."""
    left_at: str | None
    """``file:line`` that made most of what was left besides gradients."""
    stays: int
    """Allocated when it ends."""
    per_batch: int
    """What each further batch keeps."""
    builds_graph: bool = False
    """Whether it evaluates with gradients enabled."""
    host: int = 0
    """Peak of the host's memory, with loaders' workers."""


@dataclass(frozen=True, repr=False)
class WholeRun(Saved, Displayed):
    """A run of a script through its phases.

    ``phases`` are in the order in which they begin. ``allocated`` and ``reserved`` are the peaks of all of it.

    Example:
        >>> run = memplan.whole_run("train.py", device="rtx4090")
        >>> [(phase.kind, phase.length) for phase in run.phases]
        [('build', None), ('train', 10), ('save', None)]
    """

    FORMAT: ClassVar[str] = "memplan.run"
    AGAIN: ClassVar[str] = "Follow the script again"

    title: str
    device: str
    phases: tuple[RunPhase, ...]
    allocated: int
    reserved: int
    reserved_if_emptied: int
    """The reserved peak, if `torch.cuda.empty_cache` were called where each phase begins."""
    per_epoch: int
    """What the second pass over the training data, with all that comes before the third, kept more than the first."""
    ending: Ending
    """How the recording ended."""
    host: int = 0
    """Peak of the host's memory, beside the card's."""


def whole_run(trace: Trace, facts: Facts, *, title: str, settings: str | None = None) -> tuple[WholeRun, Trace]:
    """Return what a run takes to its end, and the trace with all batches of its loaders.

    Args:
        trace: of the run, with a step for each of ``facts.parts``.
        facts: of the run.
        title: of the run.
        settings: of the card's caching allocator.
    """
    parts = facts.parts
    spans = phases_of(parts)
    longer, grown = extended(trace, parts, spans)
    timeline = simulate(longer, settings=settings)
    host = host_use(longer)
    phases = [replace(_phase("build", longer, timeline, (timeline.build,)), host=host.build.bytes)]
    for number, span in enumerate(spans):
        peaks = [timeline.steps[part] for part in span.parts]
        phase = _phase(span.kind, longer, timeline, peaks, longer.steps[span.parts[0]])
        phases.append(
            replace(
                phase, where=span.where, batches=len(span.batches), length=span.length,
                per_batch=grown.get(number, 0), host=max(host.steps[part].bytes for part in span.parts),
                builds_graph=span.kind == "evaluate" and any(parts[part].graph_calls for part in span.parts),
            )
        )  # fmt: skip
    emptied = timeline.peak_reserved
    if trace.device != HOST:
        calls = (Call(longer.steps[span.parts[0]], "empty_cache") for span in spans)
        calls = tuple(sorted((*longer.calls, *calls), key=lambda call: call.tick))
        emptied = simulate(replace(longer, calls=calls), settings=settings).peak_reserved
    run = WholeRun(
        title, trace.device, tuple(phases), timeline.peak_allocated, timeline.peak_reserved, emptied,
        _per_epoch(longer, timeline, spans, facts), facts.ending, host.peak.bytes,
    )  # fmt: skip
    return run, longer


def _per_epoch(trace: Trace, timeline: Timeline, spans: Sequence[PhaseSpan], facts: Facts) -> int:
    """Return what a further epoch keeps, of a run that ended where the third would begin; else 0."""
    trained = [span for span in spans if span.kind == "train"]
    if facts.ending != "passes" or len(trained) < 2 or trained[-2].where != trained[-1].where:
        return 0
    return max(_level(timeline, trace.end) - _level(timeline, trace.steps[trained[-1].parts[0]]), 0)


def _phase(
    kind: Literal[PhaseKind, "build"], trace: Trace, timeline: Timeline, peaks: Sequence[StepPeak],
    start: int | None = None,
) -> RunPhase:  # fmt: skip
    """Return the bytes of a phase whose parts have these peaks, and which begins at a tick."""
    highest = max(peaks, key=lambda peak: peak.peak_allocated)
    live = live_at(trace, highest.peak_tick)
    older = [s for s in live if start is not None and s.born <= start and s.cause not in _OF_THE_RUN]
    made = [s for s in older if s.cause not in ("parameter_gradient", "workspace") and s.op is not None]
    largest = max(made, key=lambda storage: storage.bytes, default=None)
    return RunPhase(
        kind, None, 0, None, highest.peak_allocated, max(peak.peak_reserved for peak in peaks), _by_cause(live),
        _by_cause(older), None if largest is None or largest.op is None else trace.ops[largest.op].where,
        _level(timeline, peaks[-1].end), 0,
    )  # fmt: skip


def _by_cause(storages: Sequence[Storage]) -> dict[str, int]:
    """Return cause -> bytes, the largest first."""
    sums = dict[str, int]()
    for storage in storages:
        sums[storage.cause] = sums.get(storage.cause, 0) + storage.bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _level(timeline: Timeline, tick: int) -> int:
    """Return the bytes allocated after a tick."""
    place = bisect_right(timeline.events, tick, key=lambda event: event[0])
    return timeline.events[place - 1][1] if place else 0
