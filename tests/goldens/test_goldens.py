"""Predictions beside what a real card did, for every golden file that is here; and that the comparison tells."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from environment import slow, thinned
from goldens.handmade import MIB, ROOT, TENSOR, changed, gelu, write

from memplan.devices import find as find_card
from memplan.simulation.replays.replay import replay

# transformers' own, of a step of the zoo
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is:FutureWarning")

golden_file = importlib.import_module("golden_file")  # of benchmarks/, as the next; handmade.py says where
accuracy = importlib.import_module("cuda_accuracy")
numbers = importlib.import_module("cuda_numbers")

FILES: list[Path] = golden_file.find(ROOT / "goldens")
NONE_HERE = "no golden recordings here"
KNOWN_MISSES: dict[str, str] = json.loads((ROOT / "goldens" / "known_misses.json").read_text(encoding="utf-8"))


def name_of(path: Path | None) -> str:
    return "/".join(path.parts[-3:]) if path else "none"


NO_FILE = pytest.param(None, marks=pytest.mark.skip(reason=NONE_HERE))


def to_predict(number: int, path: Path) -> Any:
    """The file, marked to fail where it is listed as a known miss; one that passes after all has to leave the list.

    Every thirty-second file, in the order of their names, is predicted in each run; the others are slow.
    """
    reason = KNOWN_MISSES.get(name_of(path))
    known = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
    return pytest.param(path, marks=known if number % 32 == 0 else [*known, pytest.mark.slow])


@functools.cache
def row_of(path: Path) -> Any:
    """The comparison of a golden file; one record of a step serves several tests."""
    return accuracy.compare(golden_file.read(path))


def compared(path: Path) -> Any:
    row = row_of(path)
    if row.error.startswith("LookupError"):
        pytest.skip(row.error)
    return row


# What a real card did


@pytest.mark.parametrize("path", [to_predict(*file) for file in enumerate(FILES)] or [NO_FILE], ids=name_of)
def test_prediction_is_as_near_as_it_has_to_be(path: Path) -> None:
    assert [line for line in accuracy.violations([compared(path)]) if "intervals hold" not in line] == []


@pytest.mark.parametrize("path", thinned(FILES, 8) or [NO_FILE], ids=name_of)
def test_events_replay_to_every_address_and_segment(path: Path) -> None:
    golden = golden_file.read(path)
    if golden.events is None:
        pytest.skip("; ".join(golden.notes))
    replayed = replay(golden.snapshot())
    assert replayed.mismatches == []
    assert (replayed.peak_allocated, replayed.peak_reserved) == (golden.peak.allocated, golden.peak.reserved)


def test_contexts_lie_in_the_intervals_of_their_cards() -> None:
    measured = [golden for golden in map(golden_file.read, FILES[::8]) if golden.context is not None]
    spans = [find_card(golden.gpu).context for golden in measured]
    assert [
        golden.path for golden, (low, high) in zip(measured, spans, strict=True) if not low <= golden.context <= high
    ] == []


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason=NONE_HERE)
def test_two_of_three_intervals_without_cudnn_hold_what_was_measured() -> None:
    """An H100 and an H200 with torch 2.11; the bands of the numbers that are said by default hold more, see below."""
    total = accuracy.summary([row for row in map(row_of, FILES) if row.prediction is not None])
    assert (total["inside"], total["intervals"]) == (74, 112)


# The one number that is said by default

RESULTS: list[dict[str, Any]] = json.loads(
    (ROOT / "benchmarks" / "results" / "cuda_numbers.json").read_text(encoding="utf-8")
)["rows"]
"""Of each golden file, with and without stored answers; the test below repeats them."""


def test_of_the_numbers_95_percent_are_near_and_of_the_bands_95_percent_hold() -> None:
    stored = [row for row in RESULTS if row["stored"]]
    expected = [row for row in RESULTS if not row["stored"]]
    assert len(stored) == len(expected) == len(FILES)
    assert sum(row["within"] for row in stored) >= 0.95 * len(FILES)
    assert {row["step"] for row in stored if not row["within"]} <= set(numbers.CAUSES)
    assert sum(row["within"] for row in expected) >= 0.75 * len(FILES)
    for rows in (stored, expected):
        assert sum(row["inside"] for row in rows) >= 0.95 * len(FILES)


@pytest.mark.parametrize("path", FILES or [NO_FILE], ids=name_of)
@pytest.mark.slow
def test_the_number_is_as_near_as_the_results_say(path: Path) -> None:
    golden = golden_file.read(path)
    if golden.name not in accuracy.subjects():
        pytest.skip("its libraries are not installed")
    said = [row for row in RESULTS if (row["step"], row["card"]) == (golden.name, golden.gpu)]
    found = numbers.rows_of(golden)
    assert [(row.within, row.inside) for row in found] == [(row["within"], row["inside"]) for row in said]


@pytest.mark.parametrize("name", ["lstm_bidirectional", *slow("lstm", "lstm_dropout", "gru")])
def test_recurrent_steps_take_what_a_card_took_to_the_byte(name: str) -> None:
    """In each step, with the stored workspace and with that of the formula."""
    (path,) = (path for path in FILES if name_of(path) == f"nvidia-h200/2.11.0-cu130/{name}.json.gz")
    golden = golden_file.read(path)
    assert [(row.allocated, row.inside) for row in numbers.rows_of(golden)] == [(0, True)] * 2


# That the comparison tells: a step whose bytes are known by hand


def test_a_right_file_passes(tmp_path: Path) -> None:
    row = accuracy.compared(write(tmp_path, gelu()))
    assert row.error == ""
    assert row.is_number
    assert (row.off("allocated"), row.off("reserved")) == (0, 0)
    assert row.inside
    assert accuracy.violations([row]) == []


@pytest.mark.parametrize(
    ("way", "factor"), [(("peaks", 2, 0), 0.98), (("peaks", 1, 1), 1.04), (("build", 1), 4), (("peaks", 0, 0), 0.97)]
)
def test_a_prediction_that_is_off_is_named(way: tuple[Any, ...], factor: float, tmp_path: Path) -> None:
    content: Any = gelu()
    before = functools.reduce(lambda value, key: value[key], way, content)
    row = accuracy.compared(write(tmp_path, changed(content, *way, to=int(before * factor))))
    (found,) = accuracy.violations([row])
    assert found.startswith("gelu on NVIDIA H200 with torch 2.13.0+cu130: allocated is ")
    assert not row.within()


@pytest.mark.parametrize("factor", [1.009, 0.992])
def test_a_prediction_within_the_limit_passes(factor: float, tmp_path: Path) -> None:
    content = changed(gelu(), "peaks", 0, 0, to=int(4 * TENSOR * factor))
    content = changed(content, "peaks", 0, 1, to=int(4 * TENSOR * max(factor, 1)))
    row = accuracy.compared(write(tmp_path, content))
    assert accuracy.violations([row]) == []
    assert row.off("allocated") == pytest.approx(1 / factor - 1, abs=1e-6)


def test_another_version_of_torch_may_differ_by_a_few_mebibytes(tmp_path: Path) -> None:
    span = tuple(golden_file.Peak(100 * MIB, 100 * MIB) for _ in range(4))
    prediction = accuracy.Prediction(span, span, span, "2.13.0")
    near = tuple(golden_file.Peak(102 * MIB, 102 * MIB) for _ in range(4))
    row = accuracy.Comparison("a", "zoo", "NVIDIA H200", "2.13.1", near, prediction)
    assert not row.within()
    assert accuracy.Comparison("a", "zoo", "NVIDIA H200", "2.11.0", near, prediction).within()


def test_the_events_replay_and_a_wrong_address_shows(tmp_path: Path) -> None:
    golden = golden_file.read(write(tmp_path, gelu()))
    replayed = replay(golden.snapshot())
    assert replayed.mismatches == []
    assert (replayed.peak_allocated, replayed.peak_reserved) == (5 * TENSOR, 5 * TENSOR)
    # the second step's output goes where its gradient had been put: best fit takes the lower of two
    wrong = gelu()
    places = wrong["events"]["places"]
    at = len("sasasasafa") + len("saff")
    places[at], places[at + 1] = places[at + 1], places[at]
    assert replay(golden_file.read(write(tmp_path, wrong)).snapshot()).mismatches != []


def test_a_step_of_another_card_or_name_is_an_error_of_its_row(tmp_path: Path) -> None:
    unknown = accuracy.compared(write(tmp_path, changed(gelu(), "gpu", "name", to="NVIDIA H2000")))
    assert "There is no card" in unknown.error
    other = accuracy.compared(write(tmp_path, changed(gelu(), "name", to="nosuch"), "nosuch"))
    assert other.error.startswith("LookupError: there is no step nosuch here")
    assert accuracy.violations([other]) == [f"nosuch: no prediction: {other.error}"]


def test_of_intervals_95_percent_have_to_hold() -> None:
    low = tuple(golden_file.Peak(100, 110) for _ in range(3))
    high = tuple(golden_file.Peak(200, 220) for _ in range(3))
    prediction = accuracy.Prediction(low, high, None, "2.13.0")

    def row(name: str, allocated: int, reserved: int) -> Any:
        measured = (*(golden_file.Peak(150, 160) for _ in range(2)), golden_file.Peak(allocated, reserved))
        return accuracy.Comparison(name, "zoo", "NVIDIA H200", "2.13.0", measured, prediction)

    inside = [row(f"in{number}", 100 + number, 110 + number) for number in range(19)]
    assert all(part.inside and not part.is_number for part in inside)
    outside = [row("under", 99, 120), row("over", 150, 221)]
    assert not any(part.inside for part in outside)
    assert accuracy.violations([*inside, outside[0]]) == []
    assert accuracy.violations([*inside, *outside]) == [
        "19 of 21 intervals hold what was measured; not those of under, over"
    ]
    assert accuracy.summary([*inside, *outside])["median_width"] == pytest.approx(100 / 150)


def convolution(taken: int, backward: int, calls: int = 1) -> dict[str, Any]:
    """A golden file of ``conv2d_1x1`` that says what its two ops took."""
    content = changed(gelu(), "name", to="conv2d_1x1")
    ops = {"aten.convolution.default": taken, "aten.convolution_backward.default": backward}
    content["workspaces"] = [[op, "", size, size, 0, 1, []] for op, size in ops.items()]
    content["calls"] = {op: [number] * calls for number, op in enumerate(ops)}
    return content


def test_measured_workspaces_make_a_number_of_an_interval(tmp_path: Path) -> None:
    def predicted(content: dict[str, Any]) -> Any:
        return accuracy.predict(golden_file.read(write(tmp_path, content, "conv2d_1x1")))

    none = predicted(convolution(0, 0))
    assert none.low != none.high
    assert none.best == none.low
    some = predicted(convolution(0, 3 * MIB))
    assert some.best[0].allocated == none.low[0].allocated + 3 * MIB  # the peak is in the backward
    assert predicted(convolution(0, 0, calls=2)).best is None


# Bad input


DAMAGED = {
    "format": (("format",), "other", "is no golden file"),
    "version": (("version",), 2, r"is of version 2\. Expected 1"),
    "name": (("name",), "relu", "it is of the step 'relu'"),
    "gpu": (("gpu",), None, "gpu is missing"),
    "steps": (("steps",), 2, "it has the peaks of 3 steps"),
    "peaks": (("peaks", 1), [9, 8], "a peak is"),
    "negative": (("build",), [-1, 8], "no numbers of 0"),
    "context": (("context",), "much", "the context is no number"),
    "letters": (("events", "actions"), "x" * 18, "an unknown kind 'x'"),
    "sizes": (("events", "sizes"), [1], "have 1 sizes"),
    "places": (("events", "places", 8), 5, "allocation 5 before, which is not live"),
    "twice": (("events", "places", 12), 2, "allocation 2 before, which is not live"),
    "unit": (("events", "unit"), 0, "less than a byte"),
    "streams": (("events", "streams"), [1], "have 1 streams"),
    "pools": (("events", "pools"), [1] * 18, "a pool that is not listed"),
    "segment": (("segments", 0), [1, 2], "not seven parts"),
    "block": (("segments", 0, 6), [[TENSOR, TENSOR + 1, 1]], "a block is"),
    "blocks": (("segments", 0, 6), [[TENSOR - 512, 0, 0]], "not as large as the segment"),
    "workspace": (("workspaces", 0), ["gelu", 1], "a workspace has not"),
    "calls": (("calls", "aten.gelu.default"), [7], "is of no row"),
    "environment": (("environment",), {"A": 1}, "is no text"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_refused(what: str, tmp_path: Path) -> None:
    way, value, message = DAMAGED[what]
    with pytest.raises(golden_file.GoldenError, match=message):
        golden_file.read(write(tmp_path, changed(gelu(), *way, to=value)))


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b\x08", b"{}", b"\x80\x04]."], ids=["empty", "cut", "json", "pickle"])
def test_what_is_no_golden_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "gelu.json.gz"
    path.write_bytes(data)
    with pytest.raises(golden_file.GoldenError, match=r"gelu\.json\.gz is no golden file"):
        golden_file.read(path)
    assert "is no golden file" in accuracy.compared(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, gelu())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(golden_file.GoldenError, match="damaged"):
        golden_file.read(path)


def test_a_file_without_events_says_why(tmp_path: Path) -> None:
    content = changed(changed(gelu(), "events", to=None), "segments", to=[])
    golden = golden_file.read(write(tmp_path, changed(content, "notes", to=["no events: out of disk"])))
    with pytest.raises(golden_file.GoldenError, match="out of disk"):
        golden.snapshot()


# The table


def test_the_table_says_what_is_measured(tmp_path: Path) -> None:
    assert accuracy.markdown([]).count(accuracy.NOT_YET) == 6
    row = accuracy.compared(write(tmp_path, gelu()))
    table = accuracy.markdown([row])
    assert "| gelu | 671,088,640 | 671,088,640 | +0.00% | 671,088,640 | 671,088,640 | +0.00% | yes |" in table
    assert "1 predicted as a number: allocated at most 0.00% off" in table


def test_the_docs_show_the_table_that_the_files_give() -> None:
    table = (ROOT / "benchmarks" / "results" / "cuda.md").read_text(encoding="utf-8")
    assert table.strip() in (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "benchmarks" / "results" / "cuda.json").read_text(encoding="utf-8"))
    names = sorted(path.name.removesuffix(".json.gz") for path in FILES)
    assert sorted(step["name"] for step in stored["steps"]) == names
    if not FILES:
        assert table == accuracy.markdown([])
