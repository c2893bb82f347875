"""Planned steps around what cannot be traced: eager's bits, and no byte more than said, with everything dropped."""

# pyright: reportIncompatibleMethodOverride=false
# Functions are written as torch documents them.

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow, thinned
from rewriting.cells import CHOICES, same_state, total
from torch import Tensor, nn
from torch.autograd import Function
from truth.cpu_allocator import allocations, peak_of

from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import RESIDENT
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.schedule.to_trace import timeline_of
from memplan.rewriting.engine import Engine


def finite(x: Tensor) -> None:
    """Leaves torch, so that nobody can trace what calls it."""
    assert np.isfinite(x.detach().numpy()).all()


class Saves(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        finite(x)
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.saved_tensors[0].cos() * g


class Hides(Function):
    """Keeps its argument and its result where nobody sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        finite(x)
        y = x.exp()
        ctx.both = lambda: (x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.both()
        return g * y * (1 + 0 * x)


class Works(Function):
    """Takes memory in both passes, and keeps some of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        finite(x)
        wide = torch.cat([x, y, x * y])
        ctx.save_for_backward(x, wide.tanh())
        return wide.view(3, -1).sum(0).view_as(x), wide[: len(x)] > 0

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, wide = ctx.saved_tensors
        finite(g)
        wide = torch.cat([g, g, g]) * wide
        return wide[: len(x)] + x, wide[len(x) : 2 * len(x)] * 2


@torch.library.custom_op("memplan_engine_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5))


def noise_saves(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, g: g * (ctx.saved_tensors[0] != 0), setup_context=noise_saves)


class Around(nn.Module):
    """A function between two layers, with its argument and its result read by others, too."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], width: int = 64) -> None:
        super().__init__()
        self.function = function
        self.a, self.b, self.c = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.function(torch.tanh(self.a(x)), self.b(x)))


def worked(h: Tensor, k: Tensor) -> Tensor:
    value, positive = Works.apply(h * k, k)  # pyright: ignore[reportGeneralTypeIssues]
    return torch.where(positive, value, -value)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "argument saved": lambda h, k: Saves.apply(h * k) * (h * k),  # pyright: ignore[reportOperatorIssue]
    "argument overwritten": lambda h, k: Saves.apply(k) * k,  # pyright: ignore[reportOperatorIssue]
    "both hidden": lambda h, k: torch.relu(Hides.apply(k)) * k,  # pyright: ignore[reportArgumentType]
    "memory of its own": worked,
    "random op of a library": lambda h, k: torch.tanh(noise(h * k)),
}


class Recurrent(nn.Module):
    def __init__(self, kind: Any, layers: int, **options: Any) -> None:
        super().__init__()
        self.before, self.layers = nn.Linear(48, 64), kind(64, 96, layers, **options)
        self.after = nn.Linear(192 if self.layers.bidirectional else 96, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(torch.relu(self.before(x)))[0])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, 1),
    "lstm 3": lambda: Recurrent(nn.LSTM, 3, bidirectional=True),
    "lstm 3, dropout": lambda: Recurrent(nn.LSTM, 3, dropout=0.2, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU, 1),
    "gru 3": lambda: Recurrent(nn.GRU, 3, bidirectional=True, dropout=0.2),
}

NAMES = [*thinned([*FUNCTIONS, "lstm 3, dropout", "gru 3"], 2), *slow("lstm", "lstm 3", "gru")]


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in FUNCTIONS:
        return Around(FUNCTIONS[name]), torch.randn(32, 64)
    return LAYERS[name](), torch.randn(6, 16, 48)


def planned(model: nn.Module, x: Tensor, choice: str) -> tuple[Callable[[], Tensor], int]:
    """What runs the model with these choices, and the bytes above those of weights and inputs that are predicted."""
    call = call_of((x,), {})
    captured = capture(model, call)
    graph = captured.graph
    made = schedule(graph, CHOICES[choice](graph))
    engine = Engine(captured, made)
    predicted = levels(made).peak
    assert timeline_of(made).peak_allocated == predicted
    return lambda: engine.run(model, call), predicted - sum(v.bytes for v in graph.values if v.kind in RESIDENT)


@pytest.mark.parametrize("choice", ["encoded", *slow("all dropped")])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_eager_mode(name: str, choice: str) -> None:
    model, x = case(name)
    reference = copy.deepcopy(model)
    run, _ = planned(model, x, choice)
    for step in range(2):
        torch.manual_seed(step)
        total(reference(x)).backward()
        torch.manual_seed(step)
        total(run()).backward()
        same_state(reference, model)


@pytest.mark.parametrize("choice", ["all dropped", *slow("all kept")])
@pytest.mark.parametrize("name", NAMES)
def test_measured_is_predicted(name: str, choice: str) -> None:
    model, x = case(name)
    run, predicted = planned(model, x, choice)

    def step() -> None:
        output = run()  # there to the end, as a model's is
        output.sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    measured = peak_of(allocations(step))
    assert predicted * 0.99 <= measured <= predicted


@pytest.mark.parametrize("name", ["gru 3", *slow("argument saved", "both hidden", "memory of its own", "lstm")])
def test_backward_twice_where_the_graph_is_kept(name: str) -> None:
    model, x = case(name)
    reference = copy.deepcopy(model)
    run, _ = planned(model, x, "all dropped")
    torch.manual_seed(1)
    loss = total(reference(x))
    loss.backward(retain_graph=True)
    loss.backward()
    torch.manual_seed(1)
    loss = total(run())
    loss.backward(retain_graph=True)
    loss.backward()
    same_state(reference, model)
