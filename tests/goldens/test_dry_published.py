"""The dry card beside real histories and published figures, and predictions of convolutional networks beside it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import goldens.histories as histories
import pytest
from cudnn.scripted_worker import needs_compiler
from environment import ENVIRONMENT, needs_cuda_torch
from goldens.handmade import ROOT  # noqa: F401  # says where the scripts lie

dry_published: Any = importlib.import_module("dry_published")  # of benchmarks/
figures: Any = importlib.import_module("published_figures")
convolutions: Any = importlib.import_module("published_convolutions")
REPORTS = {f"{one.issue}, {one.name}, {one.measure}": one for one in convolutions.REPORTS}
ROWS = {dry_published.key_of(row): row for row in figures.rows()}
QUICK = ("123533, conv2d, width 1152, reserved", "95024, conv3d, 361, peak", "95024, conv3d, 362, refused")
QUICK_PEAKS = ("layer_norm width 16384", "gated_mlp batch 4 activation silu tokens 1024")
NEAR = 0.01

needs_histories = pytest.mark.skipif(not histories.DATA.is_dir(), reason="the real snapshots are not here")


def slow_beside(names: Any, *quick: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@needs_cuda_torch
@needs_histories
@pytest.mark.parametrize("name", slow_beside(histories.STEPS, "ctx128_forward"))
def test_every_event_of_a_real_history_in_order(name: str) -> None:
    found = dry_published.history(name, ENVIRONMENT)
    assert found["recorded"] == {"ctx128_forward": 3213, "ctx256_fullstep": 12_663}[name]
    assert found["equal"] == found["recorded"] == found["events"]


@needs_cuda_torch
@pytest.mark.parametrize("name", slow_beside(REPORTS, *QUICK))
def test_a_reported_figure_of_a_convolution(name: str) -> None:
    found = dry_published.convolution(REPORTS[name], ENVIRONMENT)
    assert found["exact"] or dry_published.why_not(found), found


@needs_cuda_torch
@pytest.mark.parametrize("name", slow_beside(ROWS, *(f"{name}, NVIDIA A100-SXM4-80GB" for name in QUICK_PEAKS)))
def test_a_published_peak(name: str) -> None:
    found = dry_published.peak(ROWS[name], ENVIRONMENT)
    if "error" in found:
        assert "clocks" in found["error"], found
    else:
        assert found["exact"] or dry_published.why_not(found), found


@needs_cuda_torch
@needs_compiler
@pytest.mark.parametrize("name", slow_beside(dry_published.NETWORKS, "unet3d"))
def test_a_convolutional_network_is_predicted_as_one_number(name: str) -> None:
    found = dry_published.network(name, "a100", ENVIRONMENT)
    low, high = found["predicted"]
    assert low == high
    assert low == pytest.approx(found["found"], rel=NEAR)
    assert found["without_cudnn"][0] != found["without_cudnn"][1]


# Without an emulated card


def test_a_figure_is_met_as_it_was_printed() -> None:
    report = convolutions.Report(1, "a", 4.02, 1 << 30, 2, "peak", list)
    assert report.matches(int(4.0249 * (1 << 30)))
    assert not report.matches(int(4.0251 * (1 << 30)))
    exact = replace(report, figure=12.874233344, unit=10**9, digits=9)
    assert exact.matches(12_874_233_344 + 512)
    assert not exact.matches(12_874_233_344 + 513)


def test_what_reports_asked_of_a_kernel_that_unfolds() -> None:
    """27 neighbors of each voxel of the result: worked out from the sizes in the reports."""
    asked = {report.name: report.figure * 2**30 for report in convolutions.REPORTS if report.measure == "refused"}
    by_hand = {
        "conv3d, 362": 64 * 27 * 362 * 370 * 251 * 2,
        "conv3d, depth 5": 256 * 27 * 3 * 1088 * 1920 * 4,
        "conv3d under autocast, 256": 128 * 27 * 256**3 * 2,
    }
    assert asked == pytest.approx(by_hand, abs=0.005 * 2**30)


def test_the_stored_results_are_of_the_rows() -> None:
    stored = dry_published.stored()
    assert [one["row"] for one in stored["convolutions"]] == [f"{one.name}, {one.measure}" for one in REPORTS.values()]
    assert [one["row"] for one in stored["networks"]] == list(dry_published.NETWORKS)
    assert {one["row"] for one in stored["peaks"]} <= set(ROWS)
    text = (dry_published.RESULTS / "dry_published.md").read_text(encoding="utf-8")
    assert text == f"{dry_published.short(stored)}\n{dry_published.misses(stored)}"


def test_the_stored_results_are_met_where_nothing_is_known_against_it() -> None:
    stored = dry_published.stored()
    exact = [one for one in stored["convolutions"] if one["exact"]]
    assert len(exact) >= 15
    assert {one["source"].rsplit("/", 1)[1] for one in exact} == {"95024", "123533", "128947", "136479"}
    rows = [*stored["peaks"], *stored["convolutions"]]
    assert [one["row"] for one in rows if not one.get("exact") and not dry_published.why_not(one)] == []
    for one in stored["networks"]:
        low, high = one["predicted"]
        assert low == high
        assert low == pytest.approx(one["found"], rel=NEAR)
