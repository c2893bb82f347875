"""Files saved before stay readable: each is read and written again with the same content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan import Trace
from memplan.planning.plan.plan import Plan
from memplan.studies.sweeps.sweep import Sweep

DATA = Path(__file__).parent / "data"
READERS: dict[str, Callable[[str], Any]] = {
    "step.trace.json": Trace.from_json,
    "mlp.sweep.json": Sweep.from_json,
    "mlp.plan.json": Plan.from_json,
}


@pytest.mark.parametrize("name", READERS)
def test_a_saved_file_is_read_and_written_again(name: str) -> None:
    text = (DATA / name).read_text()
    again = READERS[name](text).to_json()
    assert json.loads(again) == json.loads(text)
    assert again == text or name == "mlp.plan.json"  # choices stood in another order
