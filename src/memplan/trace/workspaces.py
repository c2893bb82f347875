"""Workspaces of convolutions in a recorded step, as cuDNN says them when it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memplan._bytes import round_to_blocks
from memplan.cudnn.ask import ask
from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.questions import ExecutionPlan, Plans, stairs
from memplan.devices import Device
from memplan.trace.records import Engines
from memplan.trace.semantics.kinds import Asked
from memplan.trace.trace import Trace

_DESCRIBED = "for a described card; a real one can choose others, mostly for weight gradients and kernels of 1"
"""Source: benchmarks/results/cudnn.md."""


def with_workspaces(trace: Trace, asked: Mapping[int, Asked], library: Cudnn, card: Device) -> Trace:
    """Return the step with the bytes of the workspaces that cuDNN was asked for; the others stay intervals.

    What a real card of this name took with this version of cuDNN comes before what cuDNN says of a described one.
    ``asked`` maps a storage to what is asked for it. All are asked at once.
    """
    answers = ask(library, card, (one.question for one in asked.values()))
    storages, engines, measured, answered = list(trace.storages), list[Engines](), list[int](), 0
    for number, one in asked.items():
        plans = answers.plans.get(one.question, ())
        if one.plan == "first" and one.question in answers.measured:
            measured.append(number)
            plans = _as_measured(answers.measured[one.question], plans)
        elif plans:
            answered += 1
        else:
            continue
        sizes = [plan.workspace for plan in plans]
        least, most = min(sizes), max(sizes)
        if one.plan == "any":
            change = {"bytes": most, "low": None if least == most else least}
        else:
            tried = stairs(plans if one.plan == "first" else _largest_first(plans))
            engines.append(Engines(number, tried))
            change = {"bytes": tried[0].workspace, "low": None}
        storages[number] = dataclasses.replace(storages[number], **change)
    said = [f"{library.title} chose the workspaces of {answered} convolutions {_DESCRIBED}"] * (answered > 0)
    said += [f"a real {card.name} took the workspaces of {len(measured)} convolutions with {library.title}, and these "
             "count"] * (len(measured) > 0)  # fmt: skip
    return dataclasses.replace(
        trace, storages=tuple(storages), notes=(*trace.notes, *said, *answers.notes), engines=tuple(engines),
        measured=tuple(measured),
    )  # fmt: skip


def _as_measured(took: int, plans: Plans) -> Plans:
    """Return a plan that takes what a card took, with the engine of cuDNN's that takes as much, and what can follow."""
    same = (plan.engine for plan in plans if round_to_blocks(plan.workspace) == round_to_blocks(took))
    first = ExecutionPlan(next(same, "an engine that it did not name"), took)
    return (first, *(plan for plan in plans if plan.workspace < took))


def _largest_first(plans: Plans) -> Plans:
    return tuple(sorted(plans, key=lambda plan: -plan.workspace))
