"""A lever that memplan does not have, from a test alone: keep the upper half of a product, make the rest of it again.

It is all that a new lever needs: one class, listed in the registry. Search, schedule, validator, engine and proof take
it from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.errors import FormatError, ScheduleError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost.op_timing import with_costs
from memplan.planning.graph.joint_graph import JointGraph, Ref, SavedForm, Value, recomputable_values
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES
from memplan.planning.graph.roofline import Work, work_of
from memplan.planning.levers.lever import Called, Lever, Situation
from memplan.planning.levers.registry import registered
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.codegen import program
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.lower_bound import Relaxation
from memplan.planning.validation.validate import validate

BMM = "aten.bmm.default"


@torch.library.custom_op("memplan_toy::upper_half", mutates_args=())
def upper_half(product: Tensor) -> Tensor:
    """The second half of a batch of matrices."""
    return product[product.shape[0] // 2 :].clone()


@torch.library.custom_op("memplan_toy::whole_again", mutates_args=())
def whole_again(half: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The product of two batches of matrices, of which half is there: without a copy in between."""
    cut = a.shape[0] // 2
    result = half.new_empty(a.shape[0], *half.shape[1:])
    torch.bmm(a[:cut], b[:cut], out=result[:cut])
    result[cut:] = half
    return result


class UpperHalf(Lever):
    name = "upper half"
    comments = ("keeps the upper half of", "completes")

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        maker = graph.maker.get(value.id)
        if maker is None or maker.target != BMM or maker.phase != "forward":
            return "it is no product of two batches of matrices"
        if value.shape[0] % 2 or value.bytes < 4096:
            return "there is no half of it that is worth keeping"
        return "" if value.id not in map(graph.base, graph.outputs) else "the model returns it"

    def forms(self, graph: JointGraph, situation: Situation) -> Iterator[tuple[SavedForm, Value]]:
        for op in graph.forward_ops:
            for value in map(graph.values.__getitem__, op.makes):
                if not self.why_not(graph, value, situation):
                    half = (value.shape[0] // 2, *value.shape[1:])
                    kept = replace(
                        value, name=f"{value.name}_half", kind="encoded", bytes=value.bytes // 2, shape=half, op=None
                    )
                    yield SavedForm(self.name, value.id, -1, fetch_operands=op.reads), kept

    def works(self, graph: JointGraph, form: SavedForm) -> tuple[Work, Work, Work]:
        value, kept = graph.values[form.value], graph.values[form.encoded]
        again = work_of(graph, graph.maker[form.value])
        fetch = Work(again.flops // 2, again.bytes // 2 + 2 * kept.bytes, again.rate_dtype)
        return Work(0, 2 * kept.bytes, value.dtype), fetch, Work(0, 0, value.dtype)

    def store(self, graph: JointGraph, form: SavedForm) -> Called:
        return "memplan_toy.upper_half.default", (Ref(form.value),), {}

    def fetch(self, graph: JointGraph, form: SavedForm) -> Called:
        return "memplan_toy.whole_again.default", (Ref(form.encoded), *graph.maker[form.value].args), {}


class Net(nn.Module):
    """Products whose results are read by the backward pass, one after the other."""

    def __init__(self, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(8, width, width, generator=draw) / 10 for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.sin(torch.bmm(x, weight))
        return x.square().mean()


def inputs() -> Tensor:
    return torch.randn(8, 256, 256, generator=torch.Generator().manual_seed(1))


def captured() -> JointGraph:
    return with_costs(capture(Net(), call_of((inputs(),), {})).graph, how="roofline")


def test_without_it_a_graph_knows_nothing_of_it() -> None:
    assert captured().forms_by("upper half") == ()


def planned(budget: Any, **options: Any) -> memplan.Plan:
    return memplan.plan(Net(), inputs(), budget=budget, costs="roofline", **options)


def test_the_search_chooses_it_and_the_planned_step_is_proven() -> None:
    kept = planned("1 GiB")
    budget = kept.floor + (kept.peak - kept.floor) // 4  # where half of a product is enough
    plain = planned(budget)
    with registered(UpperHalf()):
        plan = planned(budget)
        assert plan.count("upper half") > 0
        assert plan.seconds < plain.seconds
        assert plan.grade == "exact"
        assert plan.peak <= budget
        assert f"{plan.count('upper half')} by upper half" in plan.summary
        assert "torch.ops.memplan_toy.whole_again.default(bmm" in plan.as_python()
        assert memplan.Plan.from_json(plan.to_json()) == plan
        fitted = memplan.fit(Net(), inputs(), budget=budget, plan=plan, pairs=0)
        try:
            assert fitted.proof.ok
            assert fitted.proof.same
            assert 0 <= plan.peak - fitted.proof.peak <= NUMBER_TENSOR_BYTES  # predicted for a kernel's numbers at most
        finally:
            fitted.undo()
    with pytest.raises(FormatError, match="upper half"):
        memplan.Plan.from_json(plan.to_json())


@pytest.fixture
def graph() -> Iterator[JointGraph]:
    with registered(UpperHalf()):
        yield captured()


def drawn(graph: JointGraph, seed: int) -> Choices:
    draw = random.Random(seed)
    again = frozenset(value for value in sorted(recomputable_values(graph)) if draw.random() < 0.5)
    kept = frozenset((form.lever, form.value) for form in graph.forms if draw.random() < 0.5)
    return Choices(again, kept)


def test_all_accounts_of_it_agree(graph: JointGraph) -> None:
    assert len(graph.forms_by("upper half")) == 3
    evaluator = Evaluator(graph)
    drafts = [drawn(graph, seed) for seed in range(200)]
    found = evaluator.evaluate(np.stack([evaluator.column(choices) for choices in drafts], axis=1))
    for at, choices in enumerate(drafts):
        made = schedule(graph, choices)
        assert validate(graph, made) == levels(made).peak == found.peak[at]
        assert made.seconds == pytest.approx(found.seconds[at])
    relaxation = Relaxation(evaluator.flat)
    assert relaxation.unavoidable.peak <= found.peak.min()
    for budget in np.quantile(found.peak, [0.0, 0.25, 0.5, 1.0]).astype(int):
        bound = relaxation.seconds(int(budget))
        assert bound is not None
        assert bound.seconds <= found.seconds[found.peak <= budget].min() + 1e-12


def test_the_validator_checks_it_by_what_it_declares(graph: JointGraph) -> None:
    (form, *_) = graph.forms_by("upper half")
    made = schedule(graph, Choices(saved_forms=frozenset({(form.lever, form.value)})))
    (at,) = (at for at, action in enumerate(made.backward) if action.kind == "fetch")
    fetch = made.backward[at]
    assert (fetch.reads, fetch.makes, fetch.frees) == (
        (form.encoded, *form.fetch_operands),
        (form.value,),
        (form.encoded,),
    )
    for wrong in (replace(fetch, reads=(form.encoded,)), replace(fetch, frees=()), replace(fetch, encoding=None)):
        with pytest.raises(ScheduleError):
            validate(graph, replace(made, backward=(*made.backward[:at], wrong, *made.backward[at + 1 :])))
    assert "# keeps the upper half of, 1.0 MiB" in program(made)
