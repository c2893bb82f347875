from __future__ import annotations

import copy
import gc
import pickle
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from environment import slow
from rewriting.cells import CELLS, CHOICES, installed, planner_of, same, same_state, total
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.errors import MemplanError, TargetError
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.rewriting.install import install


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(16, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x))))) * scale

    def helper(self) -> str:
        return "helped"


def data(batch: int = 8) -> Tensor:
    return torch.randn(batch, 16, generator=torch.Generator().manual_seed(3))


def pair(**options: Any) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    reference = Net(**options)
    model = copy.deepcopy(reference)
    return reference, model, installed(model)


def test_the_model_is_the_users_own_and_undo_restores_it() -> None:
    model = Net()
    before, methods = dict(model.__dict__), set(dir(model))
    plan = installed(model)
    assert type(model) is Net
    assert model.helper() == "helped"
    assert list(model.state_dict()) == list(Net().state_dict())
    total(model(data())).backward()
    assert len(plan.engines) == 1
    plan.undo()
    assert {name: id(value) for name, value in model.__dict__.items()} == {name: id(v) for name, v in before.items()}
    assert set(dir(model)) == methods
    model(data())
    assert plan.engines == ()
    plan.undo()


def test_copies_pickles_and_state_are_the_models_own() -> None:
    reference, model, plan = pair()
    total(model(data())).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        total(other(data())).backward()
        assert {name for name, _ in other.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert len(plan.engines) == 1
    reference.load_state_dict(model.state_dict())
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    for net in (reference, model):
        net.zero_grad()
        total(net(data())).backward()
    same_state(reference, model)


def test_without_gradients_the_original_runs() -> None:
    _, model, plan = pair()
    with torch.no_grad():
        model(data())
    with torch.inference_mode():
        model(data())
    model.requires_grad_(False)
    model(data())
    torch.func.vmap(lambda x: model.eval()(x[None]))(data())
    assert plan.engines == ()


@pytest.mark.parametrize(
    ("change", "engines"),
    [
        (lambda model: model.norm.eval(), 2),
        (lambda model: setattr(model.dropout, "p", 0.9), 2),
        *slow(
            (lambda model: model.eval(), 2),
            (lambda model: model.first.requires_grad_(False), 2),
            (lambda model: model.double(), 2),
        ),
        (lambda model: setattr(model, "last", nn.Sequential(nn.Linear(8, 4), nn.Tanh())), 2),
        (lambda model: setattr(model.first.weight, "data", model.first.weight.data * 2), 1),
        (lambda model: setattr(model.first, "weight", nn.Parameter(model.first.weight.detach() * 3)), 1),
        (lambda model: model.norm.running_mean.add_(1), 1),
    ],
)
def test_what_makes_another_plan(change: Any, engines: int) -> None:
    reference, model, plan = pair(dropout=0.5)
    for net in (reference, model):
        torch.manual_seed(2)
        total(net(data())).backward()
        torch.manual_seed(3)
        change(net)
        net.zero_grad()
        x = data().to(next(net.parameters()).dtype)
        torch.manual_seed(4)
        total(net(x)).backward()
    same_state(reference, model)
    assert len(plan.engines) == engines


def test_arguments_that_are_no_tensors() -> None:
    reference, model, plan = pair()
    for scale in (1.0, 2.0, 1.0):
        for net in (reference, model):
            total(net(data(), scale=scale)).backward()
    same_state(reference, model)
    assert len(plan.engines) == 3  # without and with gradients held, and one more scale


class Odd(nn.Linear):
    def forward(self, input: Tensor, other: Any = None) -> Tensor:
        return super().forward(input)


class Masked(nn.Module):
    """A branch that the values of an input decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x) if mask.all() else self.linear(x * mask[:, None])


def test_values_that_decide_a_branch_choose_the_plan() -> None:
    torch.manual_seed(0)
    model, reference = Masked(), Masked()
    reference.load_state_dict(model.state_dict())
    plans = installed(model)
    ones, some, fewer = (torch.tensor(flags) for flags in ([1] * 8, [1, 0] * 4, [0] * 8))
    for mask, engines in ((ones, 1), (some, 2), (ones, 2), (fewer, 2)):
        x = torch.randn(8, 16)
        for one in (reference, model):
            one.zero_grad()
            one(x, mask).square().sum().backward()
        same_state(reference, model)
        assert len(plans.engines) == engines


def test_an_argument_that_no_key_can_hold() -> None:
    model = Odd(16, 4)
    plan = installed(model)
    with pytest.warns(UserWarning, match="argument of type object"):
        loss = model(data(), object()).sum()
    loss.backward()
    model(data(), object())  # said once
    assert plan.engines == ()
    assert model.weight.grad is not None


def test_autocast_of_the_user() -> None:
    cell = CELLS["attention dropout"]
    torch.manual_seed(0)
    reference = cell.make()
    model = copy.deepcopy(reference)
    plan = installed(model)
    for net in (reference, model):
        torch.manual_seed(5)
        for dtype in (torch.bfloat16, None, torch.bfloat16):
            args, kwargs = cell.arguments(4)
            net.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = total(net(*args, **kwargs))
            loss.backward()
    same_state(reference, model)
    assert len(plan.engines) == 2


def test_grad_scaler() -> None:
    reference, model, _ = pair()
    for net in (reference, model):
        optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(total(net(data()))).backward()
            scaler.step(optimizer)
            scaler.update()
    same_state(reference, model)


def test_hooks_of_the_model_run_around_the_planned_step() -> None:
    reference, model, plan = pair()
    seen: list[list[Any]] = [[], []]
    for number, net in enumerate((reference, model)):
        note = seen[number].append

        def before(module: nn.Module, args: Any, kwargs: Any, net: nn.Module = net, note: Any = note) -> Any:
            note(("before", module is net, tuple(args[0].shape), dict(kwargs)))
            return (args[0] * 2,), {"scale": 3.0}

        def after(module: nn.Module, args: Any, output: Tensor, net: nn.Module = net, note: Any = note) -> Tensor:
            note(("after", module is net, output.sum().item()))
            return output + 1

        def backward(module: nn.Module, inputs: Any, outputs: Any, net: nn.Module = net, note: Any = note) -> None:
            note(("backward", module is net, [None if one is None else one.sum().item() for one in outputs]))

        net.register_forward_pre_hook(before, with_kwargs=True)
        net.register_forward_hook(after)
        net.register_full_backward_hook(backward)
        for _ in range(2):
            total(net(data().requires_grad_())).backward()
    assert seen[0] == seen[1]
    assert len(seen[0]) == 6
    same_state(reference, model)
    assert len(plan.engines) == 2


def test_a_planned_loss() -> None:
    torch.manual_seed(0)
    reference = with_loss(Net(), nn.functional.cross_entropy)
    step = copy.deepcopy(reference)
    plan = installed(step)
    for net in (reference, step):
        net(data(), torch.arange(8) % 4).backward()
    same_state(reference, step)
    assert len(plan.engines) == 1


def test_reparametrized_and_functional_calls() -> None:
    reference, model, _ = pair()
    for net in (reference, model):
        torch.nn.utils.parametrizations.weight_norm(net.get_submodule("first"))
        torch.manual_seed(1)
        total(net(data())).backward()
    same_state(reference, model)
    other = {name: (parameter * 2).detach().requires_grad_() for name, parameter in model.named_parameters()}
    found = []
    for net in (reference, model):
        loss = total(torch.func.functional_call(net, other, (data(),)))
        found.append(torch.autograd.grad(loss, list(other.values())))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_planned_model_inside_of_a_planned_model() -> None:
    reference, model, plan = pair()
    outer, planned = nn.Sequential(reference, nn.Linear(4, 4)), nn.Sequential(model, nn.Linear(4, 4))
    planned[1].load_state_dict(outer[1].state_dict())
    whole = installed(planned)
    for net in (outer, planned):
        total(net(data())).backward()
    same_state(outer, planned)
    assert (len(plan.engines), len(whole.engines)) == (0, 1)
    whole.undo()
    for net in (outer, planned):
        total(net(data())).backward()
    same_state(outer, planned)
    assert len(plan.engines) == 1


def test_a_planner_that_plans_nothing_or_fails() -> None:
    reference, model = Net(), Net()
    model.load_state_dict(reference.state_dict())
    asked: list[bool] = []
    plan = install(model, lambda call, held: asked.append(held))
    for net in (reference, model):
        for _ in range(3):
            total(net(data())).backward()
    same_state(reference, model)
    assert asked == [False, True]
    plan.undo()

    def fail(*_: Any) -> None:
        raise MemplanError("No")

    install(model, fail)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(MemplanError, match="No"):
            model(data())
    same(before, model.state_dict())


def test_a_model_is_planned_once_at_a_time() -> None:
    model = Net()
    plan = installed(model)
    with pytest.raises(TargetError, match="undo"):
        installed(model)
    plan.undo()
    model.compile(backend="eager")
    with pytest.raises(TargetError, match="compile"):
        installed(model)


def test_a_model_dies_with_its_last_reference() -> None:
    model = Net()
    plan = install(model, lambda call, held: None)
    total(model(data())).backward()
    held = weakref.ref(model.first.weight)
    gc.disable()
    try:
        del model
        assert held() is None
        assert plan.engines == ()
    finally:
        gc.enable()


def test_the_calls_of_large_models_are_told_apart_fast() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(100)])
    plan = install(model, planner_of(model, CHOICES["all kept"]))
    call = call_of((torch.randn(2, 4),), {})
    plan._keys.key(model, call)
    times = []
    for _ in range(20):
        start = time.thread_time()
        plan._keys.key(model, call)
        times.append(time.thread_time() - start)
    assert min(times) < 5e-3


def test_distributed_data_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    reference, model, plan = pair()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for net in (reference, model):
            wrapped = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)  # pyright: ignore[reportArgumentType]
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
            torch.manual_seed(1)
            for _ in range(3):
                optimizer.zero_grad()
                with wrapped.no_sync():
                    total(wrapped(data())).backward()
                total(wrapped(data())).backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    same_state(reference, model)
    assert len(plan.engines) >= 1


def test_nothing_is_warned_of_in_an_ordinary_loop() -> None:
    _, model, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            total(model(data())).backward()


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in (torch.relu, nn.functional.relu, nn.functional.gelu) else found


class Negating(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 1.5 if isinstance(module, nn.Linear) else None
    )
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (hooked, "hook for all modules"),
        (Doubling, "TorchFunctionMode Doubling"),
        (Negating, "TorchDispatchMode Negating"),
        (torch.autograd.detect_anomaly, "anomaly"),
        (lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), "saved tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_calls_in_modes_and_hooks_run_unplanned_and_are_eager_modes(around: Any, said: str) -> None:
    reference, model, plan = pair()
    for net in (reference, model):
        net.zero_grad()
        if net is model:
            total(net(data())).backward()
            net.zero_grad()
    with pytest.warns(UserWarning, match=said), around():
        total(model(data())).backward()
    with around():
        total(reference(data())).backward()
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert plan.calls.stats().unplanned == 1
