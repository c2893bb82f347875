"""The derivative of cross-entropy as one op in the graph: where it is, and where nothing changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from environment import slow, thinned
from torch import Tensor, nn
from torch.nn import functional as F

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops that graphs are evaluated with here
from memplan.planning.capture import capture as capturing
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.planning.cost.op_timing import with_costs
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs, refs
from memplan.planning.passes import pipeline
from memplan.planning.passes.merge_cross_entropy_backward import fused
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule

ROWS, CLASSES, WIDTH = 256, 2048, 8
SIZE = ROWS * CLASSES * 4


class Head(nn.Module):
    def __init__(self, *shape: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(WIDTH, classes), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(*self.shape) if self.shape else self.linear(x)


def labels(*shape: int, classes: int = CLASSES) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(1))


def captured(model: nn.Module, loss: Any, target: Tensor, *, rows: int = ROWS) -> tuple[Captured, dict[int, Tensor]]:
    """A step, and what is handed in, by value."""
    torch.manual_seed(0)
    x, step = torch.randn(rows, WIDTH), with_loss(model, loss)
    call = call_of((x, target), {})
    found = capturing.capture(step, call)
    names = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    names = {key.removeprefix("model."): one for key, one in names.items()}
    given = dict(found.constants)
    for value in found.graph.values:
        if value.kind in ("parameter", "buffer"):
            given[value.id] = names[value.path.removeprefix("model.")].detach()
        elif value.kind == "input":
            given[value.id] = call.tensors[int(value.path)]
        elif value.kind == "tangent":
            given[value.id] = torch.full(value.shape, 0.7)
    return found, given


def evaluated(graph: JointGraph, given: dict[int, Tensor]) -> list[Tensor]:
    """The graph's outputs and gradients, op by op."""
    there = dict(given)
    for op in graph.ops:
        args, kwargs = map_refs((list(op.args), op.kwargs), there.__getitem__)
        made = op_schema.overload(op.target)(*args, **kwargs)
        for number, one in zip(op.outputs, made if op.returns_tuple else (made,), strict=True):
            if number is not None:
                there[number] = one
    return [there[value] for value in (*graph.outputs, *(gradient for _, gradient in graph.gradients))]


def of(graph: JointGraph, name: str) -> list[GraphOp]:
    return [op for op in graph.ops if name in op.target]


def consistent(graph: JointGraph) -> None:
    """What graph.py says of every graph."""
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    assert [value.id for value in graph.values] == list(range(len(graph.values)))
    assert len({value.name for value in graph.values}) == len(graph.values)
    there = {value.id for value in graph.values if value.kind not in ("result", "encoded")}
    for op in graph.ops:
        assert set(refs((op.args, op.kwargs))) <= there
        assert op.reads == tuple(dict.fromkeys(graph.base(v) for v in refs((op.args, op.kwargs))))
        made = [v for v in op.outputs if v is not None]
        assert op.makes == tuple(v for v in made if graph.base(v) == v)
        assert all(graph.values[v].op == op.index for v in made)
        assert op.gradient_of is None or graph.ops[op.gradient_of].phase == "forward"
        there |= set(made)
    for value in graph.values:
        base = graph.values[value.base]
        assert base.base == base.id
        assert (value.bytes == 0) == (value.is_view or 0 in value.shape)


def plain(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def flat(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target)


def softmax_first(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output, -1).view(-1, CLASSES), target, reduction="sum")


def weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, CLASSES)
    return F.cross_entropy(output, target, weight, ignore_index=3, reduction="none").square().sum()


FUSED = {
    "plain": (Head(), plain, labels(ROWS)),
    "views of the logits": (Head(4, -1, CLASSES), flat, labels(ROWS)),
    "views of the log-probabilities": (Head(4, -1, CLASSES), softmax_first, labels(ROWS)),
    "weights, a label ignored, not reduced": (Head(), weighted, labels(ROWS)),
    "a text, classes second": (Head(16, 128, 256), plain, labels(16, 256, classes=128)),
    "an image": (Head(16, 128, 16, 16), plain, labels(16, 16, 16, classes=128)),
}


@pytest.mark.parametrize("name", thinned(FUSED, 2))
def test_the_two_are_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, given = captured(*FUSED[name])
    graph = found.graph
    consistent(graph)
    (op,) = of(graph, "memplan.")
    assert op.target == op_schema.CROSS_ENTROPY
    assert not of(graph, "nll_loss_backward") + of(graph, "nll_loss2d_backward") + of(graph, "_log_softmax_backward")
    assert op.gradient_of is not None
    assert graph.ops[op.gradient_of].target == "aten._log_softmax.default"
    log_probs = graph.ops[op.gradient_of].makes[0]
    assert op.overwrites == (log_probs,)
    made = schedule(graph, Choices())
    (action,) = [one for one in made.backward if one.op == op.index]
    assert action.overwritten == log_probs
    monkeypatch.setattr(pipeline, "fused", lambda graph: graph)
    other, _ = captured(*FUSED[name])
    assert len(other.graph.ops) == len(graph.ops)
    for one, before in zip(evaluated(graph, given), evaluated(other.graph, given), strict=True):
        assert torch.equal(one, before)
    at = made.backward.index(action)
    now, then = levels(made).backward[at], levels(schedule(other.graph, Choices())).backward[at]
    assert SIZE * 0.4 <= then - now <= SIZE


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def twice(output: Tensor, target: Tensor) -> Tensor:
    log_probs = torch.log_softmax(output, 1)
    return F.nll_loss(log_probs, target) + log_probs.square().mean()


def other_dimension(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output, 0), target)


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output, 1) * 0.5, target)


def across(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output.t().contiguous(), 0).t(), target)


def part(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output, 1)[: ROWS // 2], target[: ROWS // 2])


def turned(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output.view(16, 128, 16, 16), 1).transpose(2, 3), target.view(16, 16, 16))


@pytest.mark.parametrize("loss", [smoothed, twice, scaled, *slow(other_dimension, across, part, turned)])
def test_left_as_they_are(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = (Head(classes=128), labels(4096, classes=128)) if loss is turned else (Head(), labels(ROWS))
    found, _ = captured(model, loss, target, rows=len(target))
    assert not of(found.graph, "memplan.")
    monkeypatch.setattr(pipeline, "fused", lambda graph: graph)
    assert captured(model, loss, target, rows=len(target))[0].graph.fingerprint == found.graph.fingerprint


def test_whoever_else_needs_the_gradient_of_the_loss_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "fused", lambda graph: graph)
    graph = captured(*FUSED["views of the log-probabilities"])[0].graph
    assert fused(graph) is not graph
    (loss,) = of(graph, "nll_loss_backward")
    gradient, number = loss.makes[0], len(graph.values)
    value = replace(graph.values[gradient], id=number, base=number, name="more", op=len(graph.ops))
    more = GraphOp(
        len(graph.ops), "aten.neg.default", (Ref(gradient),), {}, "backward", (number,), False, (gradient,), (number,)
    )
    for other in (
        replace(graph, values=(*graph.values, value), ops=(*graph.ops, more)),
        replace(graph, outputs=(*graph.outputs, gradient)),
        replace(graph, gradients=(*graph.gradients, (0, gradient))),
    ):
        assert fused(other) is other


@pytest.mark.parametrize("name", ["views of the log-probabilities", "a text, classes second"])
def test_only_views_that_keep_the_elements_are_looked_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "fused", lambda graph: graph)
    graph = captured(*FUSED[name])[0].graph
    (loss,) = of(graph, "_backward.default")[:1]
    (softmax,) = of(graph, "_log_softmax_backward")
    assert fused(graph) is not graph
    chains = [graph.values[ref.value] for ref in (loss.args[1], softmax.args[0], softmax.args[1])]
    assert any(value.is_view for value in chains)
    for value in chains:
        if value.is_view and value.op is not None:
            ops = list(graph.ops)
            ops[value.op] = replace(ops[value.op], target="aten._neg_view.default")
            changed = replace(graph, ops=tuple(ops))
            assert fused(changed) is changed


def test_a_small_loss_stays() -> None:
    for rows, classes, stays in ((256, 1023, True), (256, 1024, False), (1, 1 << 19, True)):
        found, _ = captured(Head(classes=classes), plain, labels(rows, classes=classes), rows=rows)
        assert bool(of(found.graph, "nll_loss_backward")) == stays
        assert bool(of(found.graph, "memplan.")) != stays


class Both(nn.Module):
    """Returns the log-probabilities, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(self.linear(x), 1)
        return F.nll_loss(log_probs, target), log_probs.detach()


def test_what_is_returned_is_not_written_over() -> None:
    call = call_of((torch.randn(ROWS, WIDTH), labels(ROWS)), {})
    graph = capturing.capture(Both(), call).graph
    (op,) = of(graph, "memplan.")
    made = schedule(graph, Choices())
    assert [action.overwritten for action in made.backward if action.op == op.index] == [None]


def test_the_gradient_of_the_logits_is_returned_where_they_are_a_parameter() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.randn(ROWS, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.logits

    found, given = captured(Logits(), plain, labels(ROWS))
    consistent(found.graph)
    (op,) = of(found.graph, "memplan.")
    ((_, gradient),) = found.graph.gradients
    assert found.graph.base(gradient) == op.makes[0]
    logits = next(given[v.id] for v in found.graph.values if v.kind == "parameter").clone().requires_grad_()
    (0.7 * plain(logits, labels(ROWS))).backward()
    assert logits.grad is not None
    assert torch.equal(evaluated(found.graph, given)[-1], logits.grad)


def test_it_costs_about_what_the_two_do(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_costs(captured(Head(), plain, labels(ROWS))[0].graph, how="roofline")
    (op,) = of(graph, "memplan.")
    monkeypatch.setattr(pipeline, "fused", lambda graph: graph)
    before = with_costs(captured(Head(), plain, labels(ROWS))[0].graph, how="roofline")
    two = sum(one.seconds for name in ("nll_loss_backward", "_log_softmax_backward") for one in of(before, name))
    assert two / 4 < op.seconds < two * 1.5
