"""Traces go to JSON and back unchanged, and files from strangers are not trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.steps import STEPS

import memplan
from memplan._text import write_whole
from memplan.errors import FormatError
from memplan.trace.trace import Trace


@pytest.fixture(scope="module")
def trace() -> memplan.Trace:
    return memplan.record(STEPS["grad_scaler_and_clipping"])


def test_round_trip(trace: memplan.Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a.json")
    assert memplan.Trace.load(tmp_path / "a.json") == trace
    assert memplan.Trace.from_json(trace.to_json()) == trace


def test_a_measured_trace_too() -> None:
    measured = memplan.measure(STEPS["in_place"], steps=1)
    assert Trace.from_json(measured.to_json()) == measured


def test_one_for_a_card_too() -> None:
    """With streams, workspaces known as an interval, and what the step asked of the allocator."""

    def build() -> Any:
        convolution, side = torch.nn.Conv2d(3, 4, 3).cuda(), torch.cuda.Stream()

        def step() -> None:
            with torch.cuda.stream(side):
                x = torch.zeros(2, 3, 8, 8, device="cuda")
            x.record_stream(torch.cuda.current_stream())
            convolution(x)
            torch.cuda.empty_cache()

        return step

    recorded = memplan.record(build, device="h100", cudnn=False, steps=1)
    assert any(s.stream for s in recorded.storages)
    assert any(s.used_on for s in recorded.storages)
    assert any(s.low == 0 for s in recorded.storages)
    assert [call.kind for call in recorded.calls] == ["empty_cache"]
    assert Trace.from_json(recorded.to_json()) == recorded
    waiting = tuple(replace(storage, used_on=(-1,)) for storage in recorded.storages)  # as memplan.measure has it
    assert Trace.from_json(replace(recorded, storages=waiting).to_json()).storages == waiting


def _changed(trace: memplan.Trace, change: Any) -> str:
    data = json.loads(trace.to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(schema=99), "has schema version 99; this memplan reads 2"),
        (lambda d: d.update(format="other"), "has the format 'other', not memplan.trace"),
        (lambda d: d.pop("ops"), "is no trace that can be used: it"),
        (lambda d: d["storages"][3].pop(), "is no trace that can be used: it"),
        (lambda d: d["storages"][3].__setitem__(0, -5), "is no trace that can be used: it"),
        (lambda d: d["storages"][3].__setitem__(1, "magic"), "is no trace that can be used: it"),
        (lambda d: d["storages"][3].__setitem__(2, d["storages"][4][2]), "is no trace that can be used: it"),
        (lambda d: d["ops"][0].__setitem__(8, [10**9]), "is no trace that can be used: it"),
        (lambda d: d["ops"][0].__setitem__(8, [-1]), "is no trace that can be used: it"),
        (lambda d: d.update(steps=[10**9]), "is no trace that can be used: it"),
        (lambda d: d.update(end="x"), "is no trace that can be used: it"),
        (lambda d: d["ops"][0].__setitem__(0, True), "is no trace that can be used: it"),
        (lambda d: d["ops"][0].__setitem__(0, "x"), "is no trace that can be used: it"),
        (lambda d: d["ops"][0].__setitem__(3, 10**9), "is no trace that can be used: it"),
        (lambda d: d["storages"][0].__setitem__(6, [-1]), "is no trace that can be used: it"),
        (lambda d: d["layers"][0].__setitem__(0, None), "is no trace that can be used: it"),
        (lambda d: d["storages"][0].__setitem__(10, 10**12), "is no trace that can be used: it"),
        (lambda d: d["storages"][0].__setitem__(0, 1 << 62), "more than can be counted"),
        (lambda d: d["storages"][0].__setitem__(11, -1), "is no trace that can be used: it"),
        (lambda d: d["storages"][0].__setitem__(12, ["x"]), "is no trace that can be used: it"),
        (lambda d: d.update(calls=[[1, "explode"]]), "is no trace that can be used: it"),
        (lambda d: d.update(calls=[[1, "synchronize"]]), "share a tick"),
        (lambda d: d.update(calls=[[0, "synchronize"]]), "is no trace that can be used: it"),
    ],
)
def test_damage_is_named(trace: memplan.Trace, change: Any, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        Trace.from_json(_changed(trace, change))


@given(st.one_of(st.text(), st.binary(max_size=200)))
def test_any_other_file_is_refused(tmp_path_factory: pytest.TempPathFactory, content: str | bytes) -> None:
    path = tmp_path_factory.mktemp("files") / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    with pytest.raises(FormatError):
        memplan.Trace.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
