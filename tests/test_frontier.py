"""What benchmarks/fit_frontier.py makes of cases and results, on results made up: nothing is measured here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
cases = importlib.import_module("benchmarks.frontier.cases")
report = importlib.import_module("benchmarks.frontier.report")
frontier_peers = importlib.import_module("benchmarks.frontier.peers")
bench = importlib.import_module("benchmarks.fit_frontier")

MB = 1_000_000


def row(method: str, above: int, ratio: float, **more: Any) -> dict[str, Any]:
    """A result of ResNet-18, with 50 MB that are always there."""
    ours = {"given": (above + 50) * MB, "predicted": (above + 50) * MB, "lower_bound": 60 * MB, "fit_seconds": 1.0}
    return {
        "model": "resnet18", "mode": "fresh", "method": method, "budget": None, "resident": 50 * MB,
        "total": (above + 50) * MB, "above": above * MB, "ratio": ratio, "eager_seconds": 0.5,
        "quartiles": [ratio - 0.01, ratio + 0.01],
        "gradients_equal": method == "eager", "buffers_equal": True, "random_state_equal": True, "pairs": 5,
        "torch": "2.13", "threads": 2, **(ours if method.startswith("fit-") else {}), **more,
    }  # fmt: skip


WRONG = {"gradients": "wrong", "wrong": 3, "worst": 0.39, "worst_in": "fc.weight", "gradient_error": 0.2}
ROWS = [
    row("eager", 380, 1.0),
    row("per_block", 250, 1.3, gradients_equal=True),
    row("compile", 354, 0.8, gradients="right", gradient_error=1e-6),
    row("compile-0.9", 300, 0.9, gradients="right", gradient_error=1e-6),
    row("compile-0.8", 310, 0.95, gradients="right", gradient_error=1e-6),
    row("compile-0.5", 200, 0.7, **WRONG),
    row("autocast", 238, 0.5, gradients="lossy", gradient_error=0.01),
]


def test_a_method_says_engine_grade_and_budget() -> None:
    names = (
        "fit-floor",
        "fit-inductor-floor",
        "fit-inductor-compile-0.9",
        "fit-lossy-120MB",
        "fit-inductor-lossy-autocast",
    )
    made = [cases.Case("resnet18", "fresh", name) for name in names]
    assert [(case.engine, case.allow, case.beside) for case in made] == [
        ("graph", "exact", "floor"),
        ("inductor", "exact", "floor"),
        ("inductor", "exact", "compile-0.9"),
        ("graph", "lossy", "autocast-per_block"),
        ("inductor", "lossy", "autocast"),
    ]
    assert all(case.ours for case in made)


def test_budgets_are_the_peaks_of_compiled_peers_that_are_right_and_not_beaten() -> None:
    made = cases.compiled_cases("resnet18", "fresh", ROWS, 60 * MB)
    # 0.8 takes more bytes and more time than 0.9, 0.5 is wrong, and the rest are no compiled peers
    assert [(case.method, case.budget) for case in made] == [
        ("fit-inductor-compile", 404 * MB),
        ("fit-inductor-compile-0.9", 350 * MB),
    ]
    assert cases.compiled_cases("resnet18", "fresh", ROWS, 360 * MB) == made[:1]


def test_lossy_budgets_are_above_what_is_resident() -> None:
    made = {case.method: case.budget for case in cases.lossy_cases("resnet18", "fresh", ROWS)}
    assert made == {
        "fit-lossy-autocast": 288 * MB,
        "fit-lossy-120MB": 170 * MB,
        "fit-inductor-lossy-autocast": 288 * MB,
        "fit-inductor-lossy-120MB": 170 * MB,
    }


def test_a_lossy_plan_in_so_many_megabytes_stands_beside_the_lowest_lossy_peer() -> None:
    peer = row("autocast-per_block", 161, 0.63, gradients="lossy")
    ours = row("fit-lossy-120MB", 120, 0.64, beside={"ratio": 1.01, "quartiles": [0.99, 1.03]})
    (_, line) = report.lossy_targets([report.Frontier("resnet18", "fresh", [*ROWS, peer, ours])])
    assert line.endswith(
        "lossy: 120.0, -36%; autocast-per block 161.0, -37%, ours in 1.01 of its time; autocast 238.0, -50%."
    )
    names = [case.method for case in cases.peer_cases("resnet18", "update")]
    assert names == ["eager", "per_block", "autocast", "autocast-per_block"]
    assert "autocast" not in [case.method for case in cases.peer_cases("gpt", "update")]


def test_compiled_peers_change_no_budget_of_the_eager_engine() -> None:
    eager = [one for one in ROWS if one["method"] in ("eager", "per_block")]
    assert cases.fit_cases("resnet18", "fresh", ROWS, 0) == cases.fit_cases("resnet18", "fresh", eager, 0)


def test_wrong_gradients_are_marked_and_no_peer_to_beat() -> None:
    beside = {"ratio": 0.95, "quartiles": [0.9, 1.0]}
    ours = [row("fit-inductor-floor", 250, 1.2), row("fit-inductor-compile-0.9", 290, 0.88, beside=beside)]
    frontier = report.Frontier("resnet18", "fresh", [*ROWS, *ours])
    assert [one["method"] for one in frontier.compiled] == ["compile-0.9", "compile-0.8", "compile"]
    assert [one["method"] for one in frontier.peers] == ["per_block", "eager"]
    text = "\n".join(report.full([frontier]))
    wrong = "0.700 [0.690, 0.710] |  | **wrong gradients** (39% in fc.weight) |"
    assert f"| fresh | compile-0.5 |  | 250.0 | 200.0 |  | {wrong}" in text
    summary = (
        "| ResNet-18, batch 16, 224² | 354.0, -20% | - | 354.0, -20% | - | 300.0, -10% | 290.0, -12%, 0.95 of its time "
        "| 250.0, +20% | 1 of 4, up to 39% |"
    )
    assert summary in text
    assert not [said for said in frontier.complaints() if "compiled floor" in said]  # 200 MB are not to be beaten
    worse = report.Frontier("resnet18", "fresh", [*ROWS, row("fit-inductor-floor", 300, 1.2)])
    assert [said for said in worse.complaints() if "the compiled floor is not below" in said]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"given": 100 * MB}, "bytes measured"),
        ({"predicted": 400 * MB}, "the predicted peak is +14.29% off"),
        (WRONG, "gradients are wrong (39.0% in fc.weight)"),
        ({"beside": {"ratio": 1.1, "quartiles": [1.05, 1.2]}}, "1.10 times as long as that peer"),
    ],
)
def test_where_a_compiled_plan_falls_short(more: dict[str, Any], said: str) -> None:
    good = row("fit-inductor-compile-0.9", 300, 0.9, beside={"ratio": 1.0, "quartiles": [0.97, 1.02]})
    assert not report.Frontier("resnet18", "fresh", [good])._complaints_of_inductor()
    (found,) = report.Frontier("resnet18", "fresh", [good | more])._complaints_of_inductor()
    assert said in found


def test_a_result_of_each_kind_has_its_place_in_the_chart() -> None:
    pytest.importorskip("matplotlib")
    picture = importlib.import_module("benchmarks.frontier.picture")
    ours = [row(name, 100, 1.0) for name in ("fit-floor", "fit-inductor-floor", "fit-inductor-lossy-autocast")]
    rows = [*ROWS, row("compile-per_block", 210, 1.0), *ours]
    kinds = {one["method"]: picture.kind(one) for one in rows}
    assert set(kinds.values()) <= set(picture.LOOKS)
    assert kinds["compile-0.5"] == "wrong gradients"
    assert (kinds["fit-inductor-floor"], kinds["fit-inductor-lossy-autocast"]) == (
        "memplan.fit, inductor",
        "memplan.fit, lossy",
    )


def test_the_stored_results_are_read_and_the_report_is_made_of_them(tmp_path: Path) -> None:
    shards = cases.Shards(ROOT / "benchmarks" / "results" / "fit_frontier")
    found = report.frontiers(shards)
    assert len(found) >= 9
    stored = (ROOT / "benchmarks" / "results" / "fit_frontier_short.md").read_text(encoding="utf-8")
    shown = "\n".join([*report.short(found), ""])
    assert [line for line in shown.splitlines() if line.startswith("|")] == [
        line for line in stored.splitlines() if line.startswith("|")
    ]


def test_a_grade_that_is_refused_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def measured(self: Any, case: Any) -> dict[str, Any]:
        asked.append(case.method)
        return {"error": "refused: allow='lossy'"} if case.allow == "lossy" else row(case.method, 100, 1.0)

    monkeypatch.setattr(bench.Bench, "_measured", measured)
    made = bench.Bench(cases.Shards(tmp_path), quick=False, again=None, methods=["fit-lossy-*", "fit-floor"])
    made.ours("resnet18", "fresh", ROWS)
    assert asked == ["fit-floor", "fit-lossy-autocast"]
    assert [one["error"] for one in made.shards.failed("resnet18")] == ["refused: allow='lossy'"] * 2
