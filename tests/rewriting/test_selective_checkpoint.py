"""Selective checkpoints: what they save, what they recompute, and that a step stays the same."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.planning.graph.roofline import CPU
from memplan.rewriting.calls import Calls
from memplan.rewriting.selective_checkpoint import (
    CheckpointedCall,
    CheckpointOp,
    checkpoint_selectively,
    logged_calls,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.5, self.training)


def logged(block: nn.Module, x: Tensor) -> CheckpointedCall:
    with logged_calls(block, CPU) as calls:
        block(x)
    (call,) = calls
    return call


def test_saved_bytes_are_those_that_autograd_saves() -> None:
    block, x = Block(), torch.ones(32, 16, requires_grad=True)
    call = logged(block.eval(), x)
    assert call.saved == 4 * (32 * 16 + 32 * 64 + 32 * 64)  # what the products and GELU read
    assert call.inputs == 4 * 32 * 16
    assert "forward" not in vars(block)


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("held", [0, 20_000, 1 << 20])
def test_a_checkpointed_step_is_the_same_and_runs_again_what_is_not_saved(held: int) -> None:
    block, x = Block(), torch.randn(32, 16, requires_grad=True)

    def gradients() -> tuple[list[Tensor], Counter[str]]:
        torch.manual_seed(1)
        x.grad = None
        block.zero_grad()
        with _Counts() as counts:
            block(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad.clone(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)], counts.ops

    plan = logged(block, x).plan(held)
    plain, once = gradients()
    calls = Calls()
    undo = checkpoint_selectively(block, plan, calls)
    checkpointed, ops = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    saved = {(op.name, op.occurrence) for op in plan.ops if op.is_saved}
    assert not any(op.is_saved for op in plan.ops if op.name.startswith("aten.bernoulli_"))
    for name in ("aten.addmm.default", "aten.gelu.default"):
        # the last product is not needed: nothing after it is
        again = sum(op.name == name and (name, op.occurrence) not in saved for op in plan.ops)
        assert once[name] <= ops[name] <= once[name] + again
    if held == 0:
        assert ops["aten.gelu.default"] == 2
    if held == 1 << 20:
        assert ops["aten.gelu.default"] == 1
    with torch.no_grad():
        block(x)
    assert (calls.stats().planned, calls.stats().without_grad) == (1, 1)
    undo()
    assert "forward" not in vars(block)


def test_the_choice_fits_and_is_not_far_from_the_best() -> None:
    """Beside all choices of six results."""
    ops = tuple(CheckpointOp("op", index, size, seconds, None) for index, (size, seconds) in enumerate(
        [(10, 6.0), (20, 10.0), (30, 12.0), (25, 13.0), (5, 1.0), (15, 9.0)]
    ))  # fmt: skip
    call = CheckpointedCall(ops, saved=105, inputs=0)
    for held in range(0, 110, 5):
        plan = call.plan(held)
        assert plan.saved_bytes <= held
        subsets = (s for n in range(7) for s in itertools.combinations(ops, n) if sum(op.bytes for op in s) <= held)
        most = max(sum(op.seconds for op in subset) for subset in subsets)
        least = sum(op.seconds for op in ops) - most
        assert plan.seconds <= least + most / 2


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        dropped, _ = torch.native_dropout(F.gelu(self.up(x)), 0.5, True)
        return torch.native_dropout(self.down(dropped), 0.5, True)[0]


def test_random_results_are_saved_where_none_is_drawn_in_place() -> None:
    block, x = Dropping(), torch.randn(32, 16)
    plan = logged(block, x).plan(0)
    assert [op.name for op in plan.ops if op.is_saved] == ["aten.native_dropout.default"] * 2

    def gradient() -> Tensor | None:
        torch.manual_seed(2)
        block.zero_grad()
        block(x).square().sum().backward()
        return block.up.weight.grad

    plain = gradient()
    checkpoint_selectively(block, plan, Calls())
    checkpointed = gradient()
    assert plain is not None
    assert checkpointed is not None
    assert torch.equal(plain, checkpointed)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x).relu()


def test_a_call_that_changes_a_buffer_is_told() -> None:
    assert "aten.add_" in logged(Counting(), torch.ones(2, 4)).obstacle


class AddingLate(nn.Module):
    """Adds a random result in place to one that is allocated before, and saved after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.add_(torch.native_dropout(x, 0.5, True)[0]).square()


def test_what_is_added_to_a_saved_result_is_needed() -> None:
    block, x = AddingLate(), torch.randn(4, 8)
    call = logged(block, x)
    (dropout,) = [op for op in call.ops if op.name == "aten.native_dropout.default"]
    assert dropout.is_saved


def test_results_that_are_changed_in_place_are_recomputed() -> None:
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    call = logged(block, torch.ones(2, 4))
    assert not call.obstacle
    first = next(op for op in call.ops if op.name == "aten.addmm.default")
    assert first.is_saved is False
