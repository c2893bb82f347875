"""Kernels of Triton in a step that is recorded for a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memplan

triton: Any = pytest.importorskip("triton")


def test_a_kernel_allocates_what_its_caller_allocates() -> None:
    def add(left: Any, right: Any, result: Any, block: Any) -> None:
        raise AssertionError("not compiled")

    kernel = triton.jit(add)

    def build() -> Callable[[], None]:
        x = torch.zeros(1 << 20, device="cuda")

        def step() -> None:
            result = torch.empty_like(x)
            kernel[(1024,)](x, x, result, block=1024)
            assert result.is_cuda

        return step

    trace = memplan.record(build, device="rtx4090")
    assert memplan.simulate(trace).peak_allocated == 2 * 4 * 2**20
    assert triton.runtime.jit.JITFunction.run.__module__ == "triton.runtime.jit"


def test_what_a_kernel_reads_in_the_backward_pass_is_saved() -> None:
    def scale(x: Any, factors: Any, result: Any) -> None:
        raise AssertionError("not compiled")

    kernel = triton.jit(scale)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(factors)
            result = torch.empty_like(x)
            kernel[(1,)](x, factors, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (factors,) = ctx.saved_tensors
            result = torch.empty_like(gradients[0])
            kernel[(1,)](gradients[0], factors, result)
            return result, None

    def build() -> Callable[[], None]:
        x = torch.zeros(1 << 20, device="cuda", requires_grad=True)

        def step() -> None:
            Scaled.apply(x, torch.rand_like(x)).sum().backward()

        return step

    trace = memplan.record(build, device="rtx4090", steps=1)
    factors = next(storage for storage in trace.storages if trace.ops[storage.op or 0].name == "aten.rand_like.default")
    assert factors.cause == "saved"
    launches = [op for op in trace.ops if op.name == "triton.scale"]
    assert [op.phase for op in launches] == ["forward", "backward"]
    assert all(factors.id in {read.storage for read in op.reads} for op in launches)


def test_an_op_of_memplan_s_kernels_saves_both_operands() -> None:
    def build() -> Callable[[], None]:
        gate, up = (torch.zeros(64, 256, device="cuda", requires_grad=True) for _ in range(2))
        return lambda: memplan.kernels.swiglu(gate * 2, up * 2).sum().backward()

    trace = memplan.record(build, device="rtx4090", steps=1)
    products = [storage for storage in trace.storages if trace.ops[storage.op or 0].name == "aten.mul.Tensor"]
    assert [storage.cause for storage in products if trace.ops[storage.op or 0].phase == "forward"] == ["saved"] * 2
