"""Pages of saved results, without a browser: what is in them, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports.outcomes import WRONG
from reports.saved_results import EVIL, every, explanation, sweep

from memplan._bytes import format_bytes
from memplan.cli import main
from memplan.errors import InputError, MemplanError
from memplan.reports.html.page import page_of
from memplan.reports.html.saved_results import READERS, result_of


class Parsed(HTMLParser):
    """Tags, attributes that would fetch something, and texts outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""
        self.data = ""
        self._script: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            (name, value) for name, value in attrs if name in ("src", "srcset", "action", "data", "poster")
        ]
        self.fetched += [(name, value) for name, value in attrs if name == "href" and not (value or "").startswith("#")]
        if tag in ("script", "style"):
            self._script = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        elif self._script == "data":
            self.data += data


def page(*texts: str) -> Parsed:
    return Parsed(page_of([result_of(text, "the file") for text in texts]))


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return every()


def test_every_kind_is_a_page_that_fetches_nothing(results: dict[str, str]) -> None:
    alone = page(explanation())
    for kind, text in results.items():
        found = page(text)
        assert found.fetched == [], kind
        assert found.tags.count("script") in (1, 4), kind  # a name in a tag would be one more
        assert "img" not in found.tags
    assert EVIL in alone.text
    assert page(*results.values()).fetched == []
    beside = {"memplan.quantized", "memplan.post_mortem", "memplan.fit_script"}
    assert beside | {json.loads(text)["format"] for text in results.values()} == set(READERS)


def test_the_verdict_comes_first_and_says_what_the_file_says() -> None:
    data = json.loads(explanation())
    found = page(explanation())
    assert found.text.index("needs") < found.text.index("Memory over time")
    assert format_bytes(data["timeline"]["peak_allocated"]) in found.text
    assert data["sentence"] in found.text


def test_pictures_have_the_numbers_of_the_file() -> None:
    data = json.loads(explanation())
    charts = {one["kind"]: one for one in json.loads(page(explanation()).data)["charts"]}
    series = charts["time"]["series"][0]
    for name in ("ticks", "allocated", "causes"):
        assert series[name] == data["course"][name]
    root, *nodes = charts["layers"]["nodes"]
    assert root[3] == data["saved_bytes"] == sum(row["saved_bytes"] for row in data["layers"])
    assert root[4] == sum(row["bytes"] for row in data["holders"])
    by_path = {node[0]: node for node in nodes}
    for row in data["layers"]:
        inside = [
            one for one in data["layers"] if one["name"] == row["name"] or one["name"].startswith(row["name"] + ".")
        ]
        assert by_path[row["name"]][3] == sum(one["saved_bytes"] for one in inside)
    blocks = [block for one in charts["allocator"]["segments"] for block in one["blocks"]]
    assert sum(block[1] for block in blocks if block[2]) == data["timeline"]["peak_allocated"]


def test_the_tables_are_those_of_the_report() -> None:
    data = json.loads(explanation())
    found = page(explanation()).text
    for row in data["layers"]:
        assert row["name"] in found
        assert format_bytes(row["output_bytes"]) in found
    assert all(reason in found for row in data["layers"][:1] for reason in row["why"])
    assert "Why the most is saved" in found


def test_sliders_have_every_point_of_the_sweep() -> None:
    data = json.loads(sweep())
    chart = next(one for one in json.loads(page(sweep()).data)["charts"] if one["kind"] == "sweep")
    assert len(chart["rows"]) == len(data["rows"]) == 6
    for drawn, row in zip(chart["rows"], data["rows"], strict=True):
        assert drawn["peak"] == row["peak"] == sum(drawn["parts"].values())
        assert [chart["axes"][axis]["texts"][place] for axis, place in enumerate(drawn["values"])] == [
            str(row["batch"]), str(row["size"])
        ]  # fmt: skip


def test_several_stand_side_by_side_with_their_peaks(results: dict[str, str]) -> None:
    both = page(explanation(), results["trace"])
    chart = json.loads(both.data)["charts"][0]
    assert chart["kind"] == "beside"
    peak = json.loads(explanation())["timeline"]["peak_allocated"]
    assert [sum(column[place] for column in chart["causes"].values()) for place in (0, 1)] == [peak, peak]


def test_a_failed_proof_is_said_to_be_one() -> None:
    assert "The proof failed." in page(WRONG.to_json()).text


def test_the_page_is_the_same_twice_and_small() -> None:
    texts = [page_of([result_of(explanation(), "x")]) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0].encode()) < 6_000_000


def damaged(key: str, value: Any) -> str:
    data = json.loads(explanation())
    data[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it is empty"),
        ("not JSON", "it is not JSON"),
        ('{"format": "memplan.explanation", "schema"', "it is not JSON"),
        ("[1, 2]", "names no format"),
        ('{"a": 1}', "names no format"),
        ('{"format": "other"}', "its format is 'other'"),
        ('{"format": ["memplan.fit"]}', "its format is ['memplan.fit']"),
        ('{"format": "memplan.findings", "schema": 99}', "has schema version 99; this memplan reads 1"),
        ('{"format": "memplan.findings", "schema": 1}', "it lacks 'target'"),
        ('{"format": "memplan.compare", "schema": 1}', "it lacks 'a'"),
        ('{"format": "memplan.explanation", "schema": 99}', "has schema version 99; this memplan reads 1"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(text: str, found: str) -> None:
    with pytest.raises(InputError, match=r"^file\.json (cannot be shown|is no \w+ that can be used)") as error:
        result_of(text, "file.json")
    assert found in str(error.value)
    assert "\n" not in str(error.value)


def test_files_cut_off_anywhere_are_refused(results: dict[str, str]) -> None:
    for kind, text in results.items():
        for share in (0.3, 0.9):
            with pytest.raises(MemplanError):
                result_of(text[: int(len(text) * share)], kind)


def test_files_with_a_part_missing_are_refused_or_shown(results: dict[str, str]) -> None:
    """Nothing but an error of memplan's own comes out, whatever is missing or of another type."""
    for kind, text in results.items():
        if kind in ("explanation", "trace"):
            continue
        data = json.loads(text)
        for key in data:
            for value in (None, 7, "x", [], {}):
                try:
                    result_of(json.dumps({**data, key: value}), kind)
                except MemplanError:
                    continue


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return int(str(ended.value.code))


def test_the_command_writes_the_page_that_html_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, first, second = tmp_path / "a.json", tmp_path / "a.html", tmp_path / "b.html"
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(4, 4)\n")
    target = f"{tmp_path / 'net.py'}:make"
    assert run("explain", target, "--input", "2x4", "--json", str(saved), "--html", str(first)) == 0
    assert run("report", str(saved), "--html", str(second)) == 0
    assert "b.html: 1 result" in capsys.readouterr().out
    one, other = (re.sub(r"<p class=.dim source.>.*?</p>", "", path.read_text()) for path in (first, second))
    assert one == other
    # one that is there already is kept
    assert run("report", str(saved), "--html", str(second)) == 2
    assert f"{second} is there already. Expected a new file. Name another, or add --force." in capsys.readouterr().err
    assert run("report", str(saved), str(saved), "--html", str(second), "--force") == 0
    assert second.stat().st_size > first.stat().st_size


def test_files_that_cannot_be_read_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "snapshot.pickle").write_bytes(b"\x80\x04\xff")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "good.json").write_text(explanation())
    (tmp_path / "cut.json").write_text(explanation()[:-200])
    (tmp_path / "newer.json").write_text(damaged("schema", 2))
    (tmp_path / "empty.json").touch()
    (tmp_path / "foreign.json").write_text('{"dependencies": {}}')
    for name, words in (
        ("missing.json", "cannot be read"), ("snapshot.pickle", "is no text"), ("folder.json", "cannot be read"),
        ("cut.json", "cannot be shown: it is not JSON"), ("empty.json", "it is empty"),
        ("newer.json", "has schema version 2; this memplan reads 1"), ("foreign.json", "it names no format"),
    ):  # fmt: skip
        good = str(tmp_path / "good.json")
        assert run("report", good, str(tmp_path / name), "--html", str(tmp_path / "out.html")) == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "out.html").exists()


NET = "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))\n"
COMMANDS = {
    "check": ("--input", "2x4"),
    "sweep": ("--input", "2x4", "--batch", "1,2", "--jobs", "1"),
    "largest": ("--input", "2x4", "--axis", "batch", "--budget", "64KiB"),
    "compare": ("--input", "2x4", "--b", "batch=4"),
    "explain": ("--input", "2x4", "--optimizer", "adamw"),
    "fit": ("--input", "64x4", "--budget", "1GiB", "--predict", "--costs", "roofline"),
    "measure": ("--input", "2x4"),
}


@pytest.mark.parametrize(
    "command", ["explain", *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name != "explain")]
)
def test_commands_write_the_page_of_their_json(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(NET)
    saved, found = tmp_path / "saved.json", tmp_path / "page.html"
    target = f"{tmp_path / 'net.py'}:make"
    assert run(command, target, *COMMANDS[command], "--json", str(saved), "--html", str(found)) == 0
    assert found.read_text() == page_of([result_of(saved.read_text(), "the result")])


def test_a_script_writes_a_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n    model(torch.randn(2, 4)).sum().backward()\n    optimizer.step()\n"
    )
    found = tmp_path / "page.html"
    assert run("run", "--html", str(found), "--perfetto", str(tmp_path / "a.json"), str(tmp_path / "train.py")) == 0
    text = Parsed(found.read_text()).text
    assert "train.py" in text
    assert "training step on cpu" in text
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--html", "-"), "--html -. Expected a file"),
        (("--json", "a", "--html", "a"), "names the same file"),
        (("--html", "nowhere/a.html"), "there is no folder"),
        (("--perfetto", "-"), "--perfetto -. Expected a file"),
        (("--perfetto", "a", "--html", "a"), "names the same file"),
    ],
)
def test_outputs_without_a_place_end_in_one_line(
    options: tuple[str, ...], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run("explain", "net.py:make", *options) == 2
    assert found in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["jinja2", "plotly"])
def test_what_is_missing_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *rest: None if one == name else find(one, *rest))
    assert run("explain", "net.py:make", "--html", "page.html") == 2
    said = capsys.readouterr().err
    assert f"--html needs {name}, which is not installed. Expected memplan's extra report." in said


@pytest.mark.slow  # a step of 13,564 ops
def test_the_page_of_gpt2_xl_has_no_more_than_6_mb(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "gpt2.py"
    size = ("--arg", "layers=48", "--arg", "width=1600", "--arg", "batch=1")
    assert run("explain", f"{example}:build", *size, "--device", "h100", "--html", str(tmp_path / "xl.html")) in (0, 1)
    assert 5_000_000 < (tmp_path / "xl.html").stat().st_size <= 6_000_000


def test_a_guard_says_what_it_compared(results: dict[str, str]) -> None:
    data = json.loads(results["guard"])
    found = page(results["guard"]).text
    assert data["now"]["target"] in found
    assert f"{format_bytes(data['before']['peak'])} -> {format_bytes(data['now']['peak'])}" in found
    assert EVIL in found


@pytest.mark.parametrize("evil", ["\x1b]0;x\x07", "\u202eevil", "\ud800", "\x00", "\u2028"])
def test_no_character_of_a_file_steers_a_page(evil: str, results: dict[str, str]) -> None:
    data = json.loads(explanation())
    data["title"] = data["layers"][0]["name"] = data["notes"] = f"a{evil}b"
    data["notes"] = [data["title"]]
    found = page_of([result_of(json.dumps(data), "x")])
    written = found.encode()  # a lone surrogate has no bytes
    assert evil.encode("utf-8", "surrogatepass") not in written
    assert json.dumps(evil)[1:-1] not in found.partition('id="data"')[2].partition("</script>")[0]
    assert "a?" in Parsed(found).text


def test_a_name_of_many_parts_takes_no_more_than_its_length() -> None:
    data = json.loads(explanation())
    data["layers"][0]["name"] = "a." * 20_000
    assert len(page_of([result_of(json.dumps(data), "x")])) < 10_000_000


def test_values_that_no_axis_has_are_refused() -> None:
    data = json.loads(sweep())
    for value in ("aten.mm.default", 3, [], {"a": 1}, [{"a": 1}], None):
        data["rows"][1]["batch"] = value
        with pytest.raises(InputError, match="no value of that axis"):
            result_of(json.dumps(data), "x")
