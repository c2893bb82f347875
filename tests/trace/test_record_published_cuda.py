"""Predictions for CUDA beside peaks that others measured and published: those of benchmarks/published_figures.py."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.append(str(ROOT / "benchmarks"))

published = importlib.import_module("published_cuda")
figures = importlib.import_module("published_figures")

MIB = 2**20


@pytest.fixture(autouse=True)
def _workspaces_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured: nothing had set the sizes of cuBLAS's workspaces, as importing MONAI does."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # what 2.12 to 2.14 do by themselves: a workspace is kept once taken, and cuBLASLt works in that of cuBLAS
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")


def _ends() -> list[Any]:
    """Of each series the smallest and the largest step: the sizes between take no other way."""
    chosen = []
    for series in figures.SERIES:
        of_series = [row for row in figures.rows() if row.series is series]
        chosen += [of_series[0], *of_series[1:][-1:]]
    return chosen


def _params() -> list[Any]:
    off = [row for row in figures.rows() if row.name in figures.KNOWN]
    rows = [row for row in _ends() if row not in off]
    largest = [
        row for row, after in zip(rows, [*rows[1:], None], strict=True) if not after or after.series is not row.series
    ]
    near = [
        pytest.param(
            row, id=f"{row.name} on {row.series.card}", marks=[] if row in largest[::2] else [pytest.mark.slow]
        )
        for row in rows
    ]
    return near + [
        pytest.param(row, id=row.name, marks=pytest.mark.xfail(reason=figures.KNOWN[row.name], strict=True))
        for row in off
    ]


@pytest.mark.parametrize("row", _params())
def test_within_one_percent_of_what_was_published(row: Any) -> None:
    result = published.predict(row)
    assert result.low == pytest.approx(row.published, rel=0.01)
    assert result.high == pytest.approx(row.published, rel=0.01)


@pytest.mark.parametrize(
    ("step", "size", "card", "mebibytes"),
    [
        ("cross_entropy", {"vocabulary": 4096}, "a100", 1280.126),
        ("cross_entropy", {"vocabulary": 131072}, "a100", 40960.125),
        ("gated_mlp", {"batch": 4, "tokens": 1024, "activation": "silu"}, "a100", 1294.25),
        ("gated_mlp", {"batch": 4, "tokens": 1024, "activation": "silu"}, "h100", 1294.25 + 2 * (32 - 8.125)),
    ],
)
def test_exact_where_nothing_but_the_step_was_on_the_card(
    step: str, size: dict[str, int], card: str, mebibytes: float
) -> None:
    """The figures of the first series; on an H100 each of the two workspaces is 32 MiB instead of 8.125."""
    memplan = importlib.import_module("memplan")
    trace = memplan.record(published.STEPS[step](**size), device=card, steps=3)
    assert memplan.simulate(trace).steps[-1].peak_allocated / MIB == pytest.approx(mebibytes, abs=0.002)


def test_every_row_is_told_apart_and_says_where_it_was_published() -> None:
    rows = figures.rows()
    assert len({(row.name, row.series.card, row.series.date) for row in rows}) == len(rows)
    assert all(row.series.step in published.STEPS for row in rows)
    assert all(row.series.source.address.startswith("https://github.com/") and row.series.date for row in rows)
    assert all(row.series.note for row in rows if row.series.held or row.series.increase)
    assert set(figures.KNOWN) <= {row.name for row in rows}


def test_a_row_of_increases_leaves_out_what_was_held_before() -> None:
    row = next(row for row in figures.rows() if row.series.step == "orpo" and row.size == 4)
    assert row.published == 12184.330078125 - 8645.314453125
