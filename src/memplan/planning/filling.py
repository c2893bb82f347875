"""What to keep of what a step makes again, where room is left: the code of a step can take less than its ops say, by
so much that no aim of the search comes near the budget from below."""

from __future__ import annotations

from dataclasses import replace

from memplan.planning.schedule import Choices, Schedule


def with_more_kept(made: Schedule, room: int) -> Choices:
    """Its choices, but for what is kept instead of made again: by the byte the dearest first, as long as room lasts.

    Args:
        made: what fits.
        room: bytes.
    """
    graph, choices = made.graph, made.choices

    def seconds(value: int) -> float:
        op = graph.values[value].op
        return 0.0 if op is None else graph.ops[op].rerun.seconds

    dearest = sorted(choices.recompute, key=lambda one: (-seconds(one) / max(graph.values[one].bytes, 1), one))
    kept = set[int]()
    for value in dearest:
        if graph.values[value].bytes <= room:
            kept.add(value)
            room -= graph.values[value].bytes
    return replace(choices, recompute=choices.recompute - kept)
