"""Times of asynchronous copies to and from host memory: when each begins, when it ends, and how long the step waits.

Copies run concurrently with the ops, in one stream for each direction, in the order of issue.

* Device to host: the copy begins when the value is computed. Its memory is freed after the last forward op that reads
  it, or after a later op by whose end the copy and those queued before it are done. At the end of the forward pass the
  step waits for unfinished copies.
* Host to device: memory is allocated and the copy begins as late as possible for it, and the copies queued after it, to
  be done when the values are first needed. Early in the backward pass that may be too late: then the step waits.

These times count the graph's ops only. Recomputation and encodings give copies more time, so relative to the ops they
end earlier than planned, never later. `simulate_waits` counts this work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from memplan.planning.graph.joint_graph import JointGraph, SavedForm

if TYPE_CHECKING:
    from memplan.planning.schedule.actions import Action


def forward_ends(graph: JointGraph) -> list[float]:
    """Return the seconds from the beginning of the forward pass to the end of each op."""
    return list(accumulate(op.seconds for op in graph.forward_ops))


def backward_begins(graph: JointGraph) -> list[float]:
    """Return the seconds from the begin of the backward pass to that of each op, and to its end."""
    return list(accumulate((op.seconds for op in graph.backward_ops), initial=0.0))


def copy_order(graph: JointGraph, copies: Iterable[SavedForm]) -> list[SavedForm]:
    """Return the copies in the order in which they are copied to the host."""
    return sorted(copies, key=lambda form: (graph.maker[form.value].index, form.value))


def device_free_positions(graph: JointGraph, copies: Iterable[SavedForm]) -> dict[int, int]:
    """Return, by value that is copied to host memory, the position in ``graph.forward_ops`` of the op after which its
    memory on the device is freed: the last op that reads it, or a later one during which the copy ends."""
    op_ends = forward_ends(graph)
    position_of = {op.index: position for position, op in enumerate(graph.forward_ops)}
    last_use = {value: position for position, op in enumerate(graph.forward_ops) for value in (*op.reads, *op.makes)}
    freed_after, copy_end = dict[int, int](), 0.0
    for form in copy_order(graph, copies):
        computed_at = op_ends[position_of[graph.maker[form.value].index]]
        copy_end = max(copy_end, computed_at) + copy_seconds_of(form)  # after the copy before it
        running_at_end = min(bisect_left(op_ends, copy_end), len(op_ends) - 1)
        freed_after[form.value] = max(last_use[form.value], running_at_end)
    return freed_after


def copy_seconds_of(copy: SavedForm) -> float:
    """Return the seconds of a copy between device and host, the same in either direction."""
    assert copy.copy_seconds is not None, "it is a copy"
    return copy.copy_seconds


def fetch_positions(graph: JointGraph, needed: Mapping[int, int], copies: Mapping[int, SavedForm]) -> dict[int, int]:
    """Return, by value, the position in ``graph.backward_ops`` of the op before which its copy to the device begins.
    ``needed`` has the position of the op that needs a value first: values are copied in this order. ``copies`` has the
    forms in host memory."""
    op_starts, latest_start = backward_begins(graph), inf
    positions = dict[int, int]()
    from_last = sorted(needed.items(), key=lambda item: (-item[1], -item[0]))
    for value, needed_at in from_last:
        # it has to be done when its value is needed and when the copy after it begins
        latest_start = min(op_starts[needed_at], latest_start) - copy_seconds_of(copies[value])
        positions[value] = min(needed_at, max(0, bisect_right(op_starts, latest_start) - 1))
    return positions


def simulate_waits(graph: JointGraph, actions: Iterable[Action]) -> dict[int, float]:
    """Return the seconds that a step waits for the copies of each value, by value.

    Copies run concurrently with the ops, one after another in each direction.
    """
    now, wait_of = 0.0, dict[int, float]()
    queue_end = {"store": 0.0, "fetch": 0.0}
    """Seconds at which the last copy of each direction is done."""
    copied_at = dict[int, float]()
    """By encoded value: seconds at which its last copy is done."""
    for action in actions:
        form = None if action.encoding is None else graph.form_by_encoded[action.encoding]
        if action.kind == "run" and action.op is not None:
            now += action.called_op(graph).seconds
        elif form is not None and action.kind in ("stored", "fetched"):  # it waits for the end of a copy
            wait = max(0.0, copied_at[form.encoded] - now)
            wait_of[form.value] = wait_of.get(form.value, 0.0) + wait
            now += wait
        elif form is not None and form.is_copied:
            queue_end[action.kind] = max(queue_end[action.kind], now) + copy_seconds_of(form)
            copied_at[form.encoded] = queue_end[action.kind]
        elif form is not None:
            now += form.store_seconds if action.kind == "store" else form.fetch_seconds
    return wait_of
