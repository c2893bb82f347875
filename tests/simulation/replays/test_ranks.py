"""Snapshots of several ranks: the one that holds more, and the line that does, as the snapshots were written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from simulation.histories import MIB, A, B, C, block, event, frame, freed, out_of_memory, segment
from torch import nn

import memplan
from memplan.cli import main
from memplan.errors import FormatError, InputError, SnapshotFormatError, TargetError
from memplan.reports.rank_snapshots import finding

TORCH = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 3, "forward")


def line(number: int, name: str) -> list[dict[str, Any]]:
    return [TORCH, frame("/home/me/train.py", number, name)]


def step(weights: int = 40, activations: int = 60, kept: int = 0, *, history: bool = True) -> dict[str, Any]:
    """Weights and what is kept stay, activations are freed; each in a segment of its own, sizes in MiB."""
    trace: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    for address, size, frames in ((A, weights, line(3, "build")), (B, kept, line(20, "evaluate"))):
        if size:
            trace += [event("segment_alloc", address, size * MIB), event("alloc", address, size * MIB, frames=frames)]
            segments.append(segment(address, block(size * MIB, "active_allocated", frames=frames)))
    frames = line(9, "step")
    trace += [event("segment_alloc", C, activations * MIB), event("alloc", C, activations * MIB, frames=frames)]
    trace += freed(C, activations * MIB)
    segments.append(segment(C, block(activations * MIB)))
    return {"segments": segments, "device_traces": [trace] if history else [[]], "allocator_settings": {}}


def written(folder: Path, *snapshots: dict[str, Any], name: str = "rank{}_memory_snapshot.pickle") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, snapshot in enumerate(snapshots):
        (folder / name.format(rank)).write_bytes(pickle.dumps(snapshot))
    return folder


def test_the_odd_rank_comes_first_with_its_line(tmp_path: Path) -> None:
    found = memplan.replay_ranks(written(tmp_path / "s", step(), step(), step(), step(kept=100)))
    assert found.at_peak
    assert [row.rank for row in found.rows] == [3, 0, 1, 2]
    assert [row.allocated for row in found.rows] == [200 * MIB, 100 * MIB, 100 * MIB, 100 * MIB]
    (odd,) = found.odd
    assert odd.beyond == 100 * MIB
    assert finding(odd) == (
        "rank 3 holds 100.00 MiB more than the others: 100.00 MiB of it from /home/me/train.py:20 evaluate"
    )
    assert finding(odd) in " ".join(str(found).split())


def test_what_is_freed_by_the_end_counts_at_the_peak(tmp_path: Path) -> None:
    found = memplan.replay_ranks(written(tmp_path / "s", step(), step(weights=30, activations=90), step()))
    (odd,) = found.odd
    assert (odd.rank, odd.allocated, odd.beyond) == (1, 120 * MIB, 20 * MIB)
    assert [(row.frame.line, row.bytes, row.beyond) for row in odd.owners if row.frame] == [
        (9, 90 * MIB, 30 * MIB), (3, 30 * MIB, -10 * MIB),
    ]  # fmt: skip


def test_without_histories_what_is_held_at_the_end_is_compared(tmp_path: Path) -> None:
    snapshots = step(), step(activations=90), step(kept=30, history=False)
    found = memplan.replay_ranks(written(tmp_path / "s", *snapshots))
    assert not found.at_peak
    assert [(row.rank, row.allocated) for row in found.rows] == [(2, 70 * MIB), (0, 40 * MIB), (1, 40 * MIB)]
    assert [row.rank for row in found.odd] == [2]
    assert "events" in found.notes[0]


def test_equal_ranks_have_no_odd_one(tmp_path: Path) -> None:
    found = memplan.replay_ranks(written(tmp_path / "s", step(), step()))
    assert found.odd == ()
    assert "No rank holds much more than the others" in str(found)


def test_of_two_ranks_the_larger_is_odd(tmp_path: Path) -> None:
    assert [row.rank for row in memplan.replay_ranks(written(tmp_path / "s", step(), step(kept=50))).odd] == [1]


def test_snapshots_of_recorded_ranks(tmp_path: Path) -> None:
    """Rank 2 keeps 64 MiB that the others do not."""

    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        model = nn.Linear(512, 512).cuda()
        kept = [torch.zeros(64 << 18, device="cuda")] if dist.get_rank() == 2 else []

        def step() -> None:
            model(torch.ones(64, 512, device="cuda") + len(kept)).sum().backward()

        return step

    for rank in range(3):
        trace = memplan.record(build, device="h100", world=3, rank=rank)
        timeline = memplan.simulate(trace)
        from memplan.simulation.snapshots.write import frames_of, write_snapshot

        write_snapshot(tmp_path / f"rank{rank}.pickle", timeline, frames_of(trace), trace=trace)
    found = memplan.replay_ranks([tmp_path / f"rank{rank}.pickle" for rank in range(3)])
    (odd,) = found.odd
    assert (odd.rank, odd.beyond) == (2, 64 * MIB)
    assert odd.owners[0].beyond == 64 * MIB
    assert odd.owners[0].frame is not None
    assert odd.owners[0].frame.filename.endswith("test_ranks.py")


def test_the_rank_is_that_of_the_gpu_where_names_have_none(tmp_path: Path) -> None:
    snapshots = []
    for gpu in range(2):
        snapshot = step(kept=30 * gpu)
        for row in snapshot["segments"]:
            row["device"] = gpu
        snapshot["device_traces"] = [[]] * gpu + snapshot["device_traces"]
        snapshots.append(snapshot)
    found = memplan.replay_ranks(written(tmp_path / "s", *snapshots, name="host{}.pickle"))
    assert [row.rank for row in found.odd] == [1]
    for name in ("a.pickle", "b.pickle"):
        (tmp_path / name).write_bytes(pickle.dumps(step()))
    with pytest.raises(InputError, match=r"both of rank 0 \(of their GPUs"):
        memplan.replay_ranks([tmp_path / "a.pickle", tmp_path / "b.pickle"])


def test_saved_and_loaded(tmp_path: Path) -> None:
    found = memplan.replay_ranks(written(tmp_path / "s", step(), step(kept=50)))
    found.save(tmp_path / "out.json")
    assert memplan.RankSnapshots.load(tmp_path / "out.json") == found
    with pytest.raises(FormatError):
        memplan.RankSnapshots.from_dict(json.loads(found.to_json()) | {"rows": []})


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, args)])


def test_the_command_takes_files_or_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = written(tmp_path / "s", step(), step(), step(kept=50))
    result = run(folder, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "rank 2 holds 50.00 MiB more than the others" in " ".join(result.stdout.split())
    assert "Rank 2 holds 50.00 MiB more" in (tmp_path / "out.html").read_text()
    again = run(folder / "rank0_memory_snapshot.pickle", folder / "rank1_memory_snapshot.pickle")
    assert again.exit_code == 0, again.output
    assert run(folder, "--capacity", "1GiB").exit_code == 2


def test_ranks_that_ran_out_of_memory(tmp_path: Path) -> None:
    found = memplan.replay_ranks(written(tmp_path / "s", out_of_memory(), out_of_memory(), step(kept=200)))
    assert [row.rank for row in found.odd] == [2]


def test_two_of_a_rank_and_other_steps_and_no_snapshots_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "s", step(), step())
    (folder / "rank1_again.pickle").write_bytes(pickle.dumps(step()))
    with pytest.raises(InputError, match=r"both of rank 1\. Expected one snapshot for each rank"):
        memplan.replay_ranks(folder)
    for number in (10, 20):
        written(tmp_path / f"iteration_{number}", step(), step())
    files = [tmp_path / "iteration_10" / "rank0_memory_snapshot.pickle"]
    files.append(tmp_path / "iteration_20" / "rank1_memory_snapshot.pickle")
    with pytest.raises(InputError, match=r"of step 10 and .* of step 20"):
        memplan.replay_ranks(files)
    (folder / "rank1_again.pickle").write_bytes(b"no snapshot")
    with pytest.raises(SnapshotFormatError, match=r"rank1_again\.pickle"):
        memplan.replay_ranks(folder)
    with pytest.raises(InputError, match="1 snapshot"):
        memplan.replay_ranks(folder / "rank0_memory_snapshot.pickle")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="no snapshot"):
        memplan.replay_ranks(tmp_path / "empty")
    with pytest.raises(TargetError, match="cannot be read"):
        memplan.replay_ranks([folder / "rank0_memory_snapshot.pickle", folder / "rank9.pickle"])
