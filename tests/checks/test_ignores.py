"""Ignoring findings by layer and by a comment on the line."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import memplan
from memplan.checks.finding import Finding
from memplan.checks.ignores import Ignore, located, not_ignored, parse_ignore
from memplan.errors import InputError

ID = "border-erosion"


def erosions(model: Any, **more: Any) -> list[Finding]:
    return [finding for finding in memplan.check(model, "1x1x32x32", device="cpu", **more) if finding.id == ID]


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Conv2d(1, 1, 3) for _ in range(3)])


def test_by_layer() -> None:
    assert erosions(stack, ignore=[ID]) == []
    assert erosions(stack, ignore=[f"{ID}:[012]"]) == []
    assert erosions(stack, ignore=f"{ID}:*") == []
    (finding,) = erosions(stack, ignore=[f"{ID}:0"])  # two other layers do it still
    assert finding.details["lost"] == [(3, 3), (3, 3)]


def test_a_pattern_needs_a_known_check() -> None:
    assert parse_ignore("a:b.*", ["a"]) == Ignore("a", "b.*")
    with pytest.raises(InputError, match="names no check"):
        parse_ignore("b", ["a"])


SOURCE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 1, 3)  {made}
        self.second = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(1, 1, 3),  {made}
        )

    def forward(self, x):
        x = self.first(x)  {first}
        return self.second(x)  {second}
"""


@pytest.mark.parametrize(
    ("comments", "found"),
    [
        ({}, True),
        ({"made": f"# memplan: ignore[{ID}]"}, False),
        ({"made": "# memplan: ignore"}, False),
        ({"made": "# memplan: ignore[other-check]"}, True),
        ({"made": f"# a reason # memplan:ignore[other-check, {ID}]"}, False),
        ({"first": f"# memplan: ignore[{ID}]", "second": f"# memplan: ignore[{ID}]"}, False),
        ({"first": f"# memplan: ignore[{ID}]"}, True),
    ],
)
def test_by_line(comments: dict[str, str], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.trace.naming.targets import resolve

    monkeypatch.chdir(tmp_path)
    name = f"net_{abs(hash(tuple(comments.items())))}.py"
    (tmp_path / name).write_text(SOURCE.format(**({"made": "", "first": "", "second": ""} | comments)))
    assert bool(erosions(resolve(f"{name}:Net").what)) is found


def test_one_about_several_layers_goes_when_all_are_ignored() -> None:
    rows = [{"layer": "a.1", "where": None}, {"layer": "b", "where": None}]
    finding = Finding("x", "warning", "a.1", None, 0, "", (), {"layers": rows})
    assert not_ignored([finding], [Ignore("x", "a.*")], {}) == [finding]
    assert not_ignored([finding], [Ignore("x", "a.*"), Ignore("x", "b")], {}) == []
    assert not_ignored([finding], [Ignore("y")], {}) == [finding]


def test_lines_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part.py").write_text(textwrap.dedent("a = 1\n"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert located("part.py:1") == (str(tmp_path / "part.py"), 1)
    assert located("nowhere.py:1") == located(None) == ("", 0)
