"""The examples of the documentation run, in the order in which they stand."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_examples_of_fit_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "fit.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        if 'backend="memplan"' in block and not entry_points(group="torch_dynamo_backends", name="memplan"):
            continue  # an installation from before the backend
        exec(block, names)
    assert (tmp_path / "plan.json").exists()


def test_every_switch_of_the_search_is_described() -> None:
    from dataclasses import fields

    from memplan.planning.search import Heuristics

    def shown(default: object) -> str:
        return "on" if default is True else str(default)

    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (DOCS / "fit.md").read_text(encoding="utf-8"), re.M)
    assert rows == [(one.name, shown(one.default)) for one in fields(Heuristics)]
