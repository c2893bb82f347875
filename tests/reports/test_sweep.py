"""A sweep's table, remarks and picture."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

import memplan
from memplan._bytes import format_bytes
from memplan.errors import InputError
from memplan.reports.chart import check_drawable, picture
from memplan.reports.sweep import draw, report
from memplan.reports.terminal import text_of
from memplan.studies.sweeps.engine_changes import EngineChange
from memplan.studies.sweeps.sweep import Sweep


def convolutions(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2, 1))


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return memplan.sweep(
        convolutions, {"batch": [1, 2, 4], "0.in_channels": [3, 2]}, "1x3x32x32", device="t4", cudnn=False, jobs=1
    )


def printed(sweep: Sweep) -> str:
    return text_of(report(sweep))


def test_a_row_for_each_point_and_each_reason_once(swept: Sweep) -> None:
    text = printed(swept)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("failed") == 3
    flat = " ".join(text.split())
    assert "Failed at batch 4, 0.in_channels 2: step 1 raised RuntimeError" in flat
    alike = dataclasses.replace(swept, rows=[row | {"reason": "no"} for row in swept.rows])
    assert "Failed at batch 1, 0.in_channels 2; batch 2, 0.in_channels 2; batch 4, 0.in_channels 2: no." in " ".join(
        printed(alike).split()
    )
    assert "- batch (0.in_channels 3), 1 to 4: fixed" in flat
    assert "Workspaces: from none to the largest" in flat


def test_the_peak_is_in_its_row(swept: Sweep) -> None:
    peaks = [
        memplan.explain(convolutions, f"{n}x3x32x32", device="t4", cudnn=False).timeline.peak_allocated
        for n in (1, 2, 4)
    ]
    rows = [line.split() for line in printed(swept).splitlines() if line.split()[1:2] == ["3"]]
    assert [" ".join(row[2:4]) for row in rows] == [f"{peak / 1024:.1f} KiB" for peak in peaks]


def test_fragments_are_what_is_reserved_beyond_the_peak(swept: Sweep) -> None:
    timelines = [memplan.explain(convolutions, f"{n}x3x32x32", device="t4", cudnn=False).timeline for n in (1, 2, 4)]
    beyond = [one.peak_reserved - one.peak_allocated for one in timelines]
    lines = printed(swept).splitlines()
    assert "fragments" in " ".join(lines)
    rows = [line for line in lines if line.split()[1:2] == ["3"]]
    assert [row.split()[-2:] for row in rows] == [format_bytes(size).split() for size in beyond]


def test_an_interrupted_sweep_says_so(swept: Sweep) -> None:
    part = dataclasses.replace(swept, rows=swept.rows[:2])
    assert "Interrupted: 4 of 6 points were not recorded." in printed(part)
    assert part.interrupted
    assert not swept.interrupted


def test_where_cudnn_plans_another_engine_has_a_section_of_its_own(swept: Sweep) -> None:
    change = EngineChange("batch", {"0.in_channels": 3}, (1, 2), "conv2d of 0", ("eng0", "eng28"), (3 << 20, 0))
    assert "Engines" not in printed(swept)
    text = " ".join(printed(dataclasses.replace(swept, engine_changes=(change,))).split())
    assert (
        "Engines - batch (0.in_channels 3): at 2 cuDNN plans eng28 with 0 B of workspace for conv2d of 0, at 1 eng0 "
        "with 3.0 MiB"
    ) in text


def test_json_is_the_same_text_for_the_same_points(swept: Sweep) -> None:
    assert json.loads(swept.to_json()) == swept.to_dict()


def test_bars_are_as_high_as_the_peaks(swept: Sweep) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(swept)
    (place, *_) = [one for one in figure.axes if one.get_visible()]
    heights = [bar.get_y() + bar.get_height() for bars in place.containers[-1:] for bar in bars]
    peaks = [row["peak_high"] / 1024 for row in swept.rows if row["status"] == "ok"]
    assert heights == pytest.approx(peaks)
    assert picture(lambda: draw(swept), "a.png") == picture(lambda: draw(swept), "a.png")


def test_only_pictures_can_be_drawn() -> None:
    with pytest.raises(InputError, match=r"--chart a\.txt"):
        check_drawable("a.txt", "--chart")
