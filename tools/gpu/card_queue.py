"""What waits for a real GPU, in order of worth: run it, as far as the minutes go, and keep what it shows.

    python tools/gpu/card_queue.py list --out OUT
    python tools/gpu/card_queue.py run --minutes 9 --out OUT      # a second call goes on where the first one ended
    python tools/gpu/card_queue.py keep OUT                       # into goldens/ and benchmarks/results/
    python tools/gpu/card_queue.py run --dry h100 --torch ENV --out OUT    # on an emulated card, without a GPU

Each entry has a process of its own, which is ended after 8 minutes: one that crashes, hangs or runs out of memory is a
result, not the end. Results are OUT/results/<entry>.json, and what is done is in OUT/state.json.
Exit code: 0 all entries are done; 1 some are left, or failed; 2 bad usage, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for _path in (str(HERE), str(ROOT)):
    if _path not in sys.path:
        sys.path.insert(0, _path)
if str(ROOT / "src") not in sys.path:
    sys.path.append(str(ROOT / "src"))  # where memplan is not installed
import fit  # noqa: E402  # of this folder, as all that follow
import golden  # noqa: E402
import queue_entries  # noqa: E402
import queue_keep  # noqa: E402
from queue_entries import MOST_MINUTES, Entry, Place, Row  # noqa: E402

from memplan.trace.card_run.golden_format import slug  # noqa: E402

FORMAT, VERSION = "memplan-gpu-result", 1
STATE = "state.json"
RESULTS = "results"
SPARE_SECONDS = 15.0
"""Of the minutes, what an entry is not given: it ends itself first, and writes what it has."""
LEAST_SECONDS = 60.0
"""With less than this left no entry is started."""
DESCRIBE_SECONDS = 300.0
TAIL = 2000
State = Literal["running", "done", "stopped", "failed", "crashed", "timed out", "skipped"]
"""Of an entry. ``running`` in a state file: the machine went away meanwhile. ``stopped``: the minutes were over, and a
later call goes on."""
OPEN = ("running", "stopped")
WRONG = ("failed", "crashed", "timed out")
ENOUGH = 0.8
"""An entry that is ended after this share of its most minutes is not given them once more."""
MOST_IN_VAIN = 2
"""Calls without a new figure after which an entry counts as timed out."""


class Queue:
    """The entries, and which of them are done according to the folder of results."""

    def __init__(self, folder: Path, entries: Sequence[Entry] = queue_entries.ENTRIES) -> None:
        self.folder, self.entries = folder, entries

    @property
    def states(self) -> dict[str, State]:
        """By entry; one that was never started is not there."""
        return {name: row["state"] for name, row in self._rows().items()}

    def calls_in_vain(self, name: str) -> int:
        """How many calls in a row have run an entry without a new figure."""
        return self._rows().get(name, {}).get("calls_in_vain", 0)

    def _rows(self) -> dict[str, Row]:
        path = self.folder / STATE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def enter(self, name: str, state: State, calls_in_vain: int = 0) -> None:
        """Write down how it is with an entry."""
        row = {"state": state, "calls_in_vain": calls_in_vain}
        _write(self.folder / STATE, dict(sorted({**self._rows(), name: row}.items())))

    def pending(self, again: bool = False) -> list[Entry]:
        """What is to be run, in order. Last what may take all the minutes once more: what was running when a machine
        went away, or had no new figure; and with ``again`` what failed, as a whole or in part."""
        fresh, late = list[Entry](), list[Entry]()
        for entry in self.entries:
            state = self.states.get(entry.name)
            if state in (None, *OPEN):
                (late if state == "running" or self.calls_in_vain(entry.name) else fresh).append(entry)
            elif again and (state in WRONG or (state == "done" and self._failed_in_part(entry.name))):
                late.append(entry)
        return fresh + late

    def _failed_in_part(self, name: str) -> bool:
        path = self.folder / RESULTS / f"{name}.json"
        return path.exists() and queue_keep.failed(json.loads(path.read_text(encoding="utf-8"))["figures"])

    def run(
        self, minutes: float, card: Mapping[str, Any], dry: Any = None, only: Sequence[str] = (), again: bool = False
    ) -> None:
        """Run entries until the minutes are over: of those pending, or of those named, whatever is known of them.

        Args:
            minutes: for all together.
            card: what results say of the machine, with ``folder``, that of its golden files.
            dry: the emulated card, None for this machine's GPU.
            only: names of entries.
            again: also what failed, and within an entry the parts that did.
        """
        stop = time.monotonic() + 60 * minutes
        entries = [entry for entry in self.entries if entry.name in only] if only else self.pending(again)
        for entry in entries:
            left = stop - time.monotonic()
            if left < LEAST_SECONDS or (60 * entry.minutes > left and entry is not entries[0] and dry is None):
                continue  # a shorter one may fit
            self._run(entry, card, dry, left, again)

    def _run(self, entry: Entry, card: Mapping[str, Any], dry: Any, left: float, again: bool) -> None:
        begun, seconds = time.monotonic(), min(60 * MOST_MINUTES, left) - SPARE_SECONDS
        own = self.folder / "entries" / entry.name
        own.mkdir(parents=True, exist_ok=True)
        place = Place(self.folder, own, seconds, str(card["folder"]), dry, again)
        before = _measured(_figures(entry, place))
        in_vain = self.calls_in_vain(entry.name) if self.states.get(entry.name) in OPEN else 0
        skip = entry.dry_skip if dry is not None else ""
        state: State = "skipped"
        error = f"skipped: {skip}" if skip else ""
        if not skip:
            self.enter(entry.name, "running", in_vain)
            command = entry.command(place)
            if command is None:
                state = "done"
            else:
                environment = dict(os.environ)
                if dry is not None and not entry.starts_card:
                    environment = dry.variables(environment, entry.name)
                state, error = run_process(command, environment, own / "output.txt", place.seconds + SPARE_SECONDS,
                                           entry.codes)  # fmt: skip
        figures = {} if skip else _figures(entry, place)
        if figures.get("left") and state == "done":
            state = "stopped"
        if state == "timed out" and left < ENOUGH * 60 * MOST_MINUTES:
            state = "stopped"
        if state == "stopped":
            in_vain = 0 if _measured(figures) - before else in_vain + 1
            if in_vain == MOST_IN_VAIN:
                state, error = "timed out", f"no new figure in {MOST_IN_VAIN} calls\n{error}".strip()
        row = {
            "format": FORMAT, "version": VERSION, "entry": entry.name, "state": state,
            **{name: value for name, value in card.items() if name != "folder"}, "emulated": dry is not None,
            "seconds": round(time.monotonic() - begun, 1), "figures": figures, "error": error,
        }  # fmt: skip
        _write(self.folder / RESULTS / f"{entry.name}.json", row)
        self.enter(entry.name, state, in_vain if state == "stopped" else 0)
        print(line(entry, state, row), flush=True)


def run_process(
    command: Sequence[str], environment: Mapping[str, str], output: Path, seconds: float, codes: Sequence[int]
) -> tuple[State, str]:
    """Run a command, ended with all its children after so many seconds. Returns its state, and of one that went wrong
    the end of what it printed."""
    with output.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with_children(process, signal.SIGKILL)
            process.wait()
    if code is not None and code in codes:
        return "done", ""
    tail = output.read_text(encoding="utf-8", errors="replace").strip()[-TAIL:]
    if code is None:
        return "timed out", f"ended after {seconds:.0f} s\n{tail}"
    if code < 0:
        return "crashed", f"ended by {signal.Signals(-code).name}\n{tail}"
    return "failed", f"exit code {code}\n{tail}"


def with_children(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that leads a session, and to all in it."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        process.poll()


def _figures(entry: Entry, place: Place) -> Row:
    try:
        return entry.read(place)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a process that was ended while it wrote
        return {"unreadable": f"{type(error).__name__}: {error}"}


def _measured(figures: Row) -> set[str]:
    """The names of what has figures. A case that failed has none: an entry whose cases hang in turn comes last, too."""
    cases = {case["method"] for case in figures.get("cases", ()) if not (fit.was_stopped(case) or fit.has_failed(case))}
    rows = {name for name, part in figures.items() if name != "failed" and isinstance(part, dict)}
    return cases | rows | {*figures.get("files", ())}


def _write(path: Path, content: Row) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def line(entry: Entry, state: str, row: Row | None = None) -> str:
    """An entry for the terminal."""
    head = f"{entry.name:26} {state or 'waits':10}"
    if row is None:
        return f"{head} {entry.minutes:4.1f} min  {entry.why}"
    said = (row["error"].strip().splitlines() or [""])[-1]
    left = row["figures"].get("left")
    said += f" ({len(left)} left)" if left else ""
    return f"{head} {row['seconds']:6.1f} s  {said}".rstrip()


# The command


def describe(dry: Any) -> Row:
    """The card, as a process that sees it says: names for results, and the folder of golden files.

    Raises:
        SystemExit: that process fails, or hangs (exit code 2).
    """
    arguments = ["--describe", *(["--emulated", dry.name] if dry is not None else [])]
    command = [sys.executable, str(HERE / f"{queue_entries.FUNCTIONS}.py"), *arguments]
    environment = dict(os.environ)
    if dry is not None:
        command, environment = dry.command(queue_entries.FUNCTIONS, arguments), dry.variables(environment, "describe")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=DESCRIBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        refuse(f"the card cannot be described within {DESCRIBE_SECONDS:.0f} s")
    if done.returncode:
        refuse(f"the card cannot be described: {done.stderr.strip()[-TAIL:] or f'exit code {done.returncode}'}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"folder": f"{slug(found['card'])}/{slug(found['torch'])}"}


def refuse(message: str) -> NoReturn:
    """One line and exit code 2."""
    print(f"card_queue.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def run(options: argparse.Namespace) -> int:
    """Run the queue. Returns the exit code."""
    queue, begun = Queue(options.out), time.monotonic()
    unknown = sorted(set(options.only or ()) - {entry.name for entry in queue.entries})
    if unknown:
        refuse(f"there is no entry {', '.join(unknown)}. Expected one of those that `list` names.")
    dry = golden.dry_card(options)
    card = describe(dry)
    if not options.only and not options.again:
        for entry in queue_keep.known(card, options.kept):
            if entry in {one.name for one in queue.entries} and entry not in queue.states and dry is None:
                queue.enter(entry, "done")
    queue.run(options.minutes - (time.monotonic() - begun) / 60, card, dry, options.only or (), options.again)
    states = queue.states
    wanted = options.only or [entry.name for entry in queue.entries]
    waiting = [name for name in wanted if states.get(name) in (None, *OPEN)]
    print(
        f"{len(wanted) - len(waiting)} of {len(wanted)} entries done"
        + (f"; left: {', '.join(waiting)}" if waiting else "")
    )
    return int(bool(waiting) or any(states.get(name) not in ("done", "skipped") for name in wanted))


def show(options: argparse.Namespace) -> int:
    """Print the entries with their states."""
    queue = Queue(options.out)
    states = queue.states
    for entry in queue.entries:
        print(line(entry, states.get(entry.name, "")))
    return 0


def keep(options: argparse.Namespace) -> int:
    """Merge results into the repository. Returns 1 where a known one differs and stays."""
    report = queue_keep.keep(options.folder, goldens=ROOT / "goldens", results=ROOT / "benchmarks" / "results",
                             replace=options.replace)  # fmt: skip
    print("\n".join(report.lines))
    return int(report.differs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    out: Row = {"type": Path, "default": Path(os.environ.get("OUT", "gpu-results")), "metavar": "DIR",
                "help": "folder of results and state (default: $OUT, else gpu-results)"}  # fmt: skip
    runs = commands.add_parser("run", help="run what is not done yet")
    runs.add_argument("--minutes", type=float, default=9.0, help="for this call (default 9)")
    runs.add_argument("--only", action="append", metavar="NAME", help="this entry, done or not; may be repeated")
    runs.add_argument("--again", action="store_true", help="also what failed, or is in benchmarks/results/gpu.json")
    runs.add_argument("--dry", metavar="CARD", help="on this card, emulated: no GPU is needed")
    runs.add_argument("--torch", metavar="PATH", help="with --dry: environment with the CUDA build of torch")
    runs.add_argument("--out", **out)
    runs.set_defaults(call=run, kept=ROOT / "benchmarks" / "results")
    lists = commands.add_parser("list", help="name the entries, with their states")
    lists.add_argument("--out", **out)
    lists.set_defaults(call=show)
    keeps = commands.add_parser("keep", help="merge results into goldens/ and benchmarks/results/")
    keeps.add_argument("folder", type=Path)
    keeps.add_argument("--replace", action="store_true", help="also where a known result differs")
    keeps.set_defaults(call=keep)
    options = parser.parse_args(arguments)
    return options.call(options)


if __name__ == "__main__":
    sys.exit(main())
