"""Results as HTML: the tables of the terminal, escaped, static and small."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn

import memplan
from memplan.explanation.line_profile import LineProfile, LineRow
from memplan.reports.document import Table, document
from memplan.reports.explain import report
from memplan.reports.notebook import html_of
from memplan.simulation.snapshots.write import write_snapshot
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.largest import find_largest
from memplan.studies.capacity.limit import Room
from memplan.trace.recording.session import Target
from memplan.trace.step import StepOptions

EVIL = "<script>alert('&')</script>"
LIMIT = 200_000


class Parsed(HTMLParser):
    """Tags, and the texts of cells and of everything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "br":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)


def gpt(depth: int = 48) -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 64), *(block() for _ in range(depth)), nn.Linear(64, 1000))


def step() -> Callable[[], None]:
    model, data = make(), torch.randn(16, 64)
    return lambda: model(data).sum().backward()


def snapshot(folder: Path) -> str:
    write_snapshot(folder / "step.pickle", memplan.simulate(memplan.record(step, device="h100")), {})
    return str(folder / "step.pickle")


def largest() -> Any:
    subject = Subject(make, StepOptions(("16x64",)).checked(), {})
    return find_largest(subject, "batch", Room(Target("cpu"), 1 << 20), most=64, title="make")


def quantized() -> Any:
    pytest.importorskip("torchao")
    return memplan.quantize(make(), "256x64", weights="int8")


RESULTS: dict[str, Callable[[Path], Any]] = {
    "Comparison": lambda _: memplan.compare(make, make, "16x64", b_options={"train": False}, device="cpu"),
    "Explanation": lambda _: memplan.explain(make, "16x64", device="h100"),
    "Finding": lambda _: memplan.Finding("id", "warning", "layer", "a.py:1", 5, "message", ("advice",), {}),
    "Fitted": lambda _: memplan.fit(make(), "256x64", budget="1 GiB", device="cpu"),
    "LineProfile": lambda _: LineProfile("f", "f.py", "cpu", "measured", (LineRow(3, 2, 10, 5, 1, 20, "  f()"),)),
    "Plan": lambda _: memplan.plan(make, "256x64", budget="1 GiB", device="cpu"),
    "Largest": lambda _: largest(),
    "Quantized": lambda _: quantized(),
    "Proof": lambda _: memplan.verify(model := make(), model, "256x64", pairs=0),
    "Replay": lambda folder: memplan.replay(snapshot(folder)),
    "Sweep": lambda _: memplan.sweep(make, {"batch": [1, 2]}, "16x64", device="cpu"),
    "Timeline": lambda _: memplan.simulate(memplan.record(step)),
    "Trace": lambda _: memplan.record(step),
}


@pytest.mark.parametrize("name", thinned(RESULTS, 3))
def test_every_result_has_html_that_is_well_formed_and_static(name: str, tmp_path: Path) -> None:
    result = RESULTS[name](tmp_path)
    assert type(result).__name__ == name
    text = result._repr_html_()
    parsed = Parsed(text)
    assert parsed.text.strip()
    assert set(parsed.tags) <= {"div", "b", "br", "pre", "table", "thead", "tbody", "tr", "th", "td"}
    styles = {value for attribute, value in parsed.attributes if attribute == "style"}
    assert not [style for style in styles if style and re.search("color|background|url", style)]
    assert {attribute for attribute, _ in parsed.attributes} <= {"style", "align", "colspan"}
    assert text == result._repr_html_()


def test_the_tables_are_those_of_the_terminal() -> None:
    explained = memplan.explain(make, "16x64", device="cpu")
    rows = Parsed(explained._repr_html_()).rows
    tables = [part for section in report(explained).sections for part in section.parts if isinstance(part, Table)]
    expected: list[list[str]] = []
    for table in tables:
        columns = [column for column in table.columns if not column.bars]
        expected.append([column.header.replace("\n", "") for column in columns])
        expected += [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    assert [[cell.replace("\xa0", " ") for cell in row] for row in rows] == expected
    peak = explained.timeline.peak_allocated
    assert ["peak", f"{peak / 1024:.1f} KiB"] in [row[:2] for row in expected]


@pytest.mark.slow
def test_a_large_model_stays_small() -> None:
    explained = memplan.explain(gpt, "2x32:int64<1000", device="h100")
    assert len(explained.layers) > 300
    assert len(explained._repr_html_()) < LIMIT
    trace = memplan.record(lambda: lambda: None)
    assert len(trace._repr_html_()) < 1000


def test_long_tables_and_texts_are_cut() -> None:
    rows = tuple(LineRow(number, 1, 1, 1, 1, 1, "x" * 1000) for number in range(5000))
    text = LineProfile("f", "f.py", "cpu", "measured", rows)._repr_html_()
    assert len(text) < LIMIT
    assert "4700 more rows" in text
    assert Parsed(text).rows[-1][0] == "4999"


def test_names_are_escaped() -> None:
    evil: Any = type(EVIL, (nn.Sequential,), {})
    model = evil()
    model.register_module(EVIL, nn.Linear(64, 64))
    text = memplan.explain(model, "16x64", device="cpu")._repr_html_()
    parsed = Parsed(text)
    assert "script" not in parsed.tags
    assert EVIL in parsed.text
    row = LineRow(1, 1, 1, 1, 1, 1, EVIL)
    profile = LineProfile(EVIL, EVIL, EVIL, "measured", (row,), (EVIL,))
    assert "script" not in Parsed(profile._repr_html_()).tags
    assert Parsed(profile._repr_html_()).text.count(EVIL) >= 4
    assert "script" not in Parsed(html_of(document(EVIL, [EVIL]))).tags


def test_code_keeps_its_indentation() -> None:
    text = LineProfile("f", "f.py", "cpu", "measured", (LineRow(1, 1, 1, 1, 1, 1, "    return x"),))._repr_html_()
    assert Parsed(text).rows[1][-1].replace("\xa0", " ") == "    return x"
