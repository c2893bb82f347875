"""Out-of-memory errors of several ranks: the odd one, worked out by hand from messages as torch writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import memplan
from memplan.cli import main
from memplan.errors import FormatError, InputError, TargetError
from memplan.explanation.why_ranks import RankReasons, texts_by_rank, why_ranks
from memplan.reports.html.saved_results import result_of

GIB = 1 << 30


def message(gpu: int = 0, allocated: str = "60.00 GiB", others: tuple[str, ...] = ()) -> str:
    """As torch 2.13 writes it (c10/cuda/CUDACachingAllocator.cpp)."""
    processes = "".join(f"Process {4000 + n} has {size} memory in use. " for n, size in enumerate(others))
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {gpu} has a total capacity of "
        f"79.11 GiB of which 1.00 GiB is free. {processes}Including non-PyTorch memory, this process has 70.00 GiB "
        f"memory in use. Of the allocated memory {allocated} is allocated by PyTorch, and 100.00 MiB is reserved by "
        "PyTorch but unallocated."
    )


def test_the_rank_that_alone_ran_out_is_first() -> None:
    found = why_ranks({0: "step 9", 1: "step 9", 2: message(2), 3: "a broken pipe"})
    assert found.verdict == ("Rank 2 alone ran out of memory; ranks 0-1, 3 have no message about it.",)
    assert (found.first.rank, found.first.odd) == (2, True)
    assert [row.rank for row in found.rows] == [2, 0, 1, 3]
    assert "Rank 2\n" in str(found)
    assert "Tried" not in str(found)


def test_of_those_that_ran_out_the_one_that_held_the_most_is_first() -> None:
    found = why_ranks({rank: message(rank, "66.00 GiB" if rank == 2 else "60.00 GiB") for rank in range(4)})
    assert found.verdict == ("Rank 2 had allocated 6.00 GiB more than the others that ran out.",)
    assert (found.first.rank, found.first.beyond) == (2, 6 * GIB)
    assert [row.beyond for row in found.rows[1:]] == [0, 0, 0]


def test_ranks_that_ran_out_alike_have_no_odd_one() -> None:
    """Within 1 % of the median: 60 GiB and 60.5."""
    found = why_ranks({rank: message(rank, f"60.{rank}0 GiB") for rank in range(4)})
    assert found.verdict == ("Ranks 0-3 ran out of memory alike: the step is too large for each.",)
    assert not any(row.odd for row in found.rows)


def test_other_ranks_contexts_on_the_first_gpu_are_named() -> None:
    """As where seven ranks load a checkpoint without map_location."""
    on_first = message(0, others=("1.50 GiB",) * 7)
    found = why_ranks({0: on_first} | {rank: message(rank) for rank in range(1, 8)})
    assert (found.first.rank, found.first.others) == (0, 7 * GIB * 3 // 2)
    assert "On the GPU of rank 0 other processes held 10.50 GiB" in found.verdict[0]
    assert "without map_location" in found.verdict[0]
    even = why_ranks({rank: message(rank, others=("500.00 MiB",)) for rank in range(4)})
    assert even.verdict == ("Ranks 0-3 ran out of memory alike: the step is too large for each.",)


def test_ranks_on_the_same_gpu_are_named() -> None:
    shared = why_ranks({rank: message(0, "20.00 GiB", ("20.40 GiB",) * 2) for rank in range(3)})
    assert shared.verdict[0].startswith("Ranks 0-2 were all on GPU 0, each beside the others' processes")
    # each with CUDA_VISIBLE_DEVICES of its own, or on a machine of its own
    assert "alike" in why_ranks({rank: message(0) for rank in range(3)}).verdict[0]


def test_messages_without_figures_are_compared_by_what_they_have() -> None:
    found = why_ranks({0: "CUDA error: out of memory", 1: message(1)})
    assert [row.beyond for row in found.rows] == [0, 0]


LOG = "\n".join([
    "[rank1]: Traceback (most recent call last):",
    f"[rank1]: {message(1)}",
    "step 12 on all",
    "[rank0]: RuntimeError: NCCL communicator was aborted",
    "[default2]:[rank2]: a warning",
    "[default3]: another",
])  # fmt: skip


def test_a_log_of_all_ranks_is_split_by_its_lines() -> None:
    parts = texts_by_rank(LOG)
    assert set(parts) == {0, 1, 2, 3}
    assert parts[1] == f"Traceback (most recent call last):\n{message(1)}"
    assert (parts[2], parts[3]) == ("a warning", "another")
    assert texts_by_rank("rank 3 of 4\nstep 12 [rank1]: x") == {}


def test_files_are_ranks_by_their_names_or_torchruns_folders(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").write_text(message(rank) if rank else "fine")
        for attempt in range(2):
            folder = tmp_path / "run" / "none_x" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stdout.log").write_text("step 1")
            (folder / "stderr.log").write_text(message(rank) if rank == attempt else "fine")
    assert why_ranks([tmp_path / "rank0.log", tmp_path / "rank1.log"]).first.rank == 1
    last = why_ranks(tmp_path / "run")
    assert (last.first.rank, len(last.rows)) == (1, 2)
    assert last.first.source.endswith("attempt_1/1/stderr.log") or last.first.source.endswith("stdout.log")


def run(*args: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["why", *map(str, args)], input=text)


def test_the_command_takes_files_a_folder_and_a_log_of_all(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.log").write_text(message(rank, "70.00 GiB" if rank == 1 else "60.00 GiB"))
    files = [tmp_path / f"rank{rank}.log" for rank in range(3)]
    result = run(*files, "--json", tmp_path / "why.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Rank 1 had allocated 10.00 GiB more" in result.stdout
    assert run(tmp_path).stdout == result.stdout
    saved = RankReasons.load(tmp_path / "why.json")
    assert saved == why_ranks(files)
    page = result_of(saved.to_json(), "why.json")
    assert page.verdict == "Rank 1 had allocated 10.00 GiB more than the others that ran out."
    assert run(text=LOG).stdout.startswith("Out of memory: 4 ranks")
    with pytest.raises(FormatError):
        RankReasons.from_dict(json.loads((tmp_path / "why.json").read_text()) | {"rows": []})


def test_texts_without_a_rank_or_a_message_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no message about memory of ranks 0-1"):
        why_ranks({0: "fine", 1: "fine"})
    with pytest.raises(TargetError, match="has no logs"):
        memplan.why_ranks(tmp_path)
    (tmp_path / "a.log").write_text(message())
    with pytest.raises(InputError, match=r"a\.log, of no known rank"):
        memplan.why_ranks(tmp_path)
    with pytest.raises(TargetError, match=r"rank7\.log cannot be read"):
        memplan.why_ranks([tmp_path / "rank7.log"])
