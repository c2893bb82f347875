"""Files saved before stay readable: each is read, and written again with the same content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan import Trace
from memplan.errors import FormatError
from memplan.planning.plan.plan import Plan
from memplan.studies.sweeps.sweep import Sweep

DATA = Path(__file__).parent / "data"
READERS: dict[str, Callable[..., Any]] = {
    "step.trace.json": Trace.from_json,
    "mlp.sweep.json": Sweep.from_json,
    "mlp.plan.json": Plan.from_json,
}


@pytest.mark.parametrize("name", READERS)
def test_a_saved_file_is_read_and_written_again(name: str) -> None:
    text = (DATA / name).read_text()
    saved = READERS[name](text)
    before, again = json.loads(text), json.loads(saved.to_json())
    assert {key: part for key, part in again.items() if key in before} == before
    assert not any(again[key] for key in again.keys() - before.keys())  # fields that are newer than the file
    assert READERS[name](saved.to_json()) == saved


@pytest.mark.parametrize("name", READERS)
def test_a_newer_file_is_refused_with_its_version(name: str) -> None:
    newer = json.loads((DATA / name).read_text()) | {"schema": 99}
    with pytest.raises(FormatError, match=r"^a\.json is no (trace|sweep|plan) .* has schema version 99; this memplan"):
        READERS[name](json.dumps(newer), "a.json")


def test_another_kind_of_file_is_refused_with_its_format() -> None:
    with pytest.raises(FormatError, match=r"it has the format 'memplan\.trace', not memplan\.plan"):
        Plan.load(DATA / "step.trace.json")


def test_the_earlier_functions_are_the_methods(tmp_path: Path) -> None:
    trace = Trace.load(DATA / "step.trace.json")
    with pytest.warns(DeprecationWarning, match=r"memplan\.save_trace is memplan\.Trace\.save now"):
        memplan.save_trace(trace, tmp_path / "a.json")
    with pytest.warns(DeprecationWarning, match=r"memplan\.load_trace is memplan\.Trace\.load now"):
        assert memplan.load_trace(tmp_path / "a.json") == trace
