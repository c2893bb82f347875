"""Optimizers of 8 bits whose states are in 32 nevertheless, against a measured step with all of them in 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

ID = "idle-8bit"
Build = Callable[[], Callable[[], Any]]
SMALL, LARGE = 60, 128  # 3,600 elements and 16,384


class Momentum8bit(torch.optim.Optimizer):
    """A momentum in 8 bits with a scale for each block of 256 elements, for weights of a size or more, but for the
    first ones, whose states are overridden to have 32."""

    def __init__(self, params: Iterable[Any], smallest: int = 4096, overridden: int = 0) -> None:
        super().__init__(params, {})
        self.smallest, self.overridden = smallest, overridden

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, weight in enumerate(weight for group in self.param_groups for weight in group["params"]):
            state = self.state[weight]
            if not state:
                if weight.numel() < self.smallest or number < self.overridden:
                    state["momentum"] = torch.zeros_like(weight)
                else:
                    state["codes"] = torch.zeros_like(weight, dtype=torch.int8)
                    state["scales"] = torch.ones(-(weight.numel() // -256))
            if "codes" in state:
                state["codes"].add_(1)
            else:
                state["momentum"].add_(weight.grad)
            weight.sub_(weight.grad, alpha=0.1)


def training(optimizer: Callable[[Any], Any], *, width: int = SMALL, layers: int = 40, rows: int = 1) -> Build:
    def build() -> Callable[[], Any]:
        model, x = (
            nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]),
            torch.randn(rows, width),
        )
        updater = optimizer(model.parameters())

        def step() -> None:
            updater.zero_grad()
            model(x).square().mean().backward()
            updater.step()

        return step

    return build


def found(build: Build, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def test_weights_below_the_smallest_size() -> None:
    (finding,) = found(training(Momentum8bit))
    spared = measured_peak(training(Momentum8bit)) - measured_peak(training(partial(Momentum8bit, smallest=1)))
    assert finding.severity == "warning"
    assert finding.bytes == pytest.approx(spared, rel=0.001)
    assert finding.details == {"narrow": 0, "wide": 40 * SMALL**2 * 4, "tensors": 40, "small": 40}


def test_most_states_in_32_bits_beside_some_in_8() -> None:
    def mixed(overridden: int) -> Build:
        return training(partial(Momentum8bit, overridden=overridden), width=LARGE, layers=8)

    (finding,) = found(mixed(7))
    assert finding.bytes == pytest.approx(measured_peak(mixed(7)) - measured_peak(mixed(0)), rel=0.001)
    assert (finding.details["narrow"], finding.details["small"]) == (LARGE**2, 0)
    assert found(mixed(0)) == []


def test_states_that_are_a_small_part_are_a_note() -> None:
    """In 32 bits they would take 48 KiB a layer more, beside activations of 16 MiB each."""
    (finding,) = found(training(Momentum8bit, width=LARGE, layers=4, rows=1 << 15))
    assert (finding.severity, finding.bytes) == ("info", 0)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_optimizers_of_32_bits(optimizer: Any, width: int) -> None:
    assert found(training(optimizer, width=width, layers=4)) == []


def test_states_in_8_bits_that_matter() -> None:
    assert found(training(Momentum8bit, width=LARGE, layers=8)) == []


def test_as_bitsandbytes_keeps_small_tensors() -> None:
    optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    assert found(training(optimizer, width=LARGE)) == []
    (finding,) = found(training(optimizer))
    spared = measured_peak(training(optimizer)) - measured_peak(training(partial(optimizer, min_8bit_size=1)))
    assert finding.bytes == pytest.approx(spared, rel=0.05)  # but for its update, which unpacks states on the CPU


def test_as_torchao_keeps_small_tensors() -> None:
    optimizer = pytest.importorskip("torchao.optim").AdamW8bit
    with torch.compiler.set_stance("force_eager"):
        assert found(training(optimizer, width=4 * LARGE, layers=4), "h100") == []
        (finding,) = found(training(optimizer, layers=10))
    assert (finding.details["narrow"], finding.details["small"]) == (0, 2 * 10)
    assert finding.bytes > 2 * 10 * SMALL**2 * 2
