"""Plan a step without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memplan.planning.graph.placement import is_on_card
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import request
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, Engine, PlanOptions
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import public, recording_suspended, undisturbed
from memplan.trace.step import StepOptions


@public
def plan(
    model: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    budget: Any = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    allow: Allow = "exact",
    engine: Engine = "graph",
    early: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    plan: Plan | None = None,
    heuristics: Heuristics | None = None,
    costs: Mapping[str, float] | str | None = None,
) -> Plan:
    """Plan a training step for a budget of bytes; the model does not run, and is not changed.

    Args:
        model: a module, or a callable that makes one; then nothing of it is ever allocated.
        inputs, kwargs, targets, loss, autocast: as for `memplan.explain`.
        budget: bounds everything on the device at any moment of the step: bytes, a size ("6 GiB"), a card's name, or
            what is relative to the step without a plan ("70%", "-2 GiB").
        optimizer: a callable of the parameters. Its state and its update are part of the step then.
        device: a card to estimate seconds for, instead of this machine. Values may then wait for the backward pass in
            host memory, where that is cheaper than recomputing them.
        allow: ``"exact"``: only what leaves the result the same, bit for bit. ``"lossy"``: also computing and saving in
            fewer bits, where that makes the step faster, or is the only way to fit (see `Plan.precision`).
        engine: what runs it: ``"graph"``, torch's kernels one by one, or ``"inductor"``, fused ones.
        early: update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient.
        accumulate: micro-batches between two updates; with more than one, gradients are held when a step begins.
        clip_norm: global norm at which gradients are clipped; no update can be early then.
        plan: an earlier plan for this model and these inputs, which is checked against this budget.
        heuristics: switches of the search.
        costs: seconds by op, as ``memplan.planning.cost.op_timing.costs_of`` gives them; ``"roofline"`` for estimates
            that are the same on every machine; None: measured on this one, which differs a little from run to run.

    Raises:
        BudgetError: no plan fits; ``smallest_budget`` is the smallest for which one was found.
        UsageError, RecordingError: an argument is wrong, or the step cannot be captured.

    Example:
        >>> print(memplan.plan(model, images, targets=labels, loss=F.cross_entropy, budget="1.5 MiB"))
        A step on cpu in the budget of 1.5 MiB: predicted peak ...
    """
    options = PlanOptions(
        budget=budget, device=device, allow=allow, engine=engine, gradients=GradientUse(updates=early),
        accumulate=accumulate, clip_norm=clip_norm, plan=plan, heuristics=heuristics or Heuristics(), costs=costs,
        host_memory=True,
    )  # fmt: skip
    with recording_suspended(), undisturbed(cuda=is_on_card(model)):
        asked = request(model, StepOptions(inputs, kwargs, targets, loss, optimizer, autocast), options, fake=True)
        with asked.under_autocast():
            planner = Planner(asked.step)
            asked = planner.bounded(asked, key=0)
            return planner.planned(asked.call, asked.settings, asked.bytes, key=0).plan
