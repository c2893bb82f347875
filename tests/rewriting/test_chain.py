from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from environment import slow, thinned
from rewriting.cells import CHOICES, installed, same_state, total
from torch import Tensor, nn
from torch.utils import _pytree

from memplan.errors import BackwardError, MemplanError
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.schedule.actions import Choices


class Net(nn.Module):
    """Two linear layers whose weights the backward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Images(nn.Sequential):
    """A convolution, a norm and a ReLU, whose backward pass writes over what was saved."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
            nn.Linear(48, 4),
        )  # fmt: skip


def pair(choice: str = "half dropped", make: Any = Net) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    model.plan = [installed(model, CHOICES[choice])]  # kept alive with the model
    return reference, model


def data(batch: int = 8) -> Tensor:
    return torch.randn(batch, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("choice", thinned(CHOICES, 4))
def test_gradients_of_some_parameters_and_of_inputs(choice: str) -> None:
    reference, model = pair(choice)
    for names in (["last.weight"], ["first.bias"], ["middle.weight", "last.bias"]):
        found = []
        for net in (reference, model):
            parameters = [net.get_parameter(name) for name in names]
            found.append(torch.autograd.grad(total(net(data())), parameters))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    assert all(p.grad is None for p in model.parameters())
    x, y = data().requires_grad_(), data().requires_grad_()
    total(reference(x)).backward()
    total(model(y)).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
    same_state(reference, model)


@pytest.mark.parametrize("choice", thinned(CHOICES, 4))
@pytest.mark.parametrize("make", [Net, Images])
def test_the_graph_is_kept_where_asked_for(choice: str, make: Any) -> None:
    reference, model = pair(choice, make)
    for net in (reference, model):
        loss = total(net(data()))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    same_state(reference, model)


def test_a_kept_graph_is_not_written_over() -> None:
    """What is saved are the inputs of tanh: in backward it is computed again, in their memory."""
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)

    def tanhs(graph: JointGraph) -> Choices:
        again = (v for v in recomputable_values(graph) if graph.maker[v].target == "aten.tanh.default")
        return Choices(recompute=frozenset(again))

    plan = installed(model, tanhs)
    for net in (reference, model):
        loss = total(net(data()))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert plan.engines[0]._chain.overwritten
    same_state(reference, model)


def test_a_second_backward_pass_is_refused_as_by_autograd() -> None:
    reference, model = pair()
    for net in (reference, model):
        loss = total(net(data()))
        loss.backward()
        with pytest.raises(RuntimeError, match="second"):
            loss.backward()
    same_state(reference, model)


def test_double_backward_is_refused() -> None:
    _, model = pair()
    with pytest.raises(BackwardError, match="Double backward"):
        torch.autograd.grad(total(model(data())), list(model.parameters()), create_graph=True)
    assert issubclass(BackwardError, (MemplanError, RuntimeError))


@pytest.mark.parametrize("what", ["parameter", "output", "input"])
def test_what_backward_reads_must_not_have_changed(what: str) -> None:
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.layer(x) @ self.layer.weight)

    reference, model = pair("all kept", Exp)
    for net in (reference, model):
        x = data()
        out = net(x)
        with torch.no_grad():
            {"parameter": net.layer.weight, "output": out, "input": x}[what].mul_(2)  # pyright: ignore
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
            total(out).backward()


def test_data_put_in_a_parameters_place_before_backward_are_refused() -> None:
    _, model = pair("all kept")
    loss = total(model(data()))
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    with pytest.raises(BackwardError, match="data replaced"):
        loss.backward()
    total(model(data())).backward()


def test_what_backward_does_not_read_may_change() -> None:
    reference, model = pair("all kept")
    for net in (reference, model):
        out = net(data())
        loss = total(out)
        with torch.no_grad():
            net.last.bias.mul_(2)  # pyright: ignore
            loss /= 4
        loss.backward()
    same_state(reference, model)


@pytest.mark.parametrize("choice", thinned(CHOICES, 4))
def test_several_forward_calls_before_backward_in_any_order(choice: str) -> None:
    reference, model = pair(choice)
    for net in (reference, model):
        losses = [total(net(data() * scale)) for scale in (1, 2, 3)]
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
        (total(net(data())) * 2 + total(net(data() + 1))).backward()
    same_state(reference, model)


def test_a_planned_model_inside_of_another_graph() -> None:
    reference, model = pair()
    outer = nn.Linear(16, 16)
    found = []
    for net in (reference, model):
        outer.zero_grad()
        net(torch.relu(outer(data()))).sin().sum().backward()
        found.append([p.grad for p in outer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    same_state(reference, model)


def test_backward_in_another_thread() -> None:
    reference, model = pair()
    for net in (reference, model):
        loss = total(net(data()))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    same_state(reference, model)


def test_threads_at_the_same_time() -> None:
    _, model = pair()
    expected = torch.autograd.grad(total(model(data())), list(model.parameters()))
    found: list[Any] = [None] * 4

    def work(number: int) -> None:
        for _ in range(5):
            found[number] = torch.autograd.grad(total(model(data())), list(model.parameters()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))


def clamped(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1, 1)


def emptied(parameter: Tensor) -> None:
    parameter.detach().zero_()


def test_hooks_on_parameters_and_outputs() -> None:
    reference, model = pair()
    for net in (reference, model):
        order: list[str] = []
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda gradient, order=order, name=name: order.append(name) or gradient * 2)
            parameter.register_post_accumulate_grad_hook(clamped)
        out = net(data())
        out.retain_grad()
        out.register_hook(lambda gradient: gradient + 1)
        total(out).backward()
        assert out.grad is not None
        assert sorted(order) == sorted(name for name, _ in net.named_parameters())
    same_state(reference, model)


def test_an_error_in_a_hook_leaves_nothing_half_done() -> None:
    _, model = pair()
    expected = torch.autograd.grad(total(model(data())), list(model.parameters()))

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    handle = model.middle.weight.register_hook(fail)  # pyright: ignore
    loss = total(model(data()))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    total(model(data())).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_a_hook_that_changes_a_parameter_that_is_still_to_be_read_is_refused() -> None:
    _, model = pair("all kept", lambda: nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1)))
    for parameter in model.parameters():
        parameter.register_hook(lambda _, parameter=parameter: emptied(parameter))
    with pytest.raises(BackwardError, match=r"'1\.weight' was changed in place"):
        model(torch.ones(2, 1, 4, 4)).sum().backward()


class Convolutions(nn.Sequential):
    """Weights whose own gradient is complete before the input's is computed from them."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 4),
        )  # fmt: skip


@pytest.mark.parametrize("choice", thinned(CHOICES, 4))
@pytest.mark.parametrize("make", [Net, Convolutions])
def test_an_optimizer_in_the_backward_pass(choice: str, make: Any) -> None:
    """As in torch's tutorial: each parameter's own optimizer steps as soon as its gradient is there, and frees that."""
    reference, model = pair(choice, make)
    for net in (reference, model):
        optimizers = {one: torch.optim.AdamW([one], lr=0.1, foreach=False) for one in net.parameters()}

        def update(parameter: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            total(net(data() + step)).backward()
        assert all(parameter.grad is None for parameter in net.parameters())
    same_state(reference, model)


def test_gradients_are_handed_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("all kept")
    total(model(data())).backward()
    model.zero_grad()
    seen: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.update({name: gradient.data_ptr()}))
    total(model(data())).backward()
    assert {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None} == seen


class Heads(nn.Module):
    """Two outputs with parameters of their own, and one of all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(16, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        left, right = torch.sin(self.left(h)), torch.exp(self.right(h))
        return left, right * 2, left * right * self.scale


@pytest.mark.parametrize("choice", thinned(CHOICES, 4))
@pytest.mark.parametrize("used", [(1,), (0, 2), *slow(((0,),), ((2,),), ((0, 1),), ((1, 2),), ((0, 1, 2),))])
def test_what_the_loss_does_not_depend_on_gets_no_gradient(choice: str, used: tuple[int, ...]) -> None:
    """And the hooks that are there for it are not called."""
    reference, model = pair(choice, Heads)
    called: list[list[str]] = [[], []]
    for net, names in zip((reference, model), called, strict=True):
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda gradient, name=name, names=names: names.append(name) or gradient * 2)
            parameter.register_post_accumulate_grad_hook(clamped)
        total([net(data())[at] for at in used]).backward()
    same_state(reference, model)
    assert sorted(called[0]) == sorted(called[1])


def test_backward_from_one_output_after_the_other() -> None:
    reference, model = pair("half dropped", Heads)
    for net in (reference, model):
        left, right, _ = net(data())
        total(left).backward(retain_graph=True)
        assert net.right.weight.grad is None  # pyright: ignore
        total(right).backward()
    same_state(reference, model)
    with pytest.raises(RuntimeError, match="second"):
        total(left).backward()


def test_an_output_without_a_gradient_in_the_middle_of_a_loss() -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return None

    reference, model = pair("all kept", Heads)
    for net in (reference, model):
        left, right, _ = net(data())
        (total(left) + total(Cut.apply(right))).backward()
    same_state(reference, model)


def test_a_loss_of_several_outputs_from_another_thread_is_refused() -> None:
    """Which nodes run first is told by numbers that each thread counts for itself."""
    _, model = pair("all kept", Heads)
    for _ in range(1000):
        _ = model.scale * 1  # pyright: ignore
    outputs, refused = model(data()), list[BackwardError]()

    def work() -> None:
        with pytest.raises(BackwardError, match="in the thread that called the model") as raised:
            total(outputs).backward()
        refused.append(raised.value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert refused
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_output_beside_the_loss_has_no_gradient() -> None:
    class WithLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            logits = self.layer(x)
            return Output(loss=logits.pow(2).mean(), logits=logits)

    reference, model = pair("all kept", WithLogits)
    for net in (reference, model):
        net(data()).loss.backward()
    same_state(reference, model)
    out = model(data())
    assert torch.equal(out.logits, reference(data()).logits)
    with pytest.raises(BackwardError, match="not planned with a gradient"):
        out.logits.sum().backward()


class Output(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


_pytree.register_pytree_node(
    Output, lambda one: (list(one.values()), list(one)), lambda values, names: Output(zip(names, values, strict=True))
)


def test_what_is_saved_is_freed_with_the_outputs_and_after_an_early_end() -> None:
    gc.disable()
    try:
        for make in (Net, lambda: nn.Sequential(nn.Linear(16, 16), nn.Softmax(1))):  # a softmax's output is saved
            _, model = pair("all kept", make)
            out = model(data())
            held = weakref.ref(out.grad_fn.call)
            del out
            assert held() is None
        _, model = pair("all kept")
        out = model(data())
        call = out.grad_fn.call
        torch.autograd.grad(total(out), [model.last.weight])  # pyright: ignore
        assert call._running is None
        assert call._saved is None
    finally:
        gc.enable()


@pytest.mark.parametrize("choice", thinned(CHOICES, 4))
def test_gradients_of_another_layout_than_captured(choice: str) -> None:
    reference, model = pair(choice)
    for net in (reference, model):
        net(data()).backward(torch.ones(1, 1).expand(8, 4))
        net(data()).backward(torch.linspace(0, 1, 32).reshape(4, 8).t())
    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)
