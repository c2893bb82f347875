"""Where cuDNN plans another engine at the peak: rows whose plans are known, and a sweep with a worker that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cudnn.scripted_worker import NOWHERE, needs_compiler, write_script
from torch import nn

import memplan
from memplan.cudnn import worker_process
from memplan.studies.axes.axes import Batch
from memplan.studies.sweeps.engine_changes import engine_changes_of
from memplan.studies.sweeps.points import PlannedWorkspace
from memplan.trace.recording import session

MIB = 1 << 20


def changes(*plans: tuple[str, int], peak: int = 100 * MIB, at_peak: bool = True, axis: Any = None) -> list[Any]:
    """Of batches 1, 2, 4 and so on, each with one convolution that is planned so."""
    axis = axis or Batch()
    rows = [{axis.name: 1 << number, "status": "ok", "peak": peak} for number in range(len(plans))]
    planned = [(PlannedWorkspace("conv3d", engine, size, at_peak),) for engine, size in plans]
    return engine_changes_of([axis], rows, planned)


def test_the_points_on_both_sides_are_named_with_engine_and_workspace() -> None:
    (found,) = changes(("eng0", 10 * MIB), ("eng0", 20 * MIB), ("eng28", 0))
    assert (found.between, found.engines, found.workspaces) == ((2, 4), ("eng0", "eng28"), (20 * MIB, 0))
    assert str(found) == ("batch: at 4 cuDNN plans eng28 with 0 B of workspace for conv3d, at 2 eng0 with 20.0 MiB")


@pytest.mark.parametrize(
    "plans",
    [
        (("eng0", 10 * MIB), ("eng0", 100 * MIB)),  # the same engine
        (("eng0", 10 * MIB), ("eng1", 20 * MIB)),  # as the batch grows
        (("eng0", 10 * MIB), ("eng1", 29 * MIB)),  # by less than a factor beside that
        (("eng0", 4 * MIB), ("eng1", 0)),  # less than a twentieth of the peak
    ],
)
def test_other_changes_are_not_named(plans: Any) -> None:
    assert changes(*plans) == []
    assert changes(("eng0", 10 * MIB), ("eng1", 30 * MIB)) != []


def test_only_what_is_allocated_at_the_peak_is_named() -> None:
    assert changes(("eng0", 20 * MIB), ("eng28", 0), at_peak=False) == []


def test_points_of_other_convolutions_are_not_compared() -> None:
    rows = [{"batch": number, "status": "ok", "peak": MIB} for number in (1, 2)]
    one, other = (PlannedWorkspace(op, engine, MIB, True) for op, engine in (("conv2d", "eng0"), ("conv3d", "eng1")))
    assert engine_changes_of([Batch()], rows, [(one,), (other,)]) == []
    assert engine_changes_of([Batch()], rows, [(one,), ()]) == []


PLANS = """
    size = 64 << 20
    say({'plans': [['eng0', size], ['eng28', 0]] if question['x'][2] < 12 else [['eng28', 0]]})
"""


@needs_compiler
def test_a_sweep_says_where_a_smaller_input_takes_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(session, "find_cudnn", lambda environment: None if environment is False else NOWHERE)
    monkeypatch.setattr(worker_process, "SCRIPT", write_script(tmp_path, PLANS))
    swept = memplan.sweep(
        lambda: nn.Conv3d(8, 8, 3).requires_grad_(False),
        {"size": "10,11,12"},
        "1x8x10x10x10",
        device="h100",
        train=False,
        jobs=1,
    )
    (found,) = swept.engine_changes
    assert (found.between, found.workspaces) == ((11, 12), (64 * MIB, 0))
    said = " ".join(str(swept).split())
    assert "size: at 12 cuDNN plans eng28 with 0 B of workspace for conv3d of Conv3d, at 11 eng0 with 64.0 MiB" in said
    assert memplan.Sweep.from_json(swept.to_json()) == swept
    assert not any("largest workspace" in note for note in swept.notes), "another at each point"
    peaks = [row["peak"] for row in swept.rows]
    assert peaks[1] > 64 * MIB > peaks[2]
