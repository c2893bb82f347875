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
    assert _without_newer_fields(json.loads(saved.to_json()), json.loads(text)) == json.loads(text)
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


def _without_newer_fields(again: Any, before: Any) -> Any:
    """Return the content without empty fields that the older file lacks, at any depth."""
    if isinstance(again, list) and isinstance(before, list) and len(again) == len(before):
        return [_without_newer_fields(*pair) for pair in zip(again, before, strict=True)]
    if not (isinstance(again, dict) and isinstance(before, dict)):
        return again
    return {key: _without_newer_fields(part, before.get(key)) for key, part in again.items() if key in before or part}
