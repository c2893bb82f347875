"""A planned module under torch.compile, torch.export and torch.jit.trace."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rewriting.cells import installed
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler

from memplan.rewriting.calls import CallStats
from memplan.rewriting.install import Installed

X = torch.linspace(-1, 1, 64).reshape(4, 16)
GIVEN: dict[str, Any] = {"backend": "eager"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Dynamo remembers nothing of other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pair() -> tuple[Net, Net, Installed]:
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    return reference, model, installed(model)


def gradients(model: nn.Module, call: Any) -> list[Tensor | None]:
    model.zero_grad()
    call(X).square().sum().backward()
    return [one.grad for one in model.parameters()]


def equal(reference: nn.Module, model: nn.Module, call: Any) -> bool:
    pairs = zip(gradients(reference, reference), gradients(model, call), strict=True)
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def test_a_compiled_model_keeps_its_plan() -> None:
    reference, model, plan = pair()
    call = torch.compile(model, **GIVEN)
    assert all(equal(reference, model, call) for _ in range(2))
    assert plan.calls.stats() == CallStats(planned=2)
    with torch.no_grad():
        call(X)
    assert plan.calls.stats() == CallStats(planned=2, without_grad=1)


def test_a_compiled_function_that_takes_the_model_into_its_graph_is_told_once_by_name() -> None:
    reference, model, plan = pair()

    def step(x: Tensor) -> Tensor:
        return model(x) * 1

    call = torch.compile(step, **GIVEN)
    with pytest.warns(UserWarning, match=r"torch\.compile takes Net into its graph of .*step, without its plan"):
        assert equal(reference, model, call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(X)
        torch.compile(lambda x: x + 1, **GIVEN)(X)  # another function reaches no planned model
    assert plan.calls.stats() == CallStats()


def test_a_planned_part_of_a_compiled_model_and_the_models_own_compile_are_told() -> None:
    _, model, _ = pair()
    with pytest.warns(UserWarning, match=r"takes Net into its graph of .*inner, without its plan"):
        torch.compile(nn.Sequential(model, nn.Tanh()), **GIVEN)(X)
    torch.compiler.reset()
    _, model, _ = pair()
    model.compile(**GIVEN)
    with pytest.warns(UserWarning, match=r"takes Net into its graph of Net\.forward, without its plan"):
        model(X)


def test_what_traces_the_model_gets_it_as_it_is_written() -> None:
    reference, model, plan = pair()
    for strict in (False, True):
        assert torch.equal(torch.export.export(model, (X,), strict=strict).module()(X), reference(X))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch.jit itself
        traced: Any = torch.jit.trace(model, X)
    assert torch.equal(traced(X), reference(X))
    assert plan.calls.stats().planned == plan.calls.stats().unplanned == 0
    assert equal(reference, model, model)
    assert plan.calls.stats().planned == 1


def test_another_model_is_compiled_beside_a_planned_one() -> None:
    """Its backward pass is compiled when it first runs, from code of torch's that has no ``__name__``."""
    reference, model, _ = pair()
    other = copy.deepcopy(reference)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # of Python 3.13.0
        assert equal(reference, other, torch.compile(other, backend="aot_eager"))
    assert equal(reference, model, model)


def test_nothing_watches_the_compiler_after_undo() -> None:
    before = list(callback_handler.start_callbacks)
    _, model, plan = pair()
    assert len(callback_handler.start_callbacks) == len(before) + 1
    plan.undo()
    assert callback_handler.start_callbacks == before
    _, model, plan = pair()
    del model, plan
    gc.collect()
    assert callback_handler.start_callbacks == before
    _, model, plan = pair()
    torch.compiler.reset()  # forgets callbacks
    plan.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(lambda x: model(x), **GIVEN)(X)
