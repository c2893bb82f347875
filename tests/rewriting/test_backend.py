from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from environment import slow, thinned
from rewriting.cells import CELLS, CHOICES, planner_of, same, same_state, total
from torch import Tensor, nn

from memplan.errors import UsageError
from memplan.rewriting import backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(
    model: nn.Module, choice: str = "half dropped", seen: list[Any] | None = None, dynamic: bool | None = None
) -> Any:
    def run(graph: Any, inputs: Any) -> Any:
        def planner(module: nn.Module) -> Any:
            plan = planner_of(module, CHOICES[choice])

            def noted(call: Any, held: bool) -> Any:
                made = plan(call, held)
                if seen is not None:
                    seen.append(made)
                return made

            return noted

        return backend.plan_graph(graph, inputs, planner)

    return torch.compile(model, backend=run, dynamic=dynamic)


@pytest.mark.parametrize("name", thinned(CELLS, 5))
def test_three_steps_are_eagers_bit_for_bit(name: str) -> None:
    cell = CELLS[name]
    torch.manual_seed(0)
    reference = cell.make()
    model = copy.deepcopy(reference)
    seen: list[Any] = []
    results = []
    for net, call in ((reference, reference), (model, compiled(model, seen=seen))):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        outputs = []
        for _ in range(3):
            args, kwargs = cell.arguments(cell.batch)
            optimizer.zero_grad()
            output = call(*args, **kwargs)
            total(output).backward()
            optimizer.step()
            outputs.append(output)
        results.append(outputs)
    same(*results)
    same_state(reference, model)
    assert len(seen) == 1
    parameters = [value for value in seen[0].captured.graph.values if value.kind == "parameter"]
    assert len(parameters) == len(list(reference.parameters()))


@pytest.mark.slow
def test_other_batch_sizes_and_no_grad() -> None:
    cell = CELLS["batch norm"]
    torch.manual_seed(0)
    reference = cell.make()
    model = copy.deepcopy(reference)
    seen: list[Any] = []
    for net, call in ((reference, reference), (model, compiled(model, seen=seen))):
        torch.manual_seed(1)
        for batch in (4, 2, 6, 4):
            total(call(*cell.arguments(batch)[0])).backward()
        with torch.no_grad():
            call(*cell.arguments(4)[0])
        net.eval()
        with torch.no_grad():
            call(*cell.arguments(4)[0])
    same_state(reference, model)
    assert len(seen) >= 3


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("batch norm and dropout", True),
        *slow(
            ("attention dropout", None),
            ("batch norm and dropout", False),
            ("batch norm and dropout", None),
            ("weight tying", True),
        ),
    ],
)
def test_symbolic_sizes_and_numbers_are_planned_by_what_they_are(name: str, dynamic: bool | None) -> None:
    cell = CELLS[name]
    torch.manual_seed(0)
    reference = cell.make()
    model = copy.deepcopy(reference)
    seen: list[Any] = []
    batches = (6, 3, 5, 6, 3)
    for net, call in ((reference, reference), (model, compiled(model, seen=seen, dynamic=dynamic))):
        torch.manual_seed(1)
        for batch in batches:
            total(call(*cell.arguments(batch)[0])).backward()
            net.zero_grad()
    same_state(reference, model)
    inputs = [[v for v in one.captured.graph.values if v.kind == "input" and len(v.shape) > 1] for one in seen]
    assert {value.shape[0] for values in inputs for value in values} == set(batches)
    # each once, and once more where Dynamo has made another graph of it
    assert len(set(batches)) <= len(seen) <= len(set(batches)) + (dynamic is not False)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float, shift: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x * scale)))) + shift * scale


def test_a_number_that_changes_is_planned_for_each_of_its_values() -> None:
    torch.manual_seed(0)
    reference = Scaled()
    model = copy.deepcopy(reference)
    seen: list[Any] = []
    for net, call in ((reference, reference), (model, compiled(model, seen=seen))):
        torch.manual_seed(1)
        for number, scale in enumerate((0.5, 0.25, 0.75, 0.25, 0.75)):
            net.drop.p = 0.1 if number < 2 else 0.2
            total(call(torch.randn(4, 16), scale, torch.tensor(3.0))).backward()
    same_state(reference, model)
    assert len(seen) < 10  # with gradients held it is planned once more


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        torch._dynamo.graph_break()  # the line that is named
        return self.last(torch.tanh(h))


def test_graph_breaks_are_named_once_and_the_parts_are_planned() -> None:
    torch.manual_seed(0)
    reference = Breaks()
    model = copy.deepcopy(reference)
    seen: list[Any] = []
    lines = Breaks.forward.__code__.co_firstlineno + 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (reference, compiled(model, seen=seen)):
            torch.manual_seed(1)
            for batch in (4, 2):
                total(call(torch.randn(batch, 16))).backward()
    told = [str(one.message) for one in caught if "graph breaks" in str(one.message)]
    assert len(told) == 1
    assert f"tests/rewriting/test_backend.py:{lines}" in told[0]
    same_state(reference, model)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("options", "text"), [(None, "No budget"), ({}, "No budget"), ({"budget": "6 GiB", "speed": 1}, "speed"),
                          ({"budget": "8 Gbit"}, "8 Gbit")],
)  # fmt: skip
def test_options_that_are_none(options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        backend.memplan(torch.fx.symbolic_trace(nn.Linear(2, 2)), [torch.ones(1, 2)], options=options)


def test_a_budget() -> None:
    reference = CELLS["batch norm"].make()
    model = copy.deepcopy(reference)
    x = CELLS["batch norm"].arguments(4)[0][0]
    call = torch.compile(model, backend=backend.memplan, options={"budget": "64 MiB"})
    for net in (reference, call):
        total(net(x)).backward()
    same_state(reference, model)
