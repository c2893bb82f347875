"""Steps recorded each by itself, one after the other, allocate what a run does that really goes through the lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from environment import slow, thinned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.decoders import Decoder
from torch import nn
from truth.cpu_allocator import allocations, peak_of

import memplan
from memplan.errors import InputError
from memplan.simulation.simulate import simulate
from memplan.studies.lengths.chained import chained
from memplan.trace.trace import Trace

ORDER = (24, 40, 8, 8, 40, 24)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


def build_of(lengths: tuple[int, ...], optimizer: str, device: str, *, zero: str) -> Callable[[], Callable[[], None]]:
    """A build whose step goes to the next length, and takes its tokens and labels to the device when it begins."""

    def build() -> Callable[[], None]:
        model = Decoder().to(device)
        update = OPTIMIZERS[optimizer](model.parameters())
        loss_of = nn.CrossEntropyLoss()
        loader = cycle(lengths)
        length = next(loader)
        tokens, labels = batch_of(length)
        is_first = True

        def step() -> None:
            nonlocal tokens, labels, is_first
            if not is_first and len(set(lengths)) > 1:
                tokens, labels = batch_of(next(loader))
            is_first = False
            if zero == "before":
                update.zero_grad()
            loss_of(model(tokens).flatten(0, 1), labels.flatten()).backward()
            update.step()
            if zero == "after":
                update.zero_grad()

        return step

    def batch_of(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4, length, dtype=torch.int64, device=device), torch.zeros(
            4, length, dtype=torch.int64, device=device
        )

    return build


@functools.cache
def recorded(length: int, optimizer: str, device: str, zero: str) -> Trace:
    place = "cpu" if device == "cpu" else "cuda"
    return memplan.record(build_of((length,), optimizer, place, zero=zero), device=device)


def chain_of(order: tuple[int, ...], optimizer: str, device: str, zero: str) -> Trace:
    return chained({length: recorded(length, optimizer, device, zero) for length in set(order)}, order)


def levels(trace: Trace) -> list[tuple[int, int]]:
    return [(allocated, reserved) for _, allocated, reserved in simulate(trace).events]


CASES = list(product(["cpu", "h100"], OPTIMIZERS, ["before", "after"]))
FEW = [
    *(("cpu", "sgd", "before"), ("cpu", "momentum", "after"), ("cpu", "adamw", "before")),
    *(("h100", "sgd", "after"), ("h100", "momentum", "before"), ("h100", "adamw", "after")),
]
"""Every device with every optimizer, and each of both with either place of zero_grad."""


@pytest.mark.parametrize(
    ("device", "optimizer", "zero"), [*thinned(FEW, 3), *slow(*(case for case in CASES if case not in FEW))]
)
def test_the_chain_is_the_run_that_goes_through_the_lengths(device: str, optimizer: str, zero: str) -> None:
    place = "cpu" if device == "cpu" else "cuda"
    real = memplan.record(build_of(ORDER, optimizer, place, zero=zero), device=device, steps=len(ORDER))
    chain = chain_of(ORDER, optimizer, device, zero)
    assert len(chain.steps) == len(real.steps)
    assert levels(chain) == levels(real)
    for expected, step in zip(simulate(real).steps, simulate(chain).steps, strict=True):
        assert (step.peak_allocated, step.peak_reserved) == (expected.peak_allocated, expected.peak_reserved)


@pytest.mark.parametrize(
    ("optimizer", "zero"),
    [
        ("momentum", "after"),
        *slow(("sgd", "before"), ("adamw", "before"), ("sgd", "after"), ("momentum", "before"), ("adamw", "after")),
    ],
)
def test_the_chain_has_the_peak_of_the_real_allocator(optimizer: str, zero: str) -> None:
    build = build_of(ORDER, optimizer, "cpu", zero=zero)

    def run() -> None:
        step = build()
        for _ in ORDER:
            step()

    assert simulate(chain_of(ORDER, optimizer, "cpu", zero)).peak_allocated == peak_of(allocations(run))


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.lists(st.sampled_from([8, 24, 40, 57]), min_size=2, max_size=6).map(tuple))
def test_any_order_is_the_run_in_this_order(order: tuple[int, ...]) -> None:
    real = memplan.record(build_of(order, "adamw", "cuda", zero="before"), device="h100", steps=len(order))
    if len(set(order)) > 1:
        assert levels(chain_of(order, "adamw", "h100", "before")) == levels(real)


def test_a_loss_that_is_held_is_freed_where_the_next_step_replaces_it() -> None:
    def build(lengths: tuple[int, ...]) -> Callable[[], Callable[[], None]]:
        def make() -> Callable[[], None]:
            model, loader = Decoder(), cycle(lengths)
            batch = torch.zeros(4, next(loader), dtype=torch.int64)
            held: list[torch.Tensor] = []

            def step() -> None:
                nonlocal batch
                if held and len(lengths) > 1:
                    batch = torch.zeros(4, next(loader), dtype=torch.int64)
                output = model(batch)
                output.sum().backward()
                held[:] = [output.detach()]
                model.zero_grad()

            return step

        return make

    real = memplan.record(build(ORDER), steps=len(ORDER))
    chain = chained({length: memplan.record(build((length,))) for length in set(ORDER)}, ORDER)
    assert levels(chain) == levels(real)


def test_a_model_of_another_size_is_refused() -> None:
    def build(length: int) -> Callable[[], Callable[[], None]]:
        def make() -> Callable[[], None]:
            layer = nn.Linear(length, 1)
            return lambda: layer(torch.zeros(2, length)).sum().backward()

        return make

    traces = {length: memplan.record(build(length)) for length in (8, 16)}
    with pytest.raises(InputError, match=r"weight has another size at length 16 than at 8"):
        chained(traces, (8, 16))
