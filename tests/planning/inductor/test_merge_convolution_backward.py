"""Derivatives of convolutions as one kernel: the same bits, in no more bytes than planned, with fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import memplan
from memplan import _torch
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import recomputable_values
from memplan.planning.inductor.merge_convolution_backward import affordable_pairs
from memplan.planning.inductor.partition import as_fused
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels

pytestmark = pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")


class Images(nn.Module):
    """Strided, grouped, with and without bias, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, bias=False)
        self.twice, self.last = nn.Conv2d(12, 12, 3, padding=1, groups=2), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.down(torch.relu(self.first(x))))
        return self.last(torch.relu(self.twice(torch.relu(self.twice(x)))).mean((2, 3)))


class Dense(nn.Module):
    """Gradients that are slices of another, as concatenation makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, 8, 3, padding=1) for channels in (8, 16, 24))
        self.last = nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.relu(layer(x))], 1)
        return self.last(x)


class Volumes(nn.Module):
    """Down and up again in 3D."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(1, 6, 3, stride=2, padding=1), nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.last = nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.up(torch.relu(self.down(x)))))


class Late(nn.Module):
    """Op by op, the peak is in the loss: everywhere else there is room."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.many = model, nn.Parameter(torch.randn(1 << 18))

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x).mean() * self.many).exp().square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "images": (Images, (4, 3, 16, 16), 4),
    "dense": (Dense, (2, 8, 16, 16), 4),
    "volumes": (Volumes, (1, 1, 12, 12, 12), 3),
}
"""By name: what makes the model, the shape of its input, how often it convolves."""


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def calls(run: Callable[[], Any]) -> int:
    """How often a convolution's derivative is computed."""
    with profile(acc_events=True) as seen:  # without, torch 2.11 warns
        run()
    return sum(event.name == "aten::convolution_backward" for event in seen.events() or ())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_with_one_call_for_each_derivative(name: str) -> None:
    make, shape, convolutions = MODELS[name]
    torch.manual_seed(0)
    model, x = Late(make()), torch.randn(shape)
    fitted = memplan.fit(model, x, budget="1GB", engine="inductor", pairs=0)
    together, count = gradients(model, x), calls(lambda: gradients(model, x))
    assert fitted.plan.choices.joined
    plan = replace(fitted.plan, choices=replace(fitted.plan.choices, joined=False))
    fitted.undo()
    memplan.fit(model, x, budget="1GB", engine="inductor", pairs=0, plan=plan)
    apart, more = gradients(model, x), calls(lambda: gradients(model, x))
    assert len(together) == len(apart)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    assert count == convolutions  # as eager mode has it
    assert more > convolutions


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_there_together_that_would_raise_the_peak(name: str, again: bool) -> None:
    """By hand: during what is put together there is, beside what was, all that the second part makes and takes."""
    make, shape, _ = MODELS[name]
    graph = capture(make(), call_of((torch.randn(shape),), {})).graph
    made = as_fused(graph, Choices(joined=True, recompute=recomputable_values(graph) if again else frozenset()))
    found, actions = levels(made), (*made.forward, *made.backward)
    during = (*found.forward, *found.backward)
    for first, second in affordable_pairs(made).items():
        ops = [action.called_op(graph) for action in (actions[first], actions[second])]
        assert [op.args[10][:2] for op in ops] == [[False, True], [True, False]]
        assert ops[0].gradient_of == ops[1].gradient_of
        more = sum(graph.values[value].bytes for value in ops[1].makes) + ops[1].scratch
        assert all(during[place] + more <= found.peak for place in range(first, second + 1))
