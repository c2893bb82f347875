"""Graphs for given sizes out of one trace are those that a capture of each call gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from environment import needs_sizes_as_symbols
from models.networks import SmallGPT, SmallResNet, token_loss
from planning.graphs import EARLY
from torch import Tensor, nn

from memplan.planning.capture import symbolic_shapes as module
from memplan.planning.capture.capture import Captured, SymbolicError, capture, capture_symbolic
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.planning.capture.symbolic_shapes import Shapes
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.reuse_choices import translate_choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.validation.validate import validate


def tokens(batch: int, length: int) -> Call:
    numbers = torch.arange(batch * length).reshape(batch, length)
    return call_of((numbers % 40, numbers * 7 % 40), {})


def shapes_of(model: nn.Module) -> Shapes:
    return Shapes(model, lambda _: model.training)


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    torch.manual_seed(0)
    return with_loss(SmallGPT(layers=1), token_loss)


@pytest.fixture(scope="module")
def of_gpt(gpt: nn.Module) -> Shapes:
    """Of sizes that differ in both dimensions, traced with symbols for them."""
    shapes = shapes_of(gpt)
    shapes.record_sizes(tokens(4, 24))
    shapes.capture(tokens(3, 19))
    return shapes


class Counted:
    """How often a call was captured by itself, and with symbols."""

    def __init__(self, monkeypatch: Any) -> None:
        self.alone = self.symbolic = 0
        for name in ("capture", "capture_symbolic"):
            monkeypatch.setattr(module, name, self._counting(name, getattr(module, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.alone += name == "capture"
            self.symbolic += name == "capture_symbolic"
            return function(*args, **kwargs)

        return counted


def content(captured: Captured) -> Any:
    """All that a plan is made of and an engine runs; names of values are those of a trace's nodes."""
    graph = captured.graph
    values = [dataclasses.replace(value, name="") for value in graph.values]
    ops = [dataclasses.replace(op, where=None) for op in graph.ops]
    constants = {value: tensor.tolist() for value, tensor in captured.constants.items()}
    return values, ops, graph.forms, graph.outputs, graph.gradients, graph.mutations, constants


@pytest.mark.slow
@needs_sizes_as_symbols
def test_a_transformers_graph_is_the_captured_one(gpt: nn.Module, of_gpt: Shapes, monkeypatch: Any) -> None:
    count = Counted(monkeypatch)
    found, alone = of_gpt.capture(tokens(2, 2)), capture(gpt, tokens(2, 2))
    assert content(found) == content(alone)
    assert (found.returned.output_indices, found.outputs_with_tangent) == (
        alone.returned.output_indices,
        alone.outputs_with_tangent,
    )
    assert count.alone == count.symbolic == 0


def test_a_convolutional_networks_graph_is_the_captured_one(monkeypatch: Any) -> None:
    model = SmallResNet()
    shapes = shapes_of(model)
    shapes.record_sizes(call_of((torch.randn(8, 3, 16, 16),), {}))
    shapes.capture(call_of((torch.randn(6, 3, 16, 16),), {}))
    count = Counted(monkeypatch)
    call = call_of((torch.randn(2, 3, 16, 16),), {})
    found = shapes.capture(call)
    assert count.alone == 0
    assert content(found) == content(capture(model, call))


def test_one_size_first_then_another(monkeypatch: Any) -> None:
    by_token = with_loss(nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40)), token_loss)
    shapes, count = shapes_of(by_token), Counted(monkeypatch)
    shapes.record_sizes(tokens(4, 24))
    for sizes, alone, symbolic in (((4, 23), 0, 1), ((4, 9), 0, 1), ((3, 9), 0, 2), ((2, 11), 0, 2), ((4, 24), 0, 2)):
        shapes.capture(tokens(*sizes))
        assert (count.alone, count.symbolic) == (alone, symbolic)


@needs_sizes_as_symbols
def test_sizes_that_torch_takes_for_numbers_are_captured_alone(
    gpt: nn.Module, of_gpt: Shapes, monkeypatch: Any
) -> None:
    count, call = Counted(monkeypatch), tokens(1, 8)
    assert content(of_gpt.capture(call)) == content(capture(gpt, call))
    assert count.alone == 1
    of_gpt.capture(tokens(2, 8))
    assert count.alone == 1, "and the graph for the others stays"


class Branching(nn.Module):
    """Another graph from a length on, and a number that is a float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.tanh() if x.shape[0] > 20 else y.relu()


class Cached(nn.Linear):
    """Remembers a length."""

    last = 0

    def forward(self, input: Tensor) -> Tensor:
        self.last = input.shape[0]
        return super().forward(input)


class Scaled(nn.Linear):
    """Multiplies by a float that follows from a length."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * input.shape[0] ** -0.5


class Counting(nn.Linear):
    """Returns a length, too."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), input.shape[0]


def rows(count: int) -> Call:
    return call_of((torch.randn(count, 8),), {})


def test_sizes_that_take_another_branch_are_captured_alone(monkeypatch: Any) -> None:
    model = Branching()
    shapes, count = shapes_of(model), Counted(monkeypatch)
    shapes.record_sizes(rows(30))
    for size, alone in ((25, 0), (22, 0), (21, 0), (20, 1), (8, 2), (40, 2)):
        assert content(shapes.capture(rows(size))) == content(capture(model, rows(size)))
        assert count.alone == alone


@pytest.mark.parametrize("kind", [Scaled, Counting])
def test_what_is_more_than_integers_and_tensors_is_captured_alone(kind: type[nn.Module], monkeypatch: Any) -> None:
    model = kind(8, 8)
    shapes, count = shapes_of(model), Counted(monkeypatch)
    shapes.record_sizes(rows(30))
    for size in (25, 22):
        call = rows(size)
        found = shapes.capture(call)
        assert content(found) == content(capture(model, call))
        assert list(found.returned.structure.constants()) == ([size] if kind is Counting else [])
    assert (count.alone, count.symbolic) == (2, 1), "tried once"


def test_a_module_is_as_it_was_when_its_trace_with_symbols_fails() -> None:
    model = Cached(8, 8)
    model.last = 7
    with pytest.raises(SymbolicError):
        capture_symbolic(model, rows(12), [frozenset({0})])
    assert type(model.last) is int
    assert model.last == 7


def test_layouts_and_states_are_kinds_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    shapes = shapes_of(model)
    shapes.record_sizes(rows(30))
    shapes.capture(rows(25))
    transposed = call_of((torch.randn(8, 9).t(),), {})
    assert content(shapes.capture(transposed)) == content(capture(model, transposed))
    model.train()
    assert content(shapes.capture(rows(9))) == content(capture(model, rows(9)))


# -- decisions


@pytest.fixture(scope="module")
def large(gpt: nn.Module) -> JointGraph:
    return capture(gpt, tokens(4, 24)).graph


@pytest.mark.slow
def test_choices_name_the_same_values_and_ops(gpt: nn.Module, large: JointGraph) -> None:
    small = capture(gpt, tokens(2, 9)).graph
    again = sorted(recomputable_values(large))
    pieces = frozenset(op.index for op in large.backward_ops[::5])
    encoded = frozenset((one.lever, one.value) for one in large.forms)
    choices = Choices(recompute=frozenset(again[::2]), saved_forms=encoded, pieces=pieces, gradients=EARLY)
    taken = translate_choices(choices, large, small)
    assert taken is not None
    names = [{graph.values[value].name for value in one.recompute} for graph, one in ((large, choices), (small, taken))]
    assert names[0] == names[1]
    assert len(names[0]) == len(choices.recompute)
    assert [small.ops[at].target for at in sorted(taken.pieces or ())] == [
        large.ops[at].target for at in sorted(pieces)
    ]
    assert taken.gradients == EARLY
    validate(small, schedule(small, taken))


def test_nothing_is_taken_over_by_a_larger_call_or_another_step(gpt: nn.Module, large: JointGraph) -> None:
    assert translate_choices(Choices(), large, large) == Choices()
    assert translate_choices(Choices(), large, capture(gpt, tokens(4, 25)).graph) is None
    without = with_loss(SmallGPT(layers=1, p=0.0), token_loss)
    assert translate_choices(Choices(), large, capture(without, tokens(2, 9)).graph) is None
