"""Which storages are a parameter's gradient: of a sparse one its values, and indices that are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memplan
from memplan.trace.records import Storage

ROWS, WIDTH, COUNT = 1000, 64, 700


def _build(power: int) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
        places = torch.randint(0, ROWS, (COUNT,))

        def step() -> None:
            model.zero_grad()
            rows = model[0](places)
            (rows**power if power > 1 else rows).sum().backward()

        return step

    return build


def _gradients(trace: memplan.Trace) -> list[Storage]:
    return [one for one in trace.storages if one.cause == "parameter_gradient" and one.name == "0.weight"]


def test_indices_and_values_are_rows_of_their_own() -> None:
    trace = memplan.record(_build(1), device="cpu", steps=1)
    assert [(one.dtype, one.bytes) for one in _gradients(trace)] == [
        ("int64", COUNT * 8),
        ("float32", COUNT * WIDTH * 4),
    ]


def test_indices_shared_with_the_input_are_input() -> None:
    trace = memplan.record(_build(2), device="cpu", steps=1)
    assert [one.dtype for one in _gradients(trace)] == ["float32"]
    assert [one.bytes for one in trace.storages if one.cause == "input"] == [COUNT * 8]


@pytest.mark.parametrize("power", [1, 2])
def test_a_layer_owns_its_sparse_gradient(power: int) -> None:
    layers = {row.name: row for row in memplan.explain(_build(power), device="cpu").layers}
    own_indices = COUNT * 8 if power == 1 else 0
    assert layers["0"].gradient_bytes == COUNT * WIDTH * 4 + own_indices
