"""Float32 master weights beside bfloat16 weights, and the bytes that a training with packed ones takes less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch
from models.master_weights import Held
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.checks import unpacked_masters
from memplan.checks.finding import Subject

Build = Callable[[], Callable[[], Any]]
Kind = Literal[
    "held", "foreach", "cast", "state", "packed", "averaged", "float16", "decayed", "summed", "summed foreach"
]
FOREACH: Any = torch
WIDTH, LAYERS = 128, 6
ELEMENTS = LAYERS * WIDTH * (WIDTH + 1)


class MastersInState(torch.optim.Optimizer):
    """Plain descent on master weights that are a state of the optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight in self.param_groups[0]["params"]:
            master = self.state[weight].setdefault("master", weight.detach().float())
            master.sub_(weight.grad.float(), alpha=0.1)
            weight.copy_(master)


def training(kind: Kind) -> Build:
    def build() -> Callable[[], Any]:
        torch.manual_seed(0)
        dtype = torch.float16 if kind == "float16" else torch.bfloat16
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(dtype)
        x, weights = torch.randn(4, WIDTH, dtype=dtype), list[torch.Tensor](model.parameters())
        if kind in ("packed", "state"):
            packed = memplan.PackedMasters(weights, torch.optim.SGD, lr=0.1)
            optimizer: Any = packed if kind == "packed" else MastersInState(weights)
            masters = list[torch.Tensor]()
        else:
            decay = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True} if kind == "decayed" else {}
            held = Held(model, torch.optim.SGD, lr=0.1, **decay)
            optimizer, masters = held, list[torch.Tensor](held.masters)
            if kind not in ("held", "decayed"):
                optimizer = torch.optim.SGD(weights if kind == "averaged" else masters, lr=0.1)

        @torch.no_grad()
        def step() -> None:
            with torch.enable_grad():
                model.zero_grad()
                model(x).float().square().mean().backward()
            if kind in ("held", "decayed", "packed", "state"):
                optimizer.step()
                return
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
            if kind == "summed":  # with the gradients of another backward pass
                for weight, master in zip(weights, masters, strict=True):
                    cast(torch.Tensor, master.grad).add_(cast(torch.Tensor, weight.grad))
            if kind == "summed foreach":
                FOREACH._foreach_add_([master.grad for master in masters], [weight.grad for weight in weights])
            optimizer.step()
            if kind == "averaged":  # slow weights, as of Lookahead: the fast ones are updated, too
                FOREACH._foreach_lerp_(masters, [weight.float() for weight in weights], 0.5)
            if kind == "cast":
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master.to(weight.dtype))
            else:
                FOREACH._foreach_copy_(weights, masters)

        return step

    return build


@pytest.mark.parametrize("kind", ["held", "decayed", "foreach", "cast", "state"])
def test_master_weights_are_found(kind: Kind) -> None:
    (finding,) = find_in(kind)
    assert (finding.severity, finding.bytes) == ("info", 2 * ELEMENTS)
    assert finding.details == {"weights": 2 * LAYERS, "stored": 4 * ELEMENTS}


def test_the_packed_training_takes_at_least_as_much_less() -> None:
    (finding,) = find_in("held")
    assert measured_peak(training("held")) - measured_peak(training("packed")) >= finding.bytes


@pytest.mark.parametrize("kind", ["packed", "averaged", "float16", "summed", "summed foreach"])
def test_nothing_is_found_where_nothing_can_be_packed(kind: Kind) -> None:
    """Or not to the same bits: what adds float32 gradients, would add bfloat16 ones."""
    assert find_in(kind) == []


def test_ops_without_operands_or_with_other_names_are_passed_by() -> None:
    trace = memplan.record(training("held"))
    last = trace.ops[-1]
    cast_op = next(op for op in trace.ops if op.name == "aten._to_copy.default")
    others = (
        replace(last, name="custom", reads=(), writes=()), replace(last, name="copy_", reads=(), writes=()),
        replace(cast_op, step=0, reads=()), replace(cast_op, step=0, writes=()),
    )  # fmt: skip
    (finding,) = unpacked_masters.find(Subject(trace=replace(trace, ops=(*trace.ops, *others))))
    assert finding.bytes == 2 * ELEMENTS


def find_in(kind: Kind) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(training(kind)) if finding.id == "unpacked-masters"]
