"""A contributed file: what the allocator did, and none of the user's strings."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import goldens.handmade  # noqa: F401  # makes the benchmarks' reader importable
import pytest
import torch
from torch import nn

import memplan
from memplan.trace.card_run import machine
from memplan.trace.card_run.contribution import NAME, OTHER, contribution, op_name, write
from memplan.trace.card_run.history import OnCard
from memplan.trace.card_run.observed import CardRun
from memplan.trace.recording.causes import StepParts
from memplan.trace.records import Counters

golden_file = importlib.import_module("golden_file")  # of benchmarks/: shares no code with what writes
SECRET = "zebra"
GPU = {"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "multiprocessors": 132, "memory": 85_000_000_000}
KIB = 1024


@torch.library.custom_op(f"{SECRET}lib::{SECRET}_op", mutates_args=())
def secret_op(x: torch.Tensor, text: str) -> torch.Tensor:
    return x.clone()


@secret_op.register_fake
def _(x: torch.Tensor, text: str) -> torch.Tensor:
    return torch.empty_like(x)


class ZebraNet(nn.Module):
    """Named by the user in every way: class, parts, parameters, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.zebra_layer = nn.Linear(16, 16)
        self.register_buffer("zebra_buffer", torch.zeros(16))

    def forward(self, zebra_input: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function(f"{SECRET} range"):
            return self.zebra_layer(zebra_input) + self.zebra_buffer + secret_op(zebra_input, f"{SECRET} text").detach()


def zebra_build() -> Any:
    model, data = ZebraNet().cuda(), torch.randn(8, 16, device="cuda")
    return lambda: model(data).sum().backward()


def event(action: str, place: int, size: int) -> dict[str, Any]:
    frames = [{"name": f"{SECRET}_function", "filename": f"/home/{SECRET}/train.py", "line": 1}]
    return {"action": action, "addr": place, "size": size, "stream": 0, "frames": frames, "user_metadata": SECRET}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> CardRun:
    """A run on a card of paper: ops, storages and layers of a step with names, a history with stacks."""
    monkeypatch.setattr(machine, "gpu", lambda number=0: GPU)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"max_split_size_mb:64 # {SECRET}")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    trace = memplan.record(zebra_build, device="h100")
    assert SECRET in trace.to_json()
    parts = StepParts(ops=trace.ops, storages=trace.storages, layers=trace.layers, steps=trace.steps, end=trace.end,
                      forms=trace.forms, returned=trace.returned)  # fmt: skip
    rows = [event("segment_alloc", 0, 2048 * KIB), event("alloc", 0, 700), event("alloc", KIB, 512),
            event("free_requested", 0, 700), event("free_completed", 0, 700)]  # fmt: skip
    blocks = [{"size": KIB, "state": "inactive"}, {"size": 512, "requested_size": 512, "state": "active_allocated",
              "frames": rows[0]["frames"]}, {"size": 2048 * KIB - KIB - 512, "state": "inactive"}]  # fmt: skip
    segment = {"address": 0, "total_size": 2048 * KIB, "stream": 0, "segment_type": "small", "blocks": blocks}
    snapshot = {"device_traces": [rows], "segments": [segment],
                "allocator_settings": {"max_split_size": 64, "last_allocator_settings": f"a b {SECRET}"}}  # fmt: skip
    counters = (Counters(0, 0), Counters(1536, 2048 * KIB), Counters(1536, 2048 * KIB))
    return CardRun(OnCard(parts, ()), counters, Counters(512, 2048 * KIB), snapshot, (f"note on {SECRET}",))


def strings(value: Any) -> Iterator[str]:
    """Every text in plain data, keys and all."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (key, *strings(part))
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def test_no_string_of_the_users_gets_in(run: CardRun) -> None:
    found = list(strings(json.loads(json.dumps(contribution(run)))))
    assert not [text for text in found if SECRET in text.lower()]
    assert not [text for text in found if "/" in text or ".py" in text]
    assert ":4096:8" in found  # a setting that looks like one


def test_ops_of_libraries_and_of_the_users_have_no_name(run: CardRun) -> None:
    ops = {row[3] for row in contribution(run)["allocations"]}
    assert OTHER in ops
    assert "aten.addmm.default" in ops
    assert op_name(f"{SECRET}lib.{SECRET}_op.default") == OTHER


def test_shapes_and_sizes_are_the_steps(run: CardRun) -> None:
    rows = contribution(run)["allocations"]
    assert [16 * 16 * 4, "weight", "build", "aten._to_copy.default", "float32", [16, 16]] in rows
    assert len(rows) == len(run.step.parts.storages)


def test_the_benchmarks_read_it(run: CardRun, tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.json.gz"
    content = contribution(run)
    assert write(str(path), content) == path.stat().st_size
    golden = golden_file.read(path)
    assert (golden.name, golden.capability) == (NAME, (9, 0))
    assert [(peak.allocated, peak.reserved) for peak in golden.steps] == [(1536, 2048 * KIB)] * 2
    assert json.loads(gzip.decompress(path.read_bytes())) == json.loads(json.dumps(content))


def test_an_emulated_cards_is_none_of_a_real_one(run: CardRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contribution(run)["format"] == "memplan-golden"
    monkeypatch.setenv("MEMPLAN_DRY_CARD", "any")
    assert contribution(replace(run, notes=()))["format"] == "memplan-dry-golden"
