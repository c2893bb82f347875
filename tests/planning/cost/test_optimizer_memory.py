from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memplan.errors import InputError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost.optimizer_memory import memory_outside_graph, update_of
from memplan.planning.levers.lever import GradientUse
from memplan.planning.ops.packed_masters import PackedMasters
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.schedule.to_trace import trace_of
from memplan.verification.measurement.peak_and_time import measure_step, storage_bytes

SHAPES = [((64, 512), (512, 1), "float32"), ((512,), (1,), "float32")]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_update_are_what_the_allocator_says(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape, _, _ in SHAPES]
    optimizer = OPTIMIZERS[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    found = update_of(OPTIMIZERS[name], SHAPES)
    assert found.state_bytes == storage_bytes(held)
    assert abs(found.peak_bytes - measure_step(optimizer.step).growth_peak) <= 64  # scalars that kernels wrap


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be recorded"):
        update_of(torch.optim.LBFGS, SHAPES)


def test_what_an_optimizer_refuses_is_said_once() -> None:
    """Master weights of float16: what is expected of the parameters, not of an optimizer's ``step()``."""
    with pytest.raises(InputError, match="Train in bfloat16") as raised:
        update_of(lambda parameters: PackedMasters(parameters, torch.optim.AdamW), [((4, 4), (4, 1), "float16")])
    assert str(raised.value).count("Expected") == 1
    with pytest.raises(InputError, match="needs no closure") as raised:
        update_of(torch.optim.LBFGS, SHAPES)
    assert str(raised.value).count("Expected") == 1


class Heads(torch.nn.Module):
    """One head is trained in this step, one in others, one never; and a buffer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (torch.nn.Linear(16, 16) for _ in range(3))
        self.frozen = torch.nn.Linear(16, 8).requires_grad_(False)
        self.register_buffer("spare", torch.zeros(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(self.body(x))


LINEAR = 4 * (16 * 16 + 16)


@pytest.mark.parametrize("held", [False, True])
def test_what_belongs_to_the_rest_of_the_model_counts(held: bool) -> None:
    model, x = Heads(), torch.randn(2, 16)
    graph = capture(model, call_of((x,), {})).graph
    bare = memory_outside_graph(model, graph, None, GradientUse(accumulates=held))
    expected = {"parameter_gradient": LINEAR} if held else {}
    assert bare.by_cause() == expected
    make = functools.partial(torch.optim.AdamW, foreach=True)
    outside_memory = memory_outside_graph(model, graph, make, GradientUse(accumulates=held))
    optimizer = make(model.parameters())
    (model(x).sum() + model.right(x).sum()).backward()
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    assert outside_memory.by_cause() == {**expected, "optimizer_state": storage_bytes(state)}
    assert outside_memory.held_bytes == sum(outside_memory.by_cause().values())
    assert (outside_memory.update_bytes > memory_outside_graph(model, graph, make).update_bytes) == held
    by_cause: dict[str, int] = {}
    trace = trace_of(schedule(graph, Choices(gradients=GradientUse(accumulates=held))), bare)
    for storage in trace.storages:
        if storage.born <= trace.steps[0]:
            by_cause[storage.cause] = by_cause.get(storage.cause, 0) + storage.bytes
    gradients = {"parameter_gradient": 3 * LINEAR} if held else {}
    inputs = {"input": x.nbytes}
    assert by_cause == {"weight": storage_bytes(model.parameters()), "buffer": 400, **inputs, **gradients}
