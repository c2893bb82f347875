"""Batch norms made again by the cheaper op: where that is offered, its bits, memory and seconds, and whole graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from environment import thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from models.networks import NORMED, conv_norms
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from truth.cpu_allocator import allocations, peak_of

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost.op_timing import costs_of, signature, with_costs
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value, map_refs, recomputable_values
from memplan.planning.graph.op_schema import BATCH_NORM_AGAIN
from memplan.planning.levers import in_place as forms
from memplan.planning.passes.recompute_batch_norm import with_cheaper_recompute
from memplan.planning.plan.decisions import decide
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.reuse_choices import translate_choices
from memplan.planning.schedule.scheduler import schedule

WITH, WITHOUT = "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats"
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPECIAL = (float("nan"), float("inf"), -0.0, 1e-40)


@dataclass
class Norm:
    """A call of a training batch norm, and a graph of it in which a derivative reads the statistics."""

    target: str
    given: tuple[Any, ...]
    """As it is called, with tensors."""
    read: bool = True

    def __post_init__(self) -> None:
        self.results = op_schema.overload(self.target)(*self.given)
        self.tensors: list[Tensor] = []
        args = tuple(self._ref(one) for one in self.given)
        made = tuple(self._ref(one).value for one in self.results)
        values = [_value(number, one, number in made) for number, one in enumerate(self.tensors)]
        reads = tuple(arg.value for arg in args if isinstance(arg, Ref))
        forward = GraphOp(0, self.target, args, {}, "forward", made, True, reads, made)
        gradient = _value(len(values), self.tensors[made[0]], True)
        values.append(replace(gradient, op=1))
        derivative = GraphOp(
            1, "aten.made_up.default", (), {}, "backward", (gradient.id,), False, made[1:3] if self.read else (),
            (gradient.id,),
        )  # fmt: skip
        graph = with_cheaper_recompute(JointGraph(tuple(values), (forward, derivative), (), ()))
        self.values, self.cheaper_recompute = graph.values, graph.ops[0].cheaper_recompute

    def _ref(self, one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        self.tensors.append(one)
        return Ref(len(self.tensors) - 1)

    def called(self, x: Tensor | None = None) -> list[Any]:
        """The arguments of the cheaper op, as tensors; of its form in place where there is something to write over."""
        assert self.cheaper_recompute is not None
        args = list(map_refs(self.cheaper_recompute.args, self.tensors.__getitem__))
        return args if x is None else [x, *args[1:]]


def _value(number: int, one: Tensor, made: bool) -> Value:
    size, dtype = one.untyped_storage().nbytes(), str(one.dtype).removeprefix("torch.")
    return Value(
        number, f"v{number}", "result" if made else "input", number, size, tuple(one.shape), one.stride(), dtype,
        0 if made else None,
    )  # fmt: skip


def norm(
    *shape: int, dtype: torch.dtype = torch.float32, small: torch.dtype | None = None, layout: str = "in order",
    weight: bool = True, bias: bool = True, running: bool = True, seed: int = 0, eps: float = 1e-5,
    special: bool = False, spread: float = 2.0, read: bool = True,
) -> Norm:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * spread + 1
    if special:
        x.view(-1)[torch.randint(x.numel(), (4,), generator=draw)] = torch.tensor(SPECIAL)
    x = x.to(dtype)
    if layout == "channels last" and len(shape) in LAST:
        x = x.contiguous(memory_format=LAST[len(shape)])
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    w, b, mean, var = (torch.randn(shape[1], generator=draw).to(small or dtype) for _ in range(4))
    rest = (mean, var.abs(), True, 0.1, eps) if running else (True, 0.1, eps)
    return Norm(WITH if running else WITHOUT, (x, w if weight else None, b if bias else None, *rest), read)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


cases = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 12), min_size=0, max_size=3),
        "batch": st.integers(1, 9),
        "channels": st.integers(1, 70),
        "dtype": st.sampled_from(DTYPES),
        "small": st.sampled_from([None, torch.float32]),
        "layout": st.sampled_from(["in order", "channels last", "transposed"]),
        "weight": st.booleans(),
        "bias": st.booleans(),
        "running": st.booleans(),
        "eps": st.sampled_from([1e-5, 1e-3, 0.0]),
        "special": st.booleans(),
        "spread": st.sampled_from([1e-3, 1.0, 50.0]),
        "seed": st.integers(0, 1 << 30),
    }
)


@settings(deadline=None, max_examples=500)
@given(cases)
def test_where_it_is_offered_the_bits_are_the_same(case: dict[str, Any]) -> None:
    shape = (case.pop("batch"), case.pop("channels"), *case.pop("sizes"))
    if case["dtype"] == torch.float64:
        case["small"] = None
    made = norm(*shape, **case)
    expected = made.results[0]
    x, statistics = made.given[0], made.results[1:3]
    large = expected.untyped_storage().nbytes() >= 32 * sum(one.untyped_storage().nbytes() for one in statistics)
    in_order = x.is_contiguous() or (len(shape) in LAST and x.is_contiguous(memory_format=LAST[len(shape)]))
    half = x.dtype == torch.float16 and statistics[0].dtype == torch.float16
    assert (made.cheaper_recompute is not None) == (large and in_order and not half)
    if made.cheaper_recompute is None:
        return
    got = op_schema.overload(made.cheaper_recompute.target)(*made.called())
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(bits(got), bits(expected))
    over = x.clone(memory_format=torch.preserve_format)
    in_place = op_schema.overload(forms.call_into(made.cheaper_recompute.target, "self").target)(*made.called(over))
    assert in_place is over
    assert torch.equal(bits(over), bits(expected))


def test_it_is_made_again_in_the_memory_of_what_was_normalized() -> None:
    again = norm(8, 4, 6, 6)
    assert again.cheaper_recompute is not None
    op = again.cheaper_recompute
    assert forms.overwrites(op.target, op.args, {}, again.values, op.makes[0]) == (0,)
    assert forms.overwritten_operand(replace(op, overwrites=(0,)), 0, again.values).name == "self"


REFUSED: dict[str, Callable[[], Norm]] = {
    "laid out otherwise": lambda: norm(8, 4, 6, 6, layout="transposed"),
    "float16 alone": lambda: norm(8, 4, 6, 6, dtype=torch.float16),
    "few elements a channel": lambda: norm(8, 4),
    "statistics that nobody reads": lambda: norm(8, 4, 6, 6, read=False),
    "a strided weight": lambda: Norm(
        WITHOUT, (torch.randn(8, 4, 6, 6), torch.ones(8)[::2], torch.ones(4), True, 0.1, 1e-5)
    ),
    "no training": lambda: Norm(
        WITH, (torch.randn(8, 4, 6, 6), None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_made_again_as_they_were_made(name: str) -> None:
    assert norm(8, 4, 6, 6).cheaper_recompute is not None
    assert REFUSED[name]().cheaper_recompute is None


MEMORY: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "no weight": {"weight": False},
    "no weight, no bias": {"weight": False, "bias": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 without a weight": {"dtype": torch.bfloat16, "weight": False},
    "bfloat16 without a bias": {"dtype": torch.bfloat16, "bias": False},
    "bfloat16, the rest float32": {"dtype": torch.bfloat16, "small": torch.float32},
}


@pytest.mark.parametrize("name", MEMORY)
def test_it_takes_what_is_said(name: str) -> None:
    made = norm(8, 1000, 8, 8, **MEMORY[name])
    assert made.cheaper_recompute is not None
    over, kept = made.given[0].clone(), list[Tensor]()
    own = allocations(lambda: kept.append(op_schema.overload(made.cheaper_recompute.target)(*made.called())))  # pyright: ignore
    in_place = allocations(lambda: torch.ops.memplan.batch_norm_again_(*made.called(over)))
    assert peak_of(own) - sum(own) == peak_of(in_place) == made.cheaper_recompute.scratch
    assert sum(in_place) == 0


def test_a_compiler_sees_ops_of_torch_alone() -> None:
    made = norm(8, 4, 6, 6)
    traced = make_fx(torch.ops.memplan.batch_norm_again.default)(*made.called())
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert "aten.native_batch_norm.default" in targets
    assert not any("memplan" in target for target in targets)


# -- whole steps


def captured(name: str) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    make, shape = NORMED[name]
    model, x = make(), torch.randn(shape)
    return model, x, capture(model, call_of((x,), {}))


@pytest.mark.parametrize("name", thinned(NORMED, 3))
def test_norms_of_every_kind_have_it(name: str) -> None:
    _, _, found = captured(name)
    norms = [op for op in found.graph.forward_ops if op.target in (WITH, WITHOUT)]
    assert norms
    for op in norms:
        assert op.cheaper_recompute is not None
        assert (op.cheaper_recompute.target, op.cheaper_recompute.index, op.cheaper_recompute.makes) == (
            BATCH_NORM_AGAIN,
            op.index,
            op.makes[:1],
        )
        assert recomputable_values(found.graph).isdisjoint(op.makes[1:])
        assert set(op.cheaper_recompute.reads) >= {*op.makes[1:3]}


def test_frozen_statistics_and_norms_of_nothing_trained_have_none() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4).requires_grad_(False), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval())
    graph = capture(model, call_of((torch.randn(3, 4, 9, 9),), {})).graph
    assert [op.cheaper_recompute for op in graph.ops] == [None] * len(graph.ops)


# -- seconds and words


def test_its_seconds_are_its_own() -> None:
    torch.manual_seed(0)
    model = conv_norms(2, nn.BatchNorm2d(4), nn.Identity())
    graph = capture(model, call_of((torch.randn(8, 4, 64, 64),), {})).graph
    priced = with_costs(graph, limit=60.0)
    op = next(op for op in priced.ops if op.cheaper_recompute is not None)
    assert op.cheaper_recompute is not None
    assert 0 < op.cheaper_recompute.seconds <= op.seconds
    key = signature(priced, op.cheaper_recompute)
    assert costs_of(priced)[key] == op.cheaper_recompute.seconds
    assert with_costs(graph, known=costs_of(priced)) == priced
    known = dict.fromkeys(costs_of(priced), 3.0)
    for own, counted in ((1.0, 1.0), (9.0, 3.0)):  # it does part of the same work
        other = with_costs(graph, known={**known, key: own})
        made = schedule(other, Choices(recomputable_values(other)))
        assert [a.op for a in made.backward if a.recomputed].count(op.index) == 1
        assert made.seconds == 3.0 * (sum(a.recomputed for a in made.backward) - 1) + counted
    rough = with_costs(graph, how="roofline").ops[op.index]
    assert rough.cheaper_recompute is not None
    assert 0 < rough.cheaper_recompute.seconds <= rough.seconds


def test_what_is_decided_says_so() -> None:
    _, _, found = captured("images")
    graph = found.graph
    op = next(op for op in graph.ops if op.cheaper_recompute is not None)
    names = [graph.values[value].name for value in op.makes[:2]]
    all_kept, dropped = (
        {one.scope.names: one.reason for one in decide(graph, schedule(graph, Choices(recompute)))}
        for recompute in (frozenset[int](), recomputable_values(graph))
    )
    assert dropped[names[0],].startswith("recomputing it by batch_norm_again takes")
    for reasons in (all_kept, dropped):
        assert reasons[names[1],].endswith(f"; with it batch_norm_again can make {names[0]} again")


def test_choices_hold_for_a_smaller_batch_without_it() -> None:
    """Of few elements a channel, the norm is made again as it was made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    large, small = (capture(copy.deepcopy(model), call_of((torch.randn(size, 4),), {})).graph for size in (80, 8))
    (op,) = (op for op in large.ops if op.cheaper_recompute is not None)
    assert not any(op.cheaper_recompute for op in small.ops)
    everything = Choices(recomputable_values(large) - {op.args[0].value})
    choices = translate_choices(everything, large, small)
    assert choices is not None
    called = [
        [action.called_op(graph).target for action in schedule(graph, one).backward if action.recomputed]
        for graph, one in ((large, everything), (small, choices))
    ]
    assert called == [[BATCH_NORM_AGAIN, "aten.relu.default"], [WITH, "aten.relu.default"]]
