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
