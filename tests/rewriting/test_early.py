from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rewriting.cells import CELLS, Planned, same_state, total
from torch import nn

from memplan.errors import UsageError
from memplan.planning.calls import Call
from memplan.planning.capture import capture
from memplan.planning.schedule import Choices, schedule
from memplan.rewriting.early import update_early
from memplan.rewriting.install import install

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adam foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
}


def planned(model: nn.Module) -> Any:
    def plan(call: Call, held: bool) -> Planned:
        captured = capture(model, call)
        return Planned(captured, schedule(captured.graph, replace(Choices(early=True), held=held)))

    return install(model, plan)


def pair(name: str = "batch norm") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = CELLS[name].make()
    model = copy.deepcopy(reference)
    return reference, model


def batch(name: str = "batch norm") -> tuple[Any, Any]:
    return CELLS[name].arguments(4)


@pytest.mark.parametrize("with_plan", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["batch norm", "weight tying"])
def test_three_steps_with_a_schedule_are_those_of_the_ordinary_loop(name: str, optimizer: str, with_plan: bool) -> None:
    reference, model = pair(name)
    plan = planned(model) if with_plan else None
    for net in (reference, model):
        torch.manual_seed(4)
        groups = [{"params": list(net.parameters())[:2], "lr": 3e-3}, {"params": list(net.parameters())[2:]}]
        updater = OPTIMIZERS[optimizer](groups)
        before = [torch.optim.lr_scheduler.ExponentialLR(updater, 0.5)] if net is reference else []
        early = update_early(updater) if net is model else None
        rates = before or [torch.optim.lr_scheduler.ExponentialLR(updater, 0.5)]
        ran: list[int] = []
        updater.register_step_post_hook(lambda *_, ran=ran: ran.append(1))
        for _ in range(3):
            args, kwargs = batch(name)
            updater.zero_grad()
            total(net(*args, **kwargs)).backward()
            if early is not None:
                assert all(parameter.grad is None for parameter in net.parameters())
            updater.step()
            rates[0].step()
            updater.load_state_dict(copy.deepcopy(updater.state_dict()))
        assert ran == [1, 1, 1]
        if early is not None:
            early.undo()
        for parameter in net.parameters():
            parameter.grad = None
    same_state(reference, model)
    assert plan is None or len(plan.engines) == 1


def test_undo_gives_the_updates_back_to_step() -> None:
    reference, model = pair()
    for net in (reference, model):
        torch.manual_seed(1)
        updater = torch.optim.SGD(net.parameters(), 0.1)
        early = update_early(updater) if net is model else None
        for number in range(2):
            if early is not None and number:
                early.undo()
            args, _ = batch()
            updater.zero_grad()
            total(net(*args)).backward()
            updater.step()
    same_state(reference, model)


def test_a_parameter_of_which_the_loop_makes_the_gradient_is_updated_by_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    updater = torch.optim.SGD([weight], 1.0)
    early = update_early(updater)
    weight.grad = torch.ones(2)
    updater.step()
    assert weight.tolist() == [0.0, 0.0]
    early.undo()


@pytest.fixture
def training() -> Any:
    _, model = pair()
    plan = planned(model)
    updater = torch.optim.SGD(model.parameters(), 0.1)
    early = update_early(updater)
    yield model, updater
    early.undo()
    plan.undo()


def unchanged(model: nn.Module, run: Callable[[], Any], text: str) -> None:
    """It is refused with a reason, before any parameter has changed."""
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(UsageError, match=text):
        run()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_accumulation_is_refused(training: Any) -> None:
    model, updater = training
    total(model(*batch()[0])).backward()
    unchanged(model, lambda: total(model(*batch()[0])).backward(), "second backward pass")
    updater.step()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    unchanged(model, lambda: total(model(*batch()[0])).backward(), "held already")


def test_clipping_by_the_global_norm_is_refused(training: Any) -> None:
    model, _ = training
    total(model(*batch()[0])).backward()
    unchanged(model, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "clip_grad_norm_")
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 0


def test_loss_scaling_is_refused(training: Any) -> None:
    model, _ = training
    scaler = torch.amp.GradScaler("cpu")
    unchanged(model, lambda: scaler.scale(total(model(*batch()[0]))).backward(), "GradScaler")
    assert scaler.scale(nn.Linear(2, 2)(torch.ones(1, 2)).sum()).requires_grad
    torch.amp.GradScaler("cpu", enabled=False).scale(total(model(*batch()[0]))).backward()


def test_optimizers_that_need_all_gradients_at_once_are_refused(training: Any) -> None:
    _, updater = training
    with pytest.raises(UsageError, match="closure"):
        updater.step(lambda: 0.0)
    with pytest.raises(UsageError, match="LBFGS"):
        update_early(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = group["lr"] * 0.5
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    early = update_early(Counting([weight], 0.1))
    with pytest.raises(UsageError, match="option 'lr'"):
        weight.sum().backward()
    early.undo()


def test_torch_is_as_before_when_nothing_is_updated_early() -> None:
    before = torch.amp.GradScaler.scale, nn.utils.clip_grad._clip_grads_with_norm_
    first, second = (update_early(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)) for _ in range(2))
    first.undo()
    assert torch.amp.GradScaler.scale is not before[0]
    second.undo()
    second.undo()
    assert (torch.amp.GradScaler.scale, nn.utils.clip_grad._clip_grads_with_norm_) == before
