"""Plan a step without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memplan.planning.graph.placement import is_on_card
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.request import request
from memplan.planning.search.search import Heuristics
from memplan.planning.settings import Allow, Engine, Settings
from memplan.trace.recording.session import undisturbed


def plan(
    model: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Callable[..., Any] | None = None,
    budget: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
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
        budget: bounds everything on the device at any moment of the step: bytes, a size ("6 GiB"), or a card's name.
        optimizer: a callable of the parameters. Its state and its update are part of the step then.
        device: a card of whose kernels the seconds are to be, instead of this machine's. Values may then wait for the
            backward pass in host memory, where that is cheaper than making them again.
        allow: ``"exact"``: only what leaves the result as it is, bit for bit. ``"lossy"``: also computing and saving in
            fewer bits, wherever the step is faster by it, or fits only so (see `Plan.precision`).
        engine: what is to run it: ``"graph"``, torch's kernels one by one, or ``"inductor"``, fused ones.
        early: update each parameter in the backward pass, as soon as its gradient is complete, and free that.
        accumulate: micro-batches between two updates; with more than one, gradients are held when a step begins.
        clip_norm: the global norm that gradients are clipped at, where they are: then no update can be early.
        plan: a plan made before for this model and these inputs, to be checked against this budget.
        heuristics: switches of the search.
        costs: seconds by op, as ``memplan.planning.cost.op_timing.costs_of`` gives them; ``"roofline"`` for estimates
            that are the same on every machine; None: measured on this one, which differs a little from run to run.

    Raises:
        BudgetError: no plan fits; its ``smallest_budget`` is the least that one was found for.
        UsageError, RecordingError: what was asked for cannot be, or the step cannot be captured.

    Example:
        >>> print(memplan.plan(model, images, targets=labels, loss=F.cross_entropy, budget="6 GiB"))
        A step on cpu in the budget of 6.0 GiB: predicted peak 9.1 GiB -> 6.0 GiB, 41 ms added (3.1 %), ...
    """
    settings = Settings(
        0, optimizer, gradients=GradientUse(updates=early), plan=plan, heuristics=heuristics or Heuristics(),
        costs=costs, engine=engine,
        host_memory=True,
    )  # fmt: skip
    with undisturbed(cuda=is_on_card(model)), torch.inference_mode(False), torch.enable_grad():
        asked = request(
            model, inputs, kwargs=kwargs, targets=targets, loss=loss, budget=budget, autocast=autocast, device=device,
            allow=allow, clip_norm=clip_norm, accumulate=accumulate, settings=settings, fake=True,
        )  # fmt: skip
        with asked.under_autocast():
            return Planner(asked.step).planned(asked.call, asked.settings).plan
