"""Watches of real ranks of gloo: a file for each, the odd one named, also where a rank is killed or out of memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from environment import slow
from integrations.watching.watched_rank import KEPT
from truth.fresh_process import run_ranks

import memplan
from memplan.cli import main
from memplan.errors import FormatError, InputError, TargetError
from memplan.reports.html.saved_results import result_of
from memplan.studies.watched.watched import Held, Owner, RankWatch, finding, summary, watched_ranks

SCRIPT = Path(__file__).with_name("watched_rank.py")
TESTS = Path(__file__).parents[2]
MIB = 1 << 20


def trained(folder: Path, way: str) -> str:
    """Train on two processes that torchrun starts; return what they wrote to stderr."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT),
         str(folder), way],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (way in ("even", "sharded")), done.stderr
    return done.stderr


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_the_rank_that_keeps_a_tensor_is_named_with_its_line(tmp_path: Path, ranks: int) -> None:
    start = f"import runpy, sys; sys.argv = ['', {str(tmp_path)!r}, 'kept']\n"
    done = run_ranks(f"{start}runpy.run_path({str(SCRIPT)!r}, run_name='__main__')", ranks)
    errors = done.stderr
    assert done.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{rank}.json" for rank in range(ranks)]
    found = watched_ranks(tmp_path)
    (odd,) = found.odd
    assert (odd.watch.rank, found.rows[0]) == (ranks - 1, odd)
    assert odd.beyond == KEPT
    # as torch's own profiler measured both, within what gloo's threads hold at the peak
    measured = [row.watch.peak or 0 for row in found.rows]
    assert measured[0] - min(measured) == pytest.approx(KEPT, rel=1e-3)
    (line,) = [at for at, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "torch.zeros(KEPT" in text]
    where = f"tests/integrations/watching/watched_rank.py:{line}"
    assert (odd.owners[0].beyond, odd.owners[0].owner.where) == (KEPT, where)
    sentence = f"rank {ranks - 1} holds 16.0 MiB more than the others: 16.0 MiB of it are inputs at {where}"
    assert errors.count(f"memplan: {sentence}\n") == 1


@pytest.mark.parametrize("way", slow("sharded", "even"))
def test_equal_ranks_have_no_odd_one(way: str, tmp_path: Path) -> None:
    errors = trained(tmp_path, way)
    found = watched_ranks(tmp_path)
    assert (found.odd, found.ended_badly) == ((), ())
    assert [row.watch.steps for row in found.rows] == [6, 6]
    assert "memplan: no rank holds much more than the others" in errors


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    trained(tmp_path, "killed")
    killed, failed = watched_ranks(tmp_path).rows
    assert (killed.watch.rank, killed.watch.state) == (1, "running")
    assert killed.watch.steps in (4, 5)
    assert killed.watch.peak == pytest.approx(failed.watch.peak, rel=1e-3)
    assert failed.watch.state in ("failed", "running")  # torchrun may end it before gloo has noticed
    result = CliRunner().invoke(main, ["why", str(tmp_path), "--json", str(tmp_path / "why.json")])
    assert result.exit_code == 0, result.output
    assert "Rank 1 was last seen in step" in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "why.json").read_text())["rows"][0]["watch"]["rank"] == 1


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_is_first_and_has_a_post_mortem(tmp_path: Path) -> None:
    errors = trained(tmp_path, "oom")
    first = watched_ranks(tmp_path).rows[0].watch
    assert (first.rank, first.state, first.steps) == (1, "out of memory", 5)
    assert first.error.startswith("RuntimeError: [enforce fail")
    assert first.post_mortem is not None
    assert re.fullmatch(r"memplan-oom-rank1-\d+-1\.json", Path(first.post_mortem).name)
    data = json.loads(Path(first.post_mortem).read_text())
    assert (data["rank"], data["world"], data["step"]) == (1, 2, 6)
    assert "Step 6 of rank 1 on cpu asked for" in Path(first.post_mortem).with_suffix(".txt").read_text()
    assert "memplan: rank 1: out of memory: " in errors
    (tmp_path / "all.log").write_text(errors)  # torch begins each line of a traceback with its rank
    reasons = memplan.why_ranks(tmp_path / "all.log")
    assert reasons.verdict == ("Rank 1 alone ran out of memory; rank 0 has no message about it.",)
    assert reasons.first.why is not None
    assert reasons.first.why.message.requested == 1 << 49


def rank(number: int, *held: int, world: int = 4, **changes: object) -> RankWatch:
    """A rank's file by hand; the bytes of line 1, of line 2, and so on."""
    owners = tuple(Held(Owner(f"train.py:{line}", "", "activation"), size) for line, size in enumerate(held, 1))
    watch = RankWatch(number, world, "h100", "over", 10, sum(held), sum(held), owners)
    return replace(watch, **changes)


def written(folder: Path, *watches: RankWatch) -> Path:
    for watch in watches:
        watch.save(folder / f"rank{watch.rank}.json")
    return folder


def test_by_hand_the_median_is_what_others_hold(tmp_path: Path) -> None:
    folder = written(tmp_path, rank(0, 90 * MIB, 40 * MIB), *(rank(r, 90 * MIB, 10 * MIB) for r in (1, 2, 3)))
    found = watched_ranks(folder)
    (odd,) = found.odd
    assert (odd.watch.rank, odd.peak, odd.beyond, found.median) == (0, 130 * MIB, 30 * MIB, 100 * MIB)
    assert (
        finding(odd) == "rank 0 holds 30.0 MiB more than the others: 30.0 MiB of it are other activations at train.py:2"
    )
    found.save(tmp_path / "all.json")
    assert type(found).load(tmp_path / "all.json") == found
    page = result_of(found.to_json(), "all.json")
    assert (page.mood, page.verdict) == ("bad", f"R{finding(odd)[1:]}.")


def test_less_than_a_per_cent_is_not_odd(tmp_path: Path) -> None:
    found = watched_ranks(written(tmp_path, rank(0, 1009 * MIB, world=2), rank(1, 1000 * MIB, world=2)))
    assert summary(found) == ["no rank holds much more than the others: the median is 1000.0 MiB"]


def test_ranks_without_a_file_or_a_prediction_are_noted(tmp_path: Path) -> None:
    early = rank(1, peak=None, predicted=None, state="running", steps=1)
    found = watched_ranks(written(tmp_path, rank(0, 90 * MIB), early))
    assert (found.measured, found.odd, found.rows[0].watch.rank) == (False, (), 1)
    assert found.notes[0] == "no file of 2 ranks: 2, 3"
    assert "rank 1 ended before its third step was observed" in found.notes[1]


def test_ranks_that_did_not_end_normally_are_first(tmp_path: Path) -> None:
    """Out of memory before killed, and what each has written."""
    lost = rank(2, MIB, world=3, state="out of memory", steps=5, error="RuntimeError: full", post_mortem="oom.json")
    found = watched_ranks(
        written(tmp_path, rank(0, MIB, world=3), rank(1, MIB, world=3, state="running", steps=4), lost)
    )
    assert [row.watch.rank for row in found.rows] == [2, 1, 0]
    assert summary(found)[:2] == [
        "rank 2 ran out of memory in step 6: RuntimeError: full",
        "rank 1 was last seen in step 5: it runs still, or was killed",
    ]
    assert "rank 2 wrote a post-mortem: oom.json" in found.notes


def test_other_files_are_refused_with_one_message(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no file of a rank"):
        watched_ranks(tmp_path)
    written(tmp_path, rank(0, MIB), rank(1, MIB, world=8))
    with pytest.raises(InputError, match="trainings with 4 and 8 ranks"):
        watched_ranks(tmp_path)
    (tmp_path / "rank1.json").write_text("{}")
    with pytest.raises(FormatError, match=r"rank1\.json is no rank_watch"):
        watched_ranks(tmp_path)
    with pytest.raises(InputError, match="both of rank 0"):
        watched_ranks([tmp_path / "rank0.json"] * 2)


def test_a_rank_of_one_says_nothing_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    model = torch.nn.Linear(8, 8)
    with memplan.watch(model, folder=tmp_path / "new") as seen:
        seen.end_step()
    assert (seen.rank, seen.world) == (0, 1)
    assert "rank" not in str(seen)
    assert capsys.readouterr().err == ""
    assert RankWatch.load(tmp_path / "new" / "rank0.json").steps == 1
