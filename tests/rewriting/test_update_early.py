from __future__ import annotations

import copy
import gc
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from environment import slow, thinned
from rewriting.cells import CELLS, Planned, same_state, total
from torch import distributed, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from memplan import _torch
from memplan.errors import UsageError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.rewriting.install import install
from memplan.rewriting.update_early import update_early

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
        return Planned(
            captured, schedule(captured.graph, Choices(gradients=GradientUse(updates_early=True, accumulates=held)))
        )

    return install(model, plan)


def pair(name: str = "batch norm") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = CELLS[name].make()
    model = copy.deepcopy(reference)
    return reference, model


def batch(name: str = "batch norm") -> tuple[Any, Any]:
    return CELLS[name].arguments(4)


@pytest.mark.parametrize(
    ("name", "with_plan"),
    [("batch norm", True), *slow(("weight tying", False), ("batch norm", False), ("weight tying", True))],
)
@pytest.mark.parametrize("optimizer", thinned(OPTIMIZERS, 2))
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
    own: list[set[str]] = []
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
        own.append(set(vars(updater)))
    assert own[0] == own[1]
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
    unchanged(model, lambda: total(model(*batch()[0])).backward(), r"second backward pass .*SGD \(fitted\.optimizer")
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


CLIPPING: dict[str, Callable[[Any], Any]] = {  # as a loop has them that imported them before
    "clip_grad_value_": lambda parameters, clip=nn.utils.clip_grad_value_: clip(parameters, 0.5),
    "clip_grads_with_norm_": lambda parameters, clip=nn.utils.clip_grads_with_norm_: clip(
        parameters, 1.0, torch.tensor(2.0)
    ),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_other_clipping_after_the_backward_pass_is_refused(training: Any, name: str) -> None:
    model, _ = training
    total(model(*batch()[0])).backward()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    unchanged(model, lambda: CLIPPING[name](p for net in (model, other) for p in net.parameters()), name)
    assert other.weight.grad is not None
    assert other.weight.grad.eq(1).all()
    CLIPPING[name](other.parameters())
    assert other.weight.grad.eq(0.5).all() == (name == "clip_grad_value_")
    assert other.weight.grad.lt(1).all()


def test_clipping_is_seen_where_torch_does_not_wrap_it(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clip_grad = nn.utils.clip_grad
    seen: list[str] = []
    plain = clip_grad.clip_grad_value_.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(clip_grad, "clip_grad_value_", lambda *args: plain(*args))
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with _torch.clipping_seen(lambda name, found: seen.append(f"{name} {len(found)}")):
        clip_grad.clip_grad_value_([weight], 0.5)
    assert seen == ["clip_grad_value_ 1"]
    assert weight.grad.tolist() == [0.5, 0.5]


def test_loss_scaling_is_refused(training: Any) -> None:
    model, _ = training
    scaler = torch.amp.GradScaler("cpu")
    unchanged(model, lambda: scaler.scale(total(model(*batch()[0]))).backward(), "GradScaler")
    assert scaler.scale(nn.Linear(2, 2)(torch.ones(1, 2)).sum()).requires_grad
    torch.amp.GradScaler("cpu", enabled=False).scale(total(model(*batch()[0]))).backward()


class Generator(nn.Module):
    """With a discriminator, two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.judge = nn.Linear(6, 24), CELLS["dropout"].make()
        self.real, self.noise = torch.randn(4, 24), torch.randn(4, 6)
        self.judging = torch.optim.SGD(self.judge.parameters(), 0.1, momentum=0.9)
        self.making = torch.optim.SGD(self.made.parameters(), 0.1)

    def judge_step(self) -> None:
        self.judging.zero_grad()
        (total(self.judge(self.real)) - total(self.judge(self.made(self.noise).detach()))).backward()
        self.judging.step()

    def make_step(self, frozen: bool, inputs: bool) -> None:
        self.making.zero_grad()
        self.judge.requires_grad_(not frozen)
        total(self.judge(self.made(self.noise))).backward(inputs=[*self.made.parameters()] if inputs else None)
        self.judge.requires_grad_(True)
        self.making.step()


@pytest.mark.parametrize("with_plan", [True, *slow(False)])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_a_pass_for_another_optimizer_are_not_applied(with_plan: bool, frozen: bool) -> None:
    reference, net = Generator(), Generator()
    plan = planned(net.judge) if with_plan else None
    early = update_early(net.judging)
    for one in (reference, net):
        torch.manual_seed(2)
        one.judge_step()
    unchanged(net, lambda: net.make_step(False, False), r"updates early, and into one of shape \(24, 6\)")
    for one in (reference, net):
        torch.manual_seed(3)
        for _ in range(3):
            one.make_step(frozen=frozen, inputs=not frozen)
            one.judge_step()
    early.undo()
    if plan is not None:
        plan.undo()
    for one in (reference, net):
        one.zero_grad()
    same_state(reference, net)


@pytest.mark.parametrize("later", [True, False])
def test_what_belongs_to_the_step_is_given_to_its_optimizer(later: bool) -> None:
    reference, net = Generator(), Generator()
    early = update_early(net.judging) if later else None  # then step() updates what is added
    for one in (reference, net):
        one.judging.add_param_group({"params": list(one.made.parameters()), "lr": 0.01})
    early = early or update_early(net.judging)
    for one in (reference, net):
        for seed in range(3):
            one.judging.zero_grad()
            torch.manual_seed(seed)
            total(one.judge(one.made(one.noise))).backward()
            one.judging.step()
        one.judging.zero_grad()
    early.undo()
    same_state(reference, net)


def test_discarding_gradients_that_were_applied_is_refused(training: Any) -> None:
    model, updater = training
    updater.zero_grad()
    total(model(*batch()[0])).backward()
    unchanged(model, updater.zero_grad, r"zero_grad\(\) between a backward pass and step\(\)")
    updater.step()
    updater.zero_grad(set_to_none=True)


def test_discarding_them_by_the_models_own_zero_grad_is_refused(training: Any) -> None:
    model, updater = training
    total(model(*batch()[0])).backward()
    unchanged(model, model.zero_grad, r"zero_grad\(\) between a backward pass and step\(\)")
    updater.step()
    model.zero_grad()
    nn.Linear(2, 2).zero_grad()


@pytest.mark.parametrize("what", ["lr", "momentum", "tensor", "weights", "gradient"])
def test_what_changes_between_backward_and_step_is_refused(what: str) -> None:
    _, model = pair()
    plan = planned(model)
    updater = torch.optim.SGD(model.parameters(), torch.tensor(0.1) if what == "tensor" else 0.1, foreach=False)
    early = update_early(updater)
    for _ in range(2):
        total(model(*batch()[0])).backward()
        if what == "weights":
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
        elif what == "gradient":
            next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
        elif what == "tensor":
            updater.param_groups[0]["lr"].mul_(0.5)
        else:
            updater.param_groups[0][what] += 0.1
        with pytest.raises(UsageError, match=r"between the backward pass and step\(\)"):
            updater.step()
        model.zero_grad()
    early.undo()
    plan.undo()


def test_a_loop_goes_on_after_an_exception_in_backward(training: Any) -> None:
    model, updater = training
    before = copy.deepcopy(model.state_dict())

    def bad(_: torch.Tensor) -> None:
        raise RuntimeError("bad batch")

    handle = next(model.parameters()).register_hook(bad)
    with pytest.raises(RuntimeError, match="bad batch") as raised:
        total(model(*batch()[0])).backward()
    moved = sum(not torch.equal(one, before[name]) for name, one in model.named_parameters())
    assert moved
    assert f"{moved} of" in raised.value.__notes__[0]
    handle.remove()
    updater.zero_grad()
    total(model(*batch()[0])).backward()
    updater.step()


def test_step_of_another_optimizer_is_refused_and_names_the_one_that_updates(training: Any) -> None:
    model, _ = training
    mine = torch.optim.AdamW(model.parameters())
    total(model(*batch()[0])).backward()
    unchanged(model, mine.step, r"AdamW\.step\(\) on parameters .* SGD \(fitted\.optimizer")
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], 1.0).step()
    assert weight.tolist() == [0.0, 0.0]


@pytest.fixture
def two_processes() -> Iterator[None]:
    """This one of two, as torch.distributed has it: no other process runs, and none is needed to be refused."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def test_several_processes_are_refused(two_processes: None) -> None:
    with pytest.raises(UsageError, match="in one of 2 processes"):
        update_early(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1))


def test_several_processes_are_refused_in_the_loop(training: Any, request: Any) -> None:
    model, _ = training
    request.getfixturevalue("two_processes")
    unchanged(model, lambda: total(model(*batch()[0])).backward(), "in one of 2 processes")


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


def torch_now() -> list[Any]:
    """What is replaced as long as something is updated early, now that what nobody holds is gone."""
    gc.collect()
    clip_grad = nn.utils.clip_grad
    inner = [inspect.getclosurevars(one).nonlocals["func"] for one in (
        clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_
    )]  # fmt: skip
    return [torch.amp.GradScaler.scale, torch.autograd.backward, *inner, list(global_hooks)]


def test_torch_is_as_before_when_nothing_is_updated_early() -> None:
    before = torch_now()
    first, second = (update_early(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)) for _ in range(2))
    first.undo()
    assert not any(map(operator.eq, torch_now(), before))
    second.undo()
    second.undo()
    assert torch_now() == before


def test_a_model_that_is_gone_leaves_nothing_behind() -> None:
    def train() -> weakref.ref[nn.Module]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        update_early(optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return weakref.ref(model)

    before = torch_now()
    model = train()
    assert torch_now() == before
    assert model() is None
