"""Who holds the peak: rows of a step of which every tensor is known by its construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models.steps import STEPS
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

ROWS, WIDTH = 1024, 512


def build() -> Callable[[], Any]:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def test_all_that_is_alive_at_the_peak_is_told_the_largest_first() -> None:
    found = memplan.explain(build, device="cpu")
    sizes = [row.bytes for row in found.holders]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == found.timeline.peak_allocated == measured_peak(build)
    assert all(row.count >= 1 and row.bytes for row in found.holders)
    by_cause: dict[str, int] = {}
    for row in found.holders:
        by_cause[row.cause] = by_cause.get(row.cause, 0) + row.bytes
    assert by_cause == {cause: size for cause, size in found.by_cause.items() if size}


def test_rows_name_what_where_why_and_since_when() -> None:
    holders = memplan.explain(build, device="cpu").holders
    rows = {(row.name, row.cause): row for row in holders}
    weight = rows["0.weight", "weight"]
    assert (weight.layer, weight.phase, weight.step, weight.bytes) == ("0", "build", -1, WIDTH * WIDTH * 4)
    assert weight.where is not None
    assert weight.where.startswith("tests/explanation/test_owners.py:")
    saved = rows["sigmoid", "saved"]
    assert (saved.layer, saved.phase, saved.bytes, saved.shape) == ("1", "forward", ROWS * WIDTH * 4, (ROWS, WIDTH))
    assert rows["randn", "input"].bytes == ROWS * WIDTH * 4
    states = [row for row in holders if row.cause == "optimizer_state" and row.shape == (WIDTH, WIDTH)]
    assert sum(row.count for row in states) == 2
    assert {(row.phase, row.step, row.dtype) for row in states} == {("optimizer", 0, "float32")}


def test_json_has_the_rows() -> None:
    found = memplan.explain(STEPS["gru"], device="cpu")
    rows = found.to_dict()["holders"]
    assert [row["bytes"] for row in rows] == [row.bytes for row in found.holders]
    assert set(rows[0]) == {"name", "layer", "where", "cause", "phase", "step", "shape", "dtype", "count", "bytes"}


def test_an_explanation_is_shown_in_a_line() -> None:
    """In a notebook or a failed assertion; `print` gives the paragraph, the reports the tables."""
    shown = repr(memplan.explain(build, device="cpu"))
    assert shown.startswith("<Explanation of 'build' on cpu: ")
    assert len(shown) < 120
    trace = memplan.record(build, device="cpu")
    assert repr(trace).startswith("<Trace: recorded on cpu: 2 steps, ")
    assert repr(memplan.simulate(trace)).startswith("<Timeline: peak ")
