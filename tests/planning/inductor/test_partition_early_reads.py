"""What is computed before a kernel, since what it reads is larger and would wait: held against what a run takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.fx_passes import control_dependencies
from torch.nn import functional as F

import memplan
from memplan import _torch
from memplan._torch import inductor
from memplan._torch.early_reads import to_compute_first

needs_compiler = pytest.mark.skipif(
    _torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here"
)
needs_order = pytest.mark.skipif(
    not hasattr(control_dependencies, "control_deps_autograd"), reason="Inductor of torch 2.11 cannot make ops wait"
)
SIZE = 4 * 2 * 16 * 128 * 128
"""Bytes of an activation of 16 channels."""


class Skipping(nn.Module):
    """A gradient of twice the channels, the second half of which is not needed until three convolutions later, and then
    only through a pointwise op."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 4, 1)
        self.deep = nn.Sequential(*(nn.Conv2d(*io, 3, padding=1) for io in ((16, 64), (64, 16), (16, 16))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat([self.deep(x), x.sigmoid()], 1)).square().mean()


def fitted() -> Any:
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(2, 3, 128, 128)
    # by estimates, since what is measured on a busy machine leads to other choices
    plan = memplan.plan(model, x, budget="33 MB", engine="inductor", costs="roofline")
    return memplan.fit(model, x, budget="33 MB", engine="inductor", plan=plan, pairs=0)


@pytest.mark.slow
@needs_compiler
@needs_order
def test_a_run_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    early = fitted()
    monkeypatch.setattr(inductor, "to_compute_first", lambda *_: {})
    late = fitted()
    for one in (early, late):
        assert one.proof.ok
        assert abs(one.proof.peak - one.plan.peak) <= 1024
    # the gradient of what is concatenated, of twice the size, is not there at the peak, nor is what the sigmoid saves;
    # the sigmoid's own gradient is
    assert late.proof.peak - early.proof.peak > 1.5 * SIZE


def found(function: Callable[..., Any], *sizes: tuple[int, ...], stays: tuple[int, ...] = ()) -> list[str]:
    """What is to be computed first, by the kernel that waits."""
    mode = inductor.fake_mode()
    given = [
        inductor.fake_tensor(size, torch.empty(size, device="meta").stride(), torch.float32, mode) for size in sizes
    ]
    graph = inductor.traced(function, given, mode, {}).graph.graph
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    first = to_compute_first(graph, [node for at, node in enumerate(arguments) if at not in stays])
    return [f"{node.name} before {kernel.name}" for kernel, nodes in first.items() for node in nodes]


WIDE, NARROW, SQUARE = (1024, 1024), (1024, 512), (512, 512)


def late(wide: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    part = wide[:, 512:].tanh()
    return (F.relu(x @ weight) + part,)


def test_a_part_of_what_is_larger() -> None:
    assert found(late, WIDE, NARROW, SQUARE) == ["tanh before mm"]


def test_what_stays_anyway() -> None:
    assert found(late, WIDE, NARROW, SQUARE, stays=(0,)) == []


def test_what_is_small() -> None:
    assert found(late, (512, 1024), (512, 512), SQUARE) == ["tanh before mm"]  # just 1 MiB
    assert found(late, (511, 1024), (511, 512), SQUARE) == []


def test_what_is_not_larger() -> None:
    def of_one(y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        part = y.tanh()
        return (x @ weight + part,)

    def of_two(y: Tensor, z: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        part = (y * z).tanh()
        return (x @ weight + part,)

    assert found(of_one, NARROW, NARROW, SQUARE) == []
    assert found(of_two, NARROW, NARROW, NARROW, SQUARE) == ["tanh before mm"]


def test_what_is_read_or_returned_later() -> None:
    def read(wide: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (*late(wide, x, weight), wide.sum())

    def returned(wide: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = wide.sum(0).expand(2048, 1024) @ wide
        return (*late(wide[:1024], x, weight), wide)

    assert found(read, WIDE, NARROW, SQUARE) == []
    assert found(returned, WIDE, NARROW, SQUARE) == []


def test_the_kernel_after_the_last_other_read() -> None:
    def read_by_the_first(wide: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        part = wide[:, 512:].tanh()
        return ((wide[:, :512] @ weight) @ weight + part,)

    assert found(read_by_the_first, WIDE, NARROW, SQUARE) == ["tanh before mm_1"]


def test_a_kernel_that_its_reader_does_not_need() -> None:
    def beside(wide: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        part = wide[:, 512:].tanh()
        return (x @ weight, part + 1)

    assert found(beside, WIDE, NARROW, SQUARE) == []


def test_what_is_read_at_once() -> None:
    def at_once(wide: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (wide[:, 512:].tanh() @ weight,)

    assert found(at_once, WIDE, NARROW, SQUARE) == []
