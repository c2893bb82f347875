"""Plan a step without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from memplan.errors import BudgetError
from memplan.planning.graph.placement import is_on_card
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import request
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, Engine, PlanOptions
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import called, public, recording_suspended, undisturbed
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
        model: a module, or a callable that returns one; then the model is never allocated.
        inputs, kwargs, targets, loss, autocast: as for `memplan.explain`.
        budget: limit of all memory on the device at any time of the step: bytes, a size ("6 GiB"), a card's name, or
            relative to the step without a plan ("70%", "-2 GiB").
        optimizer: a callable of the parameters. The step then includes its state and its update.
        device: a card to estimate seconds for, instead of this machine. Values may then wait for the backward pass in
            host memory, where that is cheaper than recomputing them.
        allow: ``"exact"``: results are the same, bit for bit. ``"reordered"``: on the CPU, segments of the step may run
            piece by piece if it does not fit otherwise, which adds in another order (see `Plan.tiles`), and on any
            device kernels of `memplan.kernels` may replace groups of ops (see `Plan.kernels`). ``"lossy"``: compute
            and save in fewer bits, if that makes the step faster or is necessary to fit, and store the moments of Adam
            in 8 bits if nothing else fits (see `Plan.precision`).
        engine: ``"graph"`` runs torch's own kernels one by one, ``"inductor"`` fused kernels.
        early: update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient.
        accumulate: micro-batches per update; with more than one, gradients exist when a step begins.
        clip_norm: global norm at which gradients are clipped; excludes ``early``.
        plan: an earlier plan for this model and these inputs, to be checked against this budget.
        heuristics: switches of the search.
        costs: seconds by op from ``memplan.planning.cost.op_timing.costs_of``, or ``"roofline"`` for estimates that are
            the same on every machine; None: measured on this machine, which varies slightly from run to run.

    Raises:
        BudgetError: no plan fits; ``smallest_budget`` is the smallest budget with a plan, of those that were computed:
            moments in 8 bits are planned only where they may meet the budget.
        UsageError, RecordingError: an argument is invalid, or the step cannot be captured.

    Example:
        >>> print(memplan.plan(model, images, targets=labels, loss=F.cross_entropy, budget="1.5 MiB").summary)
        A step on cpu in the budget of 1.5 MiB: predicted peak ...
    """
    options = PlanOptions(
        budget=budget, device=device, allow=allow, engine=engine, gradients=GradientUse(updates_early=early),
        accumulate=accumulate, clip_norm=clip_norm, plan=plan, heuristics=heuristics or Heuristics(), costs=costs,
        host_memory=True,
    )  # fmt: skip
    return _planned(model, StepOptions(inputs, kwargs, targets, loss, optimizer, autocast), options)


def plan_with_own_optimizer(model: Any, step: StepOptions, options: PlanOptions) -> Plan:
    """Plan the step of a program that trains by its own optimizer, as `plan`: moments are never in 8 bits, since these
    take another optimizer."""
    with called("memplan.plan"):
        return _planned(model, step, replace(options, host_memory=True, moments_in_8_bits=False))


def plan_or_floor(model: Any, step: StepOptions, budget: int, device: str | None) -> Plan | int:
    """Return the cheapest exact plan of a step by the costs of a roofline, or the smallest budget that has one.

    Faster than `plan` where nothing fits: no other settings are tried for the error's advice. Raises UsageError and
    RecordingError as `plan`."""
    options = PlanOptions(budget=budget, device=device, costs="roofline", host_memory=True)
    with called("memplan.plan"):
        try:
            return _planned(model, step, options, remedies=False)
        except BudgetError as error:
            return error.smallest_budget


def _planned(model: Any, step: StepOptions, options: PlanOptions, *, remedies: bool = True) -> Plan:
    """Check the arguments and plan the step. ``remedies``: whether a BudgetError names settings that fit."""
    with recording_suspended(), undisturbed(cuda=is_on_card(model)):
        checked = request(model, step, options, fake=True)
        with checked.under_autocast():
            planner = Planner(checked.step)
            key = 0  # any constant: with the same key, the step is captured once
            checked = planner.bounded(checked, key)
            return planner.planned(checked.call, checked.settings, checked.bytes, key, remedies=remedies).plan
