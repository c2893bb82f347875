"""`memplan replay` as a user runs it: what it prints and writes, its exit codes, its one line for every mistake."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from simulation.histories import MIB, REAL, A, block, event, out_of_memory, segment

from memplan.cli import main


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, args)])


@pytest.fixture
def oom(tmp_path: Path) -> Path:
    file = tmp_path / "oom.pickle"
    file.write_bytes(pickle.dumps(out_of_memory()))
    return file


def fine(tmp_path: Path, **more: Any) -> Path:
    data = {"segments": [segment(A, block(20 * MIB, "active_allocated"))],
            "device_traces": [[event("segment_alloc", A, 20 * MIB), event("alloc", A, 20 * MIB)]], **more}  # fmt: skip
    file = tmp_path / "fine.json.gz"
    file.write_bytes(gzip.compress(json.dumps(data).encode()))
    return file


def test_a_recording_without_trouble(tmp_path: Path) -> None:
    result = run(fine(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Replayed: every address and every segment as recorded." in result.stdout


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 1),
        (["--settings", "expandable_segments:True"], 0),
        (["--settings", "max_split_size_mb:64"], 1),
        (["--settings", "max_split_size_mb:64", "--settings", "expandable_segments:True"], 0),
        (["--capacity", "136MiB"], 0),
        (["--capacity", "135MiB"], 1),
        (["--capacity", "99MiB", "--settings", "expandable_segments:True"], 1),
        (["--gpu", "0", "--capacity", "1GiB", "--top", "0"], 0),
    ],
)
def test_exit_codes(oom: Path, options: list[str], code: int) -> None:
    result = run(oom, *options)
    assert (result.exit_code, result.stderr) == (code, "")


def test_a_difference_is_found_something(tmp_path: Path) -> None:
    data = json.loads(gzip.decompress(fine(tmp_path).read_bytes()))
    data["segments"].append(segment(A + (1 << 30), block(20 * MIB)))
    data["device_traces"][0].append(event("segment_alloc", A + (1 << 30), 20 * MIB))
    (tmp_path / "odd.json").write_text(json.dumps(data))
    result = run(tmp_path / "odd.json")
    assert result.exit_code == 1
    assert "1 difference from the recording" in result.stdout


def test_json_to_a_file_and_to_stdout(oom: Path, tmp_path: Path) -> None:
    result = run(oom, "--json", tmp_path / "out.json")
    assert "Out of memory" in result.stdout
    alone = run(oom, "--json", "-")
    assert alone.stdout == (tmp_path / "out.json").read_text()
    assert json.loads(alone.stdout)["out_of_memory"]["requested"] == 40 * MIB


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--settings", "expandable_segment:True"], "expected expandable_segments"),
        (["--settings", "max_split_size_mb:1"], "max_split_size_mb:1"),
        (["--capacity", "lots"], "'lots' is not a number of bytes"),
        (["--capacity", "0"], "--capacity 0"),
        (["--gpu", "3"], "nothing of GPU 3"),
        (["--gpu", "x"], "'--gpu'"),
        (["--json", "/no/such/folder/x"], "there is no folder"),
        (["--setings", "x"], "--settings"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(oom: Path, options: list[str], words: str) -> None:
    result = run(oom, *options)
    assert result.exit_code == 2
    assert words.lower() in result.stderr.lower()
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (pickle.dumps(out_of_memory())[:-500], "ends in the middle"),
        (pickle.dumps([1, 2, 3]), "holds a list"),
        (pickle.dumps({"segments": Evil()}), "builtins.print; nothing of it was run"),
        (b"PK\x03\x04", "zip file, as torch.save writes it"),
        (b"hello", "neither a pickle"),
    ],
)
def test_what_is_no_snapshot_is_one_line_and_exit_code_2(data: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(data)
    result = run(file)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    assert "has no snapshot" in run(tmp_path).stderr
    result = run(tmp_path / "missing.pickle")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "No such file" in result.stderr


def test_several_gpus(tmp_path: Path) -> None:
    file = fine(tmp_path, segments=[segment(A, block(MIB), device=k) for k in (1, 3)], device_traces=[])
    result = run(file)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "GPUs 1, 3" in result.stderr
    assert "--gpu" in result.stderr
    assert run(file, "--gpu", "3").exit_code == 0


def test_no_history_is_said_and_segments_are_shown(tmp_path: Path) -> None:
    result = run(fine(tmp_path, device_traces=[[], []]))
    assert result.exit_code == 0
    assert "no history" in " ".join(result.stdout.split())
    assert "Segments at the end" in result.stdout


@pytest.mark.skipif(not REAL.is_dir(), reason="the real snapshots are not here")
def test_torch_is_not_loaded() -> None:
    code = "import sys; from memplan.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    file = min(REAL.glob("*.json.gz"), key=lambda found: found.stat().st_size)
    command = [sys.executable, "-c", code, "replay", str(file), "--settings", "expandable_segments:True"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "as recorded." in done.stdout
    assert done.stdout.endswith("False\n")
