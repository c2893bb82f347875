"""Steps whose sizes are values: what is predicted is never less than is measured, and says what it rests on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.steps_by_value import STEPS
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.records import loud


def holds(name: str, times: int) -> None:
    """Whatever is drawn, the prediction is at least the measured peak."""
    trace = memplan.record(STEPS[name])
    predicted = memplan.simulate(trace).peak_allocated
    assert loud(trace.assumptions)
    for seed in range(times):
        torch.manual_seed(seed)
        measured = measured_peak(STEPS[name])
        assert measured <= predicted, (seed, predicted)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_rests_on_values_is_bounded(name: str) -> None:
    holds(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_fifty_draws_of_each_step(name: str) -> None:
    holds(name, 50)


def test_memory_that_nobody_wrote_is_no_value() -> None:
    """Rows of known values at positions that are drawn: what lies in the result's memory are not its values."""

    def build() -> Callable[[], None]:
        table = nn.Parameter(torch.randn(2, 16, 8))

        def step() -> None:
            rows = torch.ones(2, 16).nonzero()
            drawn = rows[torch.multinomial(torch.ones(len(rows)), 8)]
            table[drawn[:, 0], drawn[:, 1]].sum().backward()

        return step

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


KNOWN = {
    "ones": lambda: torch.ones(16),
    "zeros": lambda: torch.zeros(16),
    "full": lambda: torch.full((16,), 2.0),
    "arange": lambda: torch.arange(16.0),
}


@pytest.mark.parametrize("start", KNOWN)
@pytest.mark.parametrize(
    "convert", [lambda layer: layer.to(torch.bfloat16), lambda layer: layer.bfloat16(), lambda layer: layer.half()]
)
def test_known_values_are_converted_with_their_parameter(start: str, convert: Callable[[nn.Module], nn.Module]) -> None:
    """A norm's weight that is all ones, converted and trained: the updates read it."""

    def build() -> Callable[[], None]:
        layer = nn.LayerNorm(16)
        layer.weight = nn.Parameter(KNOWN[start]())
        convert(layer)
        optimizer = torch.optim.AdamW(layer.parameters())
        x = torch.randn(2, 16, dtype=layer.weight.dtype)

        def step() -> None:
            layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    peaks = [memplan.simulate(trace).peak_allocated for trace in (memplan.record(build), memplan.measure(build))]
    assert peaks[0] == peaks[1]


def test_new_data_has_values_of_its_own() -> None:
    seen = list[list[int]]()

    def build() -> Callable[[], None]:
        sizes = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

        def step() -> None:
            sizes.data = torch.tensor([3, 4, 5])
            seen.append([int(one) for one in sizes.tolist()])
            torch.empty(*sizes.tolist())

        return step

    trace = memplan.record(build, steps=1)
    assert seen[-1] == [3, 4, 5]
    assert any(storage.bytes == 4 * 3 * 4 * 5 for storage in trace.storages)


def test_shared_tensors_are_allocated_anew_once() -> None:
    def build() -> Callable[[], None]:
        layer = nn.Linear(256, 256)
        layer.share_memory()
        layer.share_memory()
        batch = torch.randn(1024, 256)[:512].share_memory_()
        assert layer.weight.is_shared()
        assert batch.is_shared()
        assert not torch.randn(3).is_shared()
        return lambda: None

    peaks = [
        memplan.simulate(trace).peak_allocated
        for trace in (memplan.record(build, device="cpu"), memplan.measure(build))
    ]
    assert peaks[0] == peaks[1] == 4 * (256 * 256 + 256 + 2 * 1024 * 256)


def test_a_card_s_tensors_are_shared_as_they_are() -> None:
    def build() -> Callable[[], None]:
        layer = nn.Linear(256, 256).cuda()
        layer.share_memory()
        assert layer.weight.is_shared()
        return lambda: None

    assert memplan.simulate(memplan.record(build, device="h100")).peak_allocated == 4 * (256 * 256 + 256)
