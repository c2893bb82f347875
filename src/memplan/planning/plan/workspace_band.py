"""The band that holds a planned step's peak in 95 % of steps, where cuDNN's workspaces are expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from memplan.planning.cost.cuda_workspace import ExpectedScratch
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.schedule.to_trace import timeline_of

_DRAWS = 59
"""Another draw exceeds the most of n with a probability of 1 / (n + 1). Of 59, the most is at least the quantile of
0.95 in 95 % of cases (1 - 0.95 ** 59)."""


def workspace_band(
    schedule: Schedule, outside_memory: OutsideMemory, expected: Mapping[int, ExpectedScratch]
) -> tuple[int, int] | None:
    """Return the lower and upper end of the peak of reserved bytes; None where no op's scratch is an expected one.

    What the allocator reserves follows from all workspaces together: segments that one left are too small for the next.
    So the step is simulated with workspaces drawn by their probabilities.

    Args:
        schedule: the planned step.
        outside_memory: what lives beside it.
        expected: op of its graph -> the possible scratch.
    """
    graph = schedule.graph
    # ops of which the scratch was measured keep it
    expected = {index: one for index, one in expected.items() if graph.ops[index].scratch == one.sizes.bytes}
    if not expected:
        return None
    peaks = [timeline_of(schedule, outside_memory).peak_reserved]
    for number in range(_DRAWS):
        random = Random(number)
        drawn = {
            one.asked: random.choices(one.sizes.sizes, one.sizes.probabilities)[0]
            for one in dict.fromkeys(expected.values())
        }
        ops = tuple(
            replace(op, scratch=drawn[expected[op.index].asked]) if op.index in expected else op for op in graph.ops
        )
        peaks.append(timeline_of(replace(schedule, graph=replace(graph, ops=ops)), outside_memory).peak_reserved)
    return min(peaks), max(peaks)
