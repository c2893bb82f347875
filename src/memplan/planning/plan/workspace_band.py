"""The 95 % interval of a planned step's peak, if cuDNN's workspaces are expected by a model of its choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from memplan.planning.cost.cuda_workspace import ExpectedScratch
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.schedule.to_trace import timeline_of

_DRAWS = 59
"""Samples of the peak. The largest of 59 samples is at least the 0.95 quantile in 95 % of cases (1 - 0.95 ** 59)."""


def workspace_band(
    schedule: Schedule, outside_memory: OutsideMemory, expected: Mapping[int, ExpectedScratch]
) -> tuple[int, int] | None:
    """Return bounds in bytes that hold the peak of reserved bytes in 95 % of steps; None if no op has an expected
    workspace.

    The reserved bytes depend on all workspaces together, as segments that an op leaves can be too small for the next.
    So the step is simulated with workspaces drawn by their probabilities. ``expected`` maps the index of an op to its
    possible workspaces.
    """
    graph = schedule.graph
    # without ops whose workspace was measured
    expected = {
        index: scratch for index, scratch in expected.items() if graph.ops[index].scratch == scratch.sizes.bytes
    }
    if not expected:
        return None
    peaks = [timeline_of(schedule, outside_memory).peak_reserved]
    for seed in range(_DRAWS):
        random = Random(seed)
        drawn = {  # convolutions with the same questions to cuDNN get the same workspace
            scratch.queries: random.choices(scratch.sizes.sizes, scratch.sizes.probabilities)[0]
            for scratch in dict.fromkeys(expected.values())
        }
        ops = tuple(
            replace(op, scratch=drawn[expected[op.index].queries]) if op.index in expected else op for op in graph.ops
        )
        with_drawn = replace(schedule, graph=replace(graph, ops=ops))
        peaks.append(timeline_of(with_drawn, outside_memory).peak_reserved)
    return min(peaks), max(peaks)
