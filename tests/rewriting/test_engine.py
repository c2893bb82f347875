from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from environment import slow, thinned
from models.networks import NORMED
from rewriting.cells import CELLS, CHOICES, Cell, installed, same, same_state, total
from torch import nn


def trained(model: nn.Module, loop: Callable[[nn.Module], None]) -> torch.Tensor:
    """Run a training loop from a fixed random state; returns the state that it leaves."""
    torch.manual_seed(5)
    loop(model)
    return torch.get_rng_state()


def compare(cell: Cell, choice: str, loop: Callable[[nn.Module], None], engines: int) -> None:
    torch.manual_seed(1)
    reference = cell.make()
    model = copy.deepcopy(reference)
    plan = installed(model, CHOICES[choice])
    state = trained(reference, loop)
    assert torch.equal(state, trained(model, loop))
    assert len(plan.engines) == engines
    same_state(reference, model)


@pytest.mark.parametrize("choice", ["half dropped", *slow("encoded", "all kept", "all dropped")])
@pytest.mark.parametrize("name", thinned(CELLS, 2))
def test_three_steps_are_eagers_bit_for_bit(name: str, choice: str) -> None:
    cell = CELLS[name]
    seen: list[torch.Tensor] = []

    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            args, kwargs = cell.arguments(cell.batch)
            optimizer.zero_grad()
            output = model(*args, **kwargs)
            seen.append(output)
            total(output).backward()
            optimizer.step()

    compare(cell, choice, loop, 1)
    for reference, planned in zip(seen[:3], seen[3:], strict=True):
        same(reference, planned)


@pytest.mark.parametrize("half", [True, *slow(False)], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", thinned(NORMED, 3))
def test_norms_of_every_kind_that_are_made_again(name: str, half: bool) -> None:
    make, shape = NORMED[name]
    torch.manual_seed(1)
    reference = nn.Sequential(make(), nn.Tanh())
    model = copy.deepcopy(reference)
    plan = installed(model, CHOICES["all dropped"])

    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                output = model(torch.randn(shape))
            total(output.float()).backward()
            optimizer.step()

    assert torch.equal(trained(reference, loop), trained(model, loop))
    same_state(reference, model)
    (engine,) = plan.engines
    assert "batch_norm_again" in engine.text


@pytest.mark.parametrize("choice", ["half dropped", *slow("encoded", "all kept", "all dropped")])
@pytest.mark.parametrize("name", ["dropout", "batch norm", "weight tying"])
def test_four_micro_batches_are_added_up(name: str, choice: str) -> None:
    cell = CELLS[name]

    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                args, kwargs = cell.arguments(cell.batch)
                (total(model(*args, **kwargs)) / 4).backward()
            optimizer.step()

    compare(cell, choice, loop, 2)


@pytest.mark.parametrize("choice", ["half dropped", *slow("encoded", "all kept", "all dropped")])
@pytest.mark.parametrize("name", ["batch norm and dropout", *slow("attention dropout")])
def test_evaluation_between_steps(name: str, choice: str) -> None:
    cell = CELLS[name]

    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            args, kwargs = cell.arguments(cell.batch)
            optimizer.zero_grad()
            total(model(*args, **kwargs)).backward()
            optimizer.step()
            with torch.no_grad():
                model(*args, **kwargs)
            model.eval()
            with torch.no_grad():
                assert not model(*args, **kwargs).requires_grad
            total(model(*args, **kwargs)).backward()
            model.train()

    compare(cell, choice, loop, 2)


@pytest.mark.parametrize("choice", ["half dropped", *slow("encoded", "all kept", "all dropped")])
@pytest.mark.parametrize("name", ["batch norm and dropout", "weight tying"])
def test_another_batch_size_is_planned_anew(name: str, choice: str) -> None:
    cell = CELLS[name]

    def loop(model: nn.Module) -> None:
        for batch in (4, 2, 4, 6):
            model.zero_grad()
            args, kwargs = cell.arguments(batch)
            total(model(*args, **kwargs)).backward()

    compare(cell, choice, loop, 3)


def test_gradients_of_many_layers_come_in_few_groups() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    reference = copy.deepcopy(model)
    plan = installed(model, CHOICES["all dropped"])
    x = torch.randn(2, 4)
    total(model(x)).backward()
    total(reference(x)).backward()
    same_state(reference, model)
    (engine,) = plan.engines
    assert 8 <= engine.text.count("yield given") <= 16
