"""The memory of a script's whole run, phase by phase, with all batches of its loaders."""

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
from memplan.studies.runs.extrapolation import extrapolate
from memplan.studies.runs.phases import PhaseKind, PhaseSpan, phases_of
from memplan.trace.program_facts import Ending, Facts
from memplan.trace.records import HOST, Call, Storage
from memplan.trace.trace import Trace

_OF_THE_RUN = ("weight", "buffer", "optimizer_state")
"""Causes of storages that stay allocated throughout the run."""


@dataclass(frozen=True)
class RunPhase:
    """A phase of a run. Sizes are bytes."""

    kind: Literal[PhaseKind, "build"]
    """``build``: everything before the first batch."""
    where: str | None
    batches: int
    """Number of batches that were run."""
    length: int | None
    """Number of batches of the whole loader; None without a loader, or if unknown."""
    allocated: int
    reserved: int
    """Peaks of the phase with all batches of the loader."""
    causes: dict[str, int]
    """Cause -> bytes at the allocated peak."""
    left: dict[str, int]
    """Cause -> bytes at that peak from earlier phases, without weights, buffers and optimizer states."""
    left_at: str | None
    """``file:line`` that allocated the largest tensor in ``left`` other than gradients and workspaces."""
    stays: int
    """Bytes allocated when the phase ends."""
    per_batch: int
    """Bytes that each further batch leaves allocated."""
    builds_graph: bool = False
    """Whether the phase evaluates a model with gradients enabled."""
    host: int = 0
    """Peak of the host's memory, including the loaders' workers."""


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
    """Bytes that the second pass over the training data, with the phases up to a third, leaves allocated."""
    ending: Ending
    """How the recording ended."""
    host: int = 0
    """Peak of the host's memory, in addition to the card's."""


def whole_run(trace: Trace, facts: Facts, *, title: str, settings: str | None = None) -> tuple[WholeRun, Trace]:
    """Return the memory of a script's whole run, and its trace with all batches of its loaders.

    ``trace``: the recorded run, with a step for each of ``facts.parts``.
    """
    parts = facts.parts
    spans = phases_of(parts)
    full, growth = extrapolate(trace, parts, spans)
    timeline = simulate(full, settings=settings)
    host = host_use(full)
    phases = [replace(_phase("build", full, timeline, (timeline.build,)), host=host.build.bytes)]
    for number, span in enumerate(spans):
        peaks = [timeline.steps[part] for part in span.parts]
        phase = _phase(span.kind, full, timeline, peaks, full.steps[span.parts[0]])
        phases.append(
            replace(
                phase, where=span.where, batches=len(span.batches), length=span.length,
                per_batch=growth.get(number, 0), host=max(host.steps[part].bytes for part in span.parts),
                builds_graph=span.kind == "evaluate" and any(parts[part].graph_calls for part in span.parts),
            )
        )  # fmt: skip
    reserved_if_emptied = timeline.peak_reserved
    if trace.device != HOST:  # a card's allocator caches freed blocks: simulate it with the cache emptied at each phase
        empty_cache_calls = (Call(full.steps[span.parts[0]], "empty_cache") for span in spans)
        calls = tuple(sorted((*full.calls, *empty_cache_calls), key=lambda call: call.tick))
        reserved_if_emptied = simulate(replace(full, calls=calls), settings=settings).peak_reserved
    run = WholeRun(
        title, trace.device, tuple(phases), timeline.peak_allocated, timeline.peak_reserved, reserved_if_emptied,
        _growth_per_epoch(full, timeline, spans, facts), facts.ending, host.peak.bytes,
    )  # fmt: skip
    return run, full


def _growth_per_epoch(trace: Trace, timeline: Timeline, spans: Sequence[PhaseSpan], facts: Facts) -> int:
    """Return the bytes that a further epoch leaves allocated; 0 unless the run ended where a third would begin."""
    trained = [span for span in spans if span.kind == "train"]
    if facts.ending != "passes" or len(trained) < 2 or trained[-2].where != trained[-1].where:
        return 0
    begin = trace.steps[trained[-1].parts[0]]
    return max(_allocated_after(timeline, trace.end) - _allocated_after(timeline, begin), 0)


def _phase(
    kind: Literal[PhaseKind, "build"], trace: Trace, timeline: Timeline, peaks: Sequence[StepPeak],
    start: int | None = None,
) -> RunPhase:  # fmt: skip
    """Return the bytes of a phase.

    ``start``: tick at which it begins; None for ``build``.
    """
    highest = max(peaks, key=lambda peak: peak.peak_allocated)
    live = live_at(trace, highest.peak_tick)
    older = [s for s in live if start is not None and s.born <= start and s.cause not in _OF_THE_RUN]
    results = [s for s in older if s.cause not in ("parameter_gradient", "workspace") and s.op is not None]
    largest = max(results, key=lambda storage: storage.bytes, default=None)
    return RunPhase(
        kind, where=None, batches=0, length=None, allocated=highest.peak_allocated,
        reserved=max(peak.peak_reserved for peak in peaks), causes=_by_cause(live), left=_by_cause(older),
        left_at=None if largest is None or largest.op is None else trace.ops[largest.op].where,
        stays=_allocated_after(timeline, peaks[-1].end), per_batch=0,
    )  # fmt: skip


def _by_cause(storages: Sequence[Storage]) -> dict[str, int]:
    """Return the bytes of storages by cause, the largest first."""
    sums = dict[str, int]()
    for storage in storages:
        sums[storage.cause] = sums.get(storage.cause, 0) + storage.bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _allocated_after(timeline: Timeline, tick: int) -> int:
    """Return the bytes allocated right after a tick."""
    index = bisect_right(timeline.events, tick, key=lambda event: event[0])
    return timeline.events[index - 1][1] if index else 0
