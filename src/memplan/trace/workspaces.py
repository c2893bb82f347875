"""Replaces the workspace intervals of convolutions in a trace by cuDNN's answers."""

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


def with_workspaces(trace: Trace, queries: Mapping[int, Asked], library: Cudnn, card: Device) -> Trace:
    """Return the trace with workspaces in bytes where cuDNN answers; the others stay intervals.

    A measurement on a real card of this name with this version of cuDNN takes precedence over cuDNN's answer for a
    described card. ``queries``: storage -> what to ask.
    """
    answers = ask(library, card, (query.question for query in queries.values()))
    storages, engines, measured, answered = list(trace.storages), list[Engines](), list[int](), 0
    for storage, query in queries.items():
        plans = answers.plans.get(query.question, ())
        if query.plan == "first" and query.question in answers.measured:
            measured.append(storage)
            plans = _as_measured(answers.measured[query.question], plans)
        elif plans:
            answered += 1
        else:
            continue
        sizes = [plan.workspace for plan in plans]
        least, most = min(sizes), max(sizes)
        if query.plan == "any":
            change = {"bytes": most, "low": None if least == most else least}
        else:
            by_size = sorted(plans, key=lambda plan: -plan.workspace)
            tried = stairs(plans if query.plan == "first" else tuple(by_size))
            engines.append(Engines(storage, tried))
            change = {"bytes": tried[0].workspace, "low": None}
        storages[storage] = dataclasses.replace(storages[storage], **change)
    notes = [f"{library.title} chose the workspaces of {answered} convolutions {_DESCRIBED}"] * (answered > 0)
    notes += [f"a real {card.name} took the workspaces of {len(measured)} convolutions with {library.title}, and these "
             "count"] * (len(measured) > 0)  # fmt: skip
    return dataclasses.replace(
        trace, storages=tuple(storages), notes=(*trace.notes, *notes, *answers.notes), engines=tuple(engines),
        measured=tuple(measured),
    )  # fmt: skip


def _as_measured(size: int, plans: Plans) -> Plans:
    """Return a plan with the measured workspace of ``size`` bytes, followed by cuDNN's plans with smaller ones, which
    torch tries if memory runs out."""
    same = (plan.engine for plan in plans if round_to_blocks(plan.workspace) == round_to_blocks(size))
    first = ExecutionPlan(next(same, "an engine that it did not name"), size)
    return (first, *(plan for plan in plans if plan.workspace < size))
