"""`memplan replay`: run a memory snapshot through the caching allocator, with its settings and others."""

from __future__ import annotations

import os
from functools import partial

import click

from memplan.cli.files import ResultFiles
from memplan.cli.options import Whole, debug_option, result_options, top_option, used_options
from memplan.cli.progress import line, progress
from memplan.errors import InputError

HELP = """Replay a snapshot of torch's CUDA memory, and say what would have been.

FILE is what torch.cuda.memory._dump_snapshot wrote, or JSON of the same; each also as .gz. Nothing in it
is run. Every address and every segment is compared with the recorded ones.

\b
  memplan replay snapshot.pickle
  memplan replay snapshot.pickle --settings expandable_segments:True --capacity 24GiB
  memplan replay rank0.pickle rank1.pickle rank2.pickle

The second says whether the recorded requests would have fitted on a card that gives 24 GiB to torch, as
they were and with expandable segments. Where memory ran out, it says what was asked for, what was free and
why it did not serve, who held the rest, and which setting would have helped.

Several files, or a folder with them, are snapshots that several ranks took of the same step: the rank that holds more
than the others comes first, with the lines that hold it. The rank is the number in the name (rank3.pickle).

\b
Exit code: 0 done; 1 out of memory (under every --settings, if any are given), the replay
differs from the recording, or a rank holds more than the others; 2 bad usage, or a file that is no snapshot.
"""


@click.command("replay", help=HELP)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--settings",
    "settings",
    multiple=True,
    metavar="CONF",
    help="Try these, as in PYTORCH_ALLOC_CONF: name:value,name:value. One option for each set.",
)
@click.option("--capacity", metavar="SIZE", help="What the card gives to torch: 24GiB. Default: as recorded.")
@click.option("--gpu", type=Whole(min=0), metavar="N", help="Whose history, where there are several.")
@top_option(10, "Rows")
@result_options("everything")
@debug_option
def command(
    files: tuple[str, ...], settings: tuple[str, ...], capacity: str | None, gpu: int | None, top: int,
    results: ResultFiles,
) -> int:  # fmt: skip
    """Replay a snapshot, or compare those of several ranks; print the result, and return the exit code: 1 if memory ran
    out, the replay differs, or a rank holds more than the others.

    ``settings`` and ``capacity`` are what to try instead of the recorded ones, ``gpu`` is the card's number.
    """
    if len(files) != 1 or os.path.isdir(files[0]):
        values = {"--settings": settings, "--capacity": capacity is not None, "--gpu": gpu is not None}
        if others := used_options(values, " and "):
            raise InputError(f"{others} with several snapshots", expected="a single one", do="Name the odd one alone")
        return _replay_ranks(files, top, results)
    file = files[0]
    from memplan._bytes import parse_bytes
    from memplan.simulation.allocator.settings import parse_settings
    from memplan.simulation.replays.replay import replay
    from memplan.simulation.replays.side_by_side import cases

    alternatives = [parse_settings(text) for text in settings]
    size = None if capacity is None else parse_bytes(capacity)
    if size == 0:
        raise InputError("--capacity 0", expected="what the card gives to torch", do="Write it like 24GiB")
    with progress(f"replaying {file}"):
        replays = cases(replay(file, gpu=gpu), alternatives, size)
    from memplan.reports.replay import dumps, report

    results.write_and_show(partial(dumps, replays), lambda: report(replays, top))
    return 0 if replays.all_fit and not replays.replay.mismatches else 1


def _replay_ranks(files: tuple[str, ...], top: int, results: ResultFiles) -> int:
    """Compare the snapshots of several ranks and return the exit code."""
    from memplan.reports.rank_snapshots import report
    from memplan.simulation.replays.ranks import replay_ranks

    with line("replaying") as update:
        ranks = replay_ranks(files, progress=update)
    results.write_and_show(ranks.to_json, lambda: report(ranks, top))
    return int(bool(ranks.odd))
