"""Times of the copies that store and fetch values beside the ops: when each starts, when it is done, who waits.

A copy runs on a stream of its own; of each direction there is one queue, first come, first served.

* Out: the copy begins when the value is made. Its memory is freed after the first op, from the last one of the forward
  pass that reads the value on, by whose end the copy is done: by the seconds of the graph's ops, with what is in the
  queue before it. At the end of the forward pass the step waits for what is not done.
* Back: the value's memory is taken, and the copy begins, as late as it can to be done when the value is first needed,
  with what has to be copied after it. At the beginning of the backward pass that may be too late: then the step waits
  where the value is needed.

What is made again meanwhile, stored or fetched without a copy is not in these seconds. It takes time, too, so that a
copy is done earlier than planned, seen from the ops, and never later. The seconds that the step really waits are
counted with it (`waits`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from memplan.planning.graph.joint_graph import JointGraph, KeptForm

if TYPE_CHECKING:
    from memplan.planning.schedule.actions import Action


def forward_ends(graph: JointGraph) -> list[float]:
    """Seconds at the end of each forward op."""
    return list(accumulate(op.seconds for op in graph.forward_ops))


def backward_begins(graph: JointGraph) -> list[float]:
    """Seconds at which each backward op begins, and at which the last one ends."""
    return list(accumulate((op.seconds for op in graph.backward_ops), initial=0.0))


def in_order(graph: JointGraph, copies: Iterable[KeptForm]) -> list[KeptForm]:
    """Return the copies in the order in which they go out."""
    return sorted(copies, key=lambda form: (graph.maker[form.value].index, form.value))


def stored_after(graph: JointGraph, copies: Iterable[KeptForm]) -> dict[int, int]:
    """By value, the position in ``graph.forward_ops`` of the op after which it is freed."""
    ends = forward_ends(graph)
    position = {op.index: at for at, op in enumerate(graph.forward_ops)}
    last = {value: at for at, op in enumerate(graph.forward_ops) for value in (*op.reads, *op.makes)}
    freed, done = dict[int, int](), 0.0
    for form in in_order(graph, copies):
        done = max(done, ends[position[graph.maker[form.value].index]]) + seconds_of(form)
        freed[form.value] = max(last[form.value], min(bisect_left(ends, done), len(ends) - 1))
    return freed


def seconds_of(copy: KeptForm) -> float:
    """Return the seconds of a copy in one direction."""
    assert copy.copy_seconds is not None, "it is a copy"
    return copy.copy_seconds


def fetched_before(graph: JointGraph, needed: Mapping[int, int], copies: Mapping[int, KeptForm]) -> dict[int, int]:
    """By value, the position in ``graph.backward_ops`` of the op before which its copy back begins.

    Args:
        graph: the graph.
        needed: by value, the position of the op before which it has to be there. The order in which they are copied is
            the order in which they are needed.
        copies: by value, the form that it is copied back from.
    """
    begins, latest = backward_begins(graph), inf
    found = dict[int, int]()
    for value, before in sorted(needed.items(), key=lambda item: (-item[1], -item[0])):
        latest = min(begins[before], latest) - seconds_of(copies[value])
        found[value] = min(before, max(0, bisect_right(begins, latest) - 1))
    return found


def waits(graph: JointGraph, actions: Iterable[Action]) -> dict[int, float]:
    """By value, the seconds that a step waits for its copies: these actions, one after the other, beside two queues."""
    free = {"store": 0.0, "fetch": 0.0}
    """When the queue of each direction is."""
    now, done, found = 0.0, dict[int, float](), dict[int, float]()
    for action in actions:
        form = None if action.form is None else graph.form[action.form]
        if action.kind == "run" and action.op is not None:
            now += action.called(graph).seconds
        elif form is not None and action.kind in ("stored", "fetched"):
            wait = max(0.0, done[form.kept] - now)
            found[form.value] = found.get(form.value, 0.0) + wait
            now += wait
        elif form is not None and form.is_copied:
            done[form.kept] = free[action.kind] = max(free[action.kind], now) + seconds_of(form)
        elif form is not None:
            now += form.store_seconds if action.kind == "store" else form.fetch_seconds
    return found
