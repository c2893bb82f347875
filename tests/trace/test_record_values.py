"""Steps whose sizes are values: what is predicted is never less than is measured, and says what it rests on."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from environment import slow, thinned
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


@pytest.mark.parametrize("name", thinned(STEPS, 3))
def test_a_step_that_rests_on_values_is_bounded(name: str) -> None:
    holds(name, 1)


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


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9, weight_decay=0.1, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=True),
    "adamw": torch.optim.AdamW,
    "adamw_fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw_tensor_lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "adamax": lambda params: torch.optim.Adamax(params, foreach=True),
    "adadelta": lambda params: torch.optim.Adadelta(params, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, foreach=True),
    "nadam": lambda params: torch.optim.NAdam(params, foreach=True),
    "radam": lambda params: torch.optim.RAdam(params, foreach=True),
    "rprop": lambda params: torch.optim.Rprop(params, foreach=True),
    "asgd": lambda params: torch.optim.ASGD(params, foreach=True),
}


def _trained(start: str, optimizer: str, convert: Callable[[nn.Module], nn.Module]) -> Callable[[], Callable[[], None]]:
    """A step of a norm whose weight has known values and is converted."""

    def build() -> Callable[[], None]:
        layer = nn.LayerNorm(16)
        layer.weight = nn.Parameter(KNOWN[start]())
        convert(layer)
        updater = OPTIMIZERS[optimizer](layer.parameters())
        x = torch.randn(2, 16, dtype=layer.weight.dtype)

        def step() -> None:
            layer(x).sum().backward()
            updater.step()
            updater.zero_grad()

        return step

    return build


@pytest.mark.parametrize("start", KNOWN)
@pytest.mark.parametrize(
    "convert",
    [lambda layer: layer.to(torch.bfloat16), *slow(lambda layer: layer.bfloat16(), lambda layer: layer.half())],
)
def test_known_values_are_converted_with_their_parameter(start: str, convert: Callable[[nn.Module], nn.Module]) -> None:
    """A norm's weight that is all ones, converted and trained: the updates read it."""
    build = _trained(start, "adamw", convert)
    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float64)])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_updates_converted_known_values(optimizer: str, dtype: torch.dtype) -> None:
    build = _trained("ones", optimizer, lambda layer: layer.to(dtype))
    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


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


@pytest.mark.parametrize("length", [100, 200_000])
@pytest.mark.parametrize("begins", [0, 5])
def test_positions_in_order_are_known_to_be_at_any_length(length: int, begins: int) -> None:
    """As transformers looks for several sequences in a row of positions (masking_utils.py)."""
    taken: list[bool] = []

    def build() -> Callable[[], None]:
        positions = (torch.arange(length) + begins).unsqueeze(0)

        def step() -> None:
            steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
            others = (steps != 1).cumsum(-1)
            taken.append(bool((others[:, -1] == 0).all()))

        return step

    assert memplan.record(build).assumptions == ()
    real = build()
    real()
    assert set(taken) == {True}


def test_a_mask_of_all_pairs_of_positions_is_not_computed() -> None:
    def build() -> Callable[[], None]:
        positions = torch.arange(200_000)
        return lambda: [positions[:, None] >= positions[None], positions[:, None] - positions[None]].clear()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = memplan.record(build)
    assert max(storage.bytes for storage in trace.storages) == 8 * 200_000**2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)  # KiB


def test_positions_that_are_changed_through_a_view_are_not_known_any_more() -> None:
    def build() -> Callable[[], None]:
        positions = torch.arange(20_000)
        positions.reshape(2, 10_000).t()[0].random_(0, 2)

        def step() -> None:
            if positions[0] == 0:
                torch.zeros(8)

        return step

    assert any("decides a branch" in assumption.text for assumption in memplan.record(build).assumptions)
