"""cuDNN's answers for a described card beside what the real one took: the stored results, and how they are made."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from cudnn.scripted_worker import needs_compiler
from environment import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT

from memplan.cudnn.cudnn_library import find_cudnn

golden_file = importlib.import_module("golden_file")  # of benchmarks/, as the next; handmade.py says where
accuracy = importlib.import_module("cudnn_accuracy")

REAL = ROOT / "goldens" / "nvidia-h100-80gb-hbm3" / "2.11.0-cu130"
EMULATED = ROOT / "goldens" / "dry" / "nvidia-h100-sxm5-80-gb" / "2.11.0-cu130"


@functools.cache
def stored() -> list[Any]:
    content = json.loads((accuracy.RESULTS / "cudnn.json").read_text(encoding="utf-8"))
    return [accuracy.Row(**row) for row in content["convolutions"]]


@functools.cache
def calls(path: Path) -> dict[tuple[str, str], Any]:
    """What each op of a golden file took by itself, measured apart from the events."""
    return {(row.op, row.key): row for row in golden_file.read(path).workspaces}


def by_itself(folder: Path, row: Any) -> Any:
    op = "aten.convolution.default" if row.kind == "forward" else "aten.convolution_backward.default"
    return calls(folder / f"{row.step}.json.gz").get((op, row.key))


@pytest.mark.parametrize(("folder", "field"), [(REAL, "took"), (EMULATED, "said")])
def test_a_forward_pass_takes_what_was_measured_of_the_op_by_itself(folder: Path, field: str) -> None:
    """On the real card; and where torch itself asked cuDNN, on the emulated one."""
    rows = [(row, by_itself(folder, row)) for row in stored() if row.kind == "forward"]
    known = [(row, call) for row, call in rows if call is not None]
    assert len(known) > 280
    assert [(row, call.most) for row, call in known if getattr(row, field) != max(0, call.most)] == []


@pytest.mark.parametrize(("folder", "field"), [(REAL, "took"), (EMULATED, "said")])
def test_both_gradients_take_what_was_measured_of_the_op_by_itself(folder: Path, field: str) -> None:
    """Its peak: the input's gradient and a workspace, or both gradients and the other workspace.

    Where there is a bias, the sums for its gradient can take more.
    """
    pairs: dict[str, dict[str, Any]] = {}
    for row in stored():
        pairs.setdefault(row.key, {})[row.kind] = row
    compared = 0
    for of in pairs.values():
        if len(of) < 2 or not next(iter(of.values())).key.endswith("[True,True,False]"):
            continue
        one, other = (getattr(of[kind], field) for kind in ("input gradient", "weight gradient"))
        call = by_itself(folder, of["input gradient"])
        if call is None:
            continue
        data, weight = call.results[:2]
        assert max(data + one, data + weight + other) - (data + weight) == call.most, of
        compared += 1
    assert compared > 140


CALL = golden_file.Workspace("aten.convolution_backward.default", "", 90, 90, 0, 1, (100, 10, 1))


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([(100, False), (50, True), (10, False), (91, True), (1, False)], (5, [50, 91])),
        ([(100, False), (10, False), (91, True), (1, False)], (4, [0, 91])),
        ([(100, False), (201, False), (100, False), (10, False), (91, True), (1, False)], (6, [0, 91])),
        ([(100, False), (101, True), (10, False), (1, False)], (4, [101, 0])),
        ([(100, False), (50, True), (10, False), (80, True), (1, False)], None),  # the op by itself took more
        ([(100, False), (50, True), (10, False), (91, True)], None),
    ],
)
def test_workspaces_are_told_apart_by_the_results_around_them(events: Any, found: Any) -> None:
    assert accuracy.taken(events, 0, [100, None, 10, None, 1], CALL) == found


def test_the_table_counts_the_rows() -> None:
    key = "f32[1,8,9,9] f32[8,8,3,3] - [1,1] [1,1] [1,1] False [0,0] 1"
    one = "bf16[1,8,9,9]/648,1,72,8 bf16[8,8,1,1] - [1,1] [0,0] [1,1] False [0,0] 1"
    rows = [accuracy.Row("forward", key, "a", "eng0", said, took) for said, took in ((0, 0), (513, 1024), (0, 2048))]
    rows += [accuracy.Row("forward", one, "a", "eng0", 512, 1)]
    lines = accuracy.table(rows).splitlines()[2:]
    assert lines == [
        "| forward, larger kernel | float32 | 3 | 2 | 1, 2.0 KiB | - |",
        "| forward, kernel of 1 | bfloat16, channels last | 1 | 1 | - | - |",
    ]
    assert accuracy.sentence(rows).startswith(
        "As named: forward 2 of 3 with larger kernels, 1 of 1 with a kernel of 1;"
    )


def test_what_the_docs_show_is_of_the_stored_rows() -> None:
    text = (accuracy.RESULTS / "cudnn.md").read_text(encoding="utf-8")
    assert text == f"{accuracy.sentence(stored())}\n{accuracy.table(stored())}"
    assert text.strip() in (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")


@needs_cuda_torch
@needs_compiler
@pytest.mark.parametrize("name", ["conv2d_1x1", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_the_stored_rows_are_what_cudnn_says(name: str) -> None:
    golden = golden_file.read(REAL / f"{name}.json.gz")
    library = find_cudnn(ENVIRONMENT)
    if library is None or library.version != golden.versions["cudnn"]:
        pytest.skip("another version of cuDNN")
    found = {(row.kind, row.key): row for row in accuracy.rows_of(golden, ENVIRONMENT)}
    known = {(row.kind, row.key): row for row in stored()}
    assert {(*key, row.said, row.took) for key, row in found.items()} == {
        (*key, known[key].said, known[key].took) for key in found
    }


def test_what_the_docs_say_of_the_rows_in_words() -> None:
    def share(rows: list[Any], *, holds: Any) -> float:
        return sum(holds(row) for row in rows) / len(rows)

    large = [row for row in stored() if not row.pointwise and row.kind != "weight gradient"]
    weights = [row for row in stored() if not row.pointwise and row.kind == "weight gradient"]
    assert share(large, holds=lambda row: row.equal) > 0.9
    assert share([row for row in stored() if row.pointwise], holds=lambda row: row.took < row.said) > 0.5
    assert 0.1 < share(weights, holds=lambda row: row.took > row.said and not row.equal) < 0.3
