"""The derivative of cross-entropy as one op against torch's two: bits, memory, and whole steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from environment import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from truth.cpu_allocator import allocations, peak_of

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops
from memplan import _torch
from memplan.planning.capture import capture as capturing
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.levers import in_place as forms
from memplan.planning.ops.pieces import LARGEST_PIECE
from memplan.planning.passes import pipeline
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.rewriting.engine import Engine

ATEN, MEMPLAN = torch.ops.aten, torch.ops.memplan
TARGET = op_schema.CROSS_ENTROPY
NONE, MEAN, SUM = 0, 1, 2


def arguments(
    shape: tuple[int, ...], reduction: int, *, weighted: bool = False, dtype: torch.dtype = torch.float32,
    ignored: float = 0.0, ignore: int = -100, special: bool = False, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """What the derivative of the loss takes, after torch's own forward pass; the labels 0 and the last are there."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=draw, dtype=torch.float64) * 4
    if special:
        for at, value in enumerate((float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0)):
            logits.view(-1)[at * 13 :: 1009] = value
    log_probs = torch.log_softmax(logits.to(dtype), 1)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=draw)
    target.view(-1)[0], target.view(-1)[-1] = 0, shape[1] - 1
    target[torch.rand(target.shape, generator=draw) < ignored] = ignore
    weight = torch.rand(shape[1], generator=draw, dtype=torch.float64).to(dtype) if weighted else None
    forward = ATEN.nll_loss_forward if len(shape) == 2 else ATEN.nll_loss2d_forward
    loss, total = forward(log_probs, target, weight, reduction, ignore)
    grad = torch.randn(loss.shape, generator=draw, dtype=torch.float64).to(dtype)
    return grad, log_probs, target, weight, reduction, ignore, total


def by_torch(*given: Any) -> Tensor:
    loss = ATEN.nll_loss_backward if given[1].dim() == 2 else ATEN.nll_loss2d_backward
    return ATEN._log_softmax_backward_data(loss(*given), given[1], 1, given[1].dtype)


def bits(one: Tensor) -> Tensor:
    return one.contiguous().view(torch.uint8)


def check(*given: Any) -> None:
    expected, before = by_torch(*given), given[1].clone()
    for name, writes in (("cross_entropy_backward", False), ("cross_entropy_backward_", True)):
        log_probs = before.clone()
        got = getattr(MEMPLAN, name)(given[0], log_probs, *given[2:])
        assert (got.data_ptr() == log_probs.data_ptr()) == writes
        assert writes or torch.equal(bits(log_probs), bits(before))
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert torch.equal(bits(got), bits(expected))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SHAPES = [(1, 5), (2, 1), (40, 7), (129, 33), (17, 4099), (3, LARGEST_PIECE + 3), (5, 3, 1, 7), (9, 4, 11, 13)]


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_op_gives_the_bits_of_two(shape: tuple[int, ...], dtype: torch.dtype, reduction: int) -> None:
    for weighted in (False, True):
        for special in (False, True):
            check(*arguments(shape, reduction, weighted=weighted, dtype=dtype, special=special, ignored=0.2))


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_ignored_labels_have_no_gradient(reduction: int) -> None:
    for shape in ((33, 19), (5, 4, 6, 3)):
        for ignore in (-100, 0, shape[1] - 1):
            check(*arguments(shape, reduction, ignored=0.5, ignore=ignore))
        every = arguments(shape, reduction, ignored=1.1)
        assert not MEMPLAN.cross_entropy_backward(*every).any()
        check(*every)
        check(*arguments(shape, reduction, ignored=1.1, special=True))


@pytest.mark.parametrize("count", [2, *slow(1, 5)])
@pytest.mark.parametrize("shape", [(64, 5, 31, 37), *slow(((1030, 2051),), ((6, 21, 127, 129),))], ids=str)
def test_threads_do_not_change_it(shape: tuple[int, ...], count: int) -> None:
    with threads(count):
        for dtype in (torch.float32, torch.bfloat16):
            check(*arguments(shape, MEAN, weighted=True, dtype=dtype, ignored=0.1, special=True))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 300), st.lists(st.integers(1, 6), min_size=2, max_size=2) | st.just([]),
    st.sampled_from([NONE, MEAN, SUM]), st.booleans(), st.booleans(), st.floats(0, 1), st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    samples: int, classes: int, inner: list[int], reduction: int, weighted: bool, special: bool, ignored: float,
    seed: int,
) -> None:  # fmt: skip
    shape = (samples, classes, *inner)
    check(*arguments(shape, reduction, weighted=weighted, special=special, ignored=ignored, seed=seed))


def test_inputs_laid_out_otherwise() -> None:
    """Only the log-probabilities have to be contiguous."""
    grad, log_probs, target, _, *rest = arguments((400, 50), NONE)
    wide = torch.stack([target, target], 1)
    check(grad[:1].expand(400), log_probs, wide[:, 0], torch.rand(50), *rest)


# -- memory


def test_it_holds_what_is_said() -> None:
    for shape in ((1024, 2048), (64, 40000), (8, 10, 64, 64)):
        given = arguments(shape, MEAN)
        values = [
            Value(
                at,
                f"v{at}",
                "result",
                at,
                one.nbytes,
                tuple(one.shape),
                one.stride(),
                str(one.dtype).removeprefix("torch."),
                0,
            )
            for at, one in enumerate((given[0], given[1], given[2], given[6], given[1]))
        ]
        args = (Ref(0), Ref(1), Ref(2), None, MEAN, -100, Ref(3))
        assert forms.overwrites(TARGET, args, {}, values, 4) == (1,)
        op = GraphOp(0, TARGET, args, {}, "backward", (4,), False, (0, 1, 2, 3), (4,))
        assert forms.overwritten_operand(op, 1, values).name == "log_probs"
        in_place = op_schema.overload(forms.call_into(TARGET, "log_probs").target)
        size, said = given[1].nbytes, forms.in_place_workspace(op, values)
        whole = peak_of(allocations(lambda: MEMPLAN.cross_entropy_backward(*given)))  # noqa: B023
        held = peak_of(allocations(lambda: in_place(*given)))  # noqa: B023
        assert size <= whole <= size + 64
        assert held <= said <= held + op_schema.NUMBER_TENSOR_BYTES
        assert said <= min(size // 2, max(1 << 20, 2 * size // shape[0]))


def test_the_arguments_that_planning_knows_are_the_ops() -> None:
    for target, names in op_schema.OWN.items():
        if target == "memplan.is_not_zero.default":  # of exports alone: it is C, and torch has none
            continue
        assert names == tuple(argument.name for argument in _torch.arguments(op_schema.overload(target)))


def test_results_are_known_without_data() -> None:
    for shape in ((6, 4), (6, 4, 3, 5)):
        given = arguments(shape, NONE, weighted=True)
        for op in (MEMPLAN.cross_entropy_backward, MEMPLAN.cross_entropy_backward_):
            with FakeTensorMode() as mode:
                fake = op(*(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given))
            assert (fake.shape, fake.stride(), fake.dtype) == (given[1].shape, given[1].stride(), given[1].dtype)


# -- whole steps


class Language(nn.Module):
    """A language model with many words against its width."""

    def __init__(self, words: int = 3000, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.Sequential(
            *[nn.TransformerEncoderLayer(width, 2, 64, 0.0, F.gelu, batch_first=True) for _ in range(2)]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def flat(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def ignoring(output: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, output.shape[-1])
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), weight, ignore_index=7, reduction="sum")


def each(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none").square().mean()


def by_hand(output: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(output, -1).flatten(0, 1), labels.flatten())


def transposed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2).contiguous(), labels)


def gradients(step: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    step.zero_grad()
    run().backward()
    return [one.grad for one in step.parameters() if one.grad is not None]


@pytest.mark.parametrize(
    ("loss", "less"), [(ignoring, 0.4), *slow((transposed, 0.0), (by_hand, 0.4), (flat, 0.4), (each, 0.4))]
)
def test_a_step_is_the_same_bits_in_less_memory(loss: Any, less: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """``less``: of the logits. Where they are transposed first, there are two of them in the forward pass anyway."""
    torch.manual_seed(0)
    step = with_loss(Language(), loss)
    inputs = (torch.randint(0, 3000, (8, 32)), torch.randint(0, 3000, (8, 32)))
    call = call_of(inputs, {})
    eager = copy.deepcopy(step)
    expected = gradients(eager, lambda: eager(*inputs))

    def planned() -> tuple[int, int, JointGraph]:
        captured = capturing.capture(step, call)
        made = schedule(captured.graph, Choices())
        engine = Engine(captured, made)
        for _ in range(2):  # the second run finds the kernels' caches filled
            got = gradients(step, lambda: engine.run(step, call))
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, expected, strict=True))
            got.clear()
        step.zero_grad()
        measured = peak_of(allocations(lambda: engine.run(step, call).backward()))
        resident = sum(v.bytes for v in captured.graph.values if v.kind in ("parameter", "buffer", "input", "constant"))
        return measured, levels(made).peak - resident, captured.graph

    measured, predicted, graph = planned()
    assert TARGET in [op.target for op in graph.ops]
    assert measured == pytest.approx(predicted, rel=0.01)
    monkeypatch.setattr(pipeline, "fused", lambda graph: graph)
    before, _, graph = planned()
    assert TARGET not in [op.target for op in graph.ops]
    assert measured <= before - less * 8 * 32 * 3000 * 4
