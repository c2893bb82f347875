"""Ops that break fusion, named: a library's, and those of torch that Inductor has no code for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan import _torch
from memplan.planning.inductor.fusion_report import COPY, unfused
from memplan.planning.plan.fusion import Fusion, Group

pytestmark = pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")


@torch.library.custom_op("memplan_tests::swirl", mutates_args=())
def swirl(x: Tensor) -> Tensor:
    return torch.sin(x) * x


@torch.library.custom_op("memplan_tests::swirl_backward", mutates_args=())
def swirl_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient * (torch.cos(x) * x + torch.sin(x))


swirl.register_fake(torch.empty_like)
swirl_backward.register_fake(lambda gradient, x: torch.empty_like(gradient))
swirl.register_autograd(
    lambda ctx, gradient: torch.ops.memplan_tests.swirl_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Layer(nn.Module):
    """A product, a norm and a function of each element."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.function = nn.Linear(32, 32), nn.LayerNorm(32), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.gelu(self.norm(self.linear(x))))


def planned(model: nn.Module, *inputs: Any, **options: Any) -> memplan.Plan:
    return memplan.plan(model, *inputs, budget="1GB", costs="roofline", engine="inductor", **options)


def told(plan: memplan.Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("runs as its own kernel, not fused: ")]


def of_a_library() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(lambda x: swirl(x)) for _ in range(2))), torch.randn(64, 32)


def test_an_op_of_a_library_is_named() -> None:
    plan = planned(*of_a_library(), loss=torch.sum)
    assert told(plan) == [
        "runs as its own kernel, not fused: memplan_tests::swirl_backward, 2 calls, in layers 1, 0",
        "runs as its own kernel, not fused: memplan_tests::swirl, 2 calls, in layers 0, 1",
    ]
    printed = " ".join(str(plan).split())
    for note in told(plan):
        assert note in printed
        assert note in json.loads(plan.to_json())["notes"]


@pytest.mark.slow
def test_a_step_with_an_op_of_a_library_is_right() -> None:
    model, x = of_a_library()
    fitted = memplan.fit(model, x, loss=torch.sum, budget="1GB", engine="inductor", pairs=0)
    assert fitted.proof.same
    assert fitted.proof.within_budget


def group(kernel: str, size: int = 1, **more: Any) -> Group:
    given: dict[str, Any] = {"fused": False, "ops": (kernel,), "layers": ("a",), **more}
    return Group(kernel, given["fused"], "forward", given["ops"], given["layers"], None, size, 0, 0.0, "bandwidth")


def notes_of(*groups: Group) -> list[str]:
    whole = unfused(Fusion("cpu", 0, len(groups), 0, 0, groups))
    return [note.removeprefix("runs as its own kernel, not fused: ") for note in whole]


@pytest.mark.parametrize(
    "kernel",
    [
        "aten.mm.out", "aten.addmm.out", "aten.convolution.default", "aten.convolution_backward.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.native_dropout.default",
        "aten.bernoulli_.float", "aten.view_as_real.default", "memplan.pack_bits.default", COPY, "CppTemplateBuffer",
    ],
)  # fmt: skip
def test_what_is_not_told(kernel: str) -> None:
    assert notes_of(group(kernel)) == []


def test_libraries_come_first_then_what_moves_most() -> None:
    swirls = "memplan_tests.swirl.default"
    found = notes_of(
        group("aten.cumsum.default", 5), group("aten.sort.stable", 3, layers=("b",)), group("aten.sort.stable", 4),
        group(swirls, layers=()), group("cpp_fused_gelu_0", 9, fused=True),
    )  # fmt: skip
    assert found == [
        "memplan_tests::swirl, 1 call", "aten::sort, 2 calls, in layers b, a", "aten::cumsum, 1 call, in layer a"
    ]  # fmt: skip


def test_what_an_op_was_put_in_place_of_is_named_beside_it() -> None:
    """As for the derivative of a pool, where several threads add into one place."""
    of = ("aten.max_pool2d_with_indices_backward.default",)
    assert notes_of(group("aten.scatter_reduce_.two", ops=of)) == [
        "aten::scatter_reduce_ (of aten::max_pool2d_with_indices_backward), 1 call, in layer a"
    ]
