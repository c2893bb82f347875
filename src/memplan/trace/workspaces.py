"""Workspaces of convolutions in a recorded step, as cuDNN says them when it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memplan.cudnn.ask import ask
from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.questions import Plans, stairs
from memplan.devices import Device
from memplan.trace.records import Engines
from memplan.trace.semantics.kinds import Asked
from memplan.trace.trace import Trace

_DESCRIBED = "for a described card; a real one can choose others, mostly for weight gradients and kernels of 1"
"""Source: benchmarks/results/cudnn.md."""


def with_workspaces(trace: Trace, asked: Mapping[int, Asked], library: Cudnn, card: Device) -> Trace:
    """Return the step with the bytes of the workspaces that cuDNN was asked for; the others stay intervals.

    ``asked`` maps a storage to what is asked for it. All are asked at once.
    """
    answers = ask(library, card, (one.question for one in asked.values()))
    storages, engines, answered = list(trace.storages), list[Engines](), 0
    for number, one in asked.items():
        plans = answers.plans.get(one.question)
        if plans is None:
            continue
        answered += 1
        sizes = [plan.workspace for plan in plans]
        least, most = min(sizes), max(sizes)
        if one.plan == "any":
            change = {"bytes": most, "low": None if least == most else least}
        else:
            tried = stairs(plans if one.plan == "first" else _largest_first(plans))
            engines.append(Engines(number, tried))
            change = {"bytes": tried[0].workspace, "low": None}
        storages[number] = dataclasses.replace(storages[number], **change)
    said = (f"{library.title} chose the workspaces of {answered} convolutions {_DESCRIBED}",)
    notes = (*trace.notes, *(said if answered else ()), *answers.said)
    return dataclasses.replace(trace, storages=tuple(storages), notes=notes, engines=tuple(engines))


def _largest_first(plans: Plans) -> Plans:
    return tuple(sorted(plans, key=lambda plan: -plan.workspace))
