"""The host's memory of scripts: the prediction of `memplan run --phases`, beside what their processes really hold.

    python benchmarks/host_memory.py               # writes benchmarks/results/host_memory.json and host_memory.md
    python benchmarks/host_memory.py FILE.py ...   # other scripts: prints alone

The scripts are those in benchmarks/host_memory. "real" is the most that a script's process and its workers hold at once
while it runs under python: their anonymous memory, each page divided by the processes that share it (``Pss_Anon`` of
/proc/PID/smaps_rollup), and the files of ``/dev/shm``, less the same before the script begins, once torch is imported.
A sampler reads them all the time. Each update waits 0.4 s, as a model that trains longer than its batches load. Pinned
memory is given by torch's own allocator of it, on the emulated card of the tests, which computes on the host.

Each script runs three times as it is, and twice with MALLOC_MMAP_THRESHOLD_=131072, so that malloc returns freed blocks
from 128 KiB: then "predicted" is without the samples that it keeps in workers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "host_memory"
RESULTS = ROOT / "benchmarks" / "results"
_REAL = """
import os, sys, time
sys.path.insert(0, {root!r})
library = os.environ.get("CARD")
if library:
    from pathlib import Path
    sys.path.insert(0, {root!r} + "/tests/emulated_card")
    import emulated  # before torch, which asks for a card when it is imported
    card = emulated.load(Path(library))
import torch
if library:
    emulated.install(card)
from torch.optim.optimizer import register_optimizer_step_post_hook
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
register_optimizer_step_post_hook(lambda *_: time.sleep(0.4))
import runpy
sys.argv = [{script!r}]
sys.path[0] = os.path.dirname({script!r})
sys.modules["__main__"].__file__ = {script!r}
runpy.run_path({script!r}, run_name="__main__")
print("pinned", card.pinned_bytes() if library else 0, flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One script; sizes in bytes, without Python and torch as imported."""

    script: str
    predicted: int
    real: list[int]
    """Of each run."""
    predicted_returning: int
    """The same where malloc returns what is freed."""
    real_returning: list[int]
    terms: dict[str, int]
    """Predicted, by term, with Python and torch."""
    shared: tuple[int, int]
    """The most of ``/dev/shm``: predicted, real."""
    pinned: tuple[int, int]
    """Blocks of pinned memory: predicted, of torch's allocator."""
    base: tuple[int, int]
    """Python and torch as imported: predicted, real."""


def run(script: Path) -> Row:
    """Predict a script's host memory, and run it for real, each in an empty folder."""
    from memplan.simulation.host import CUDA_BUILD, PYTHON

    on_card = "cuda" in script.read_text(encoding="utf-8")
    host = _predicted(script, "rtx4090" if on_card else "cpu")
    use, peak = host["use"], host["use"]["peak"]
    runs = [_real(script, on_card, returns=False) for _ in range(3)]
    returning = [_real(script, on_card, returns=True) for _ in range(2)]
    python = PYTHON + (CUDA_BUILD if on_card else 0)
    predicted = peak["bytes"] - python
    return Row(
        script.stem, predicted, [run.most for run in runs], predicted - peak["terms"].get("kept", 0),
        [run.most for run in returning], peak["terms"], (use["shared"], max(run.shared for run in runs)),
        (peak["terms"].get("pinned", 0), max(run.pinned for run in runs)), (PYTHON, runs[0].base),
    )  # fmt: skip


def _predicted(script: Path, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(script, folder)
        command = [sys.executable, "-m", "memplan.cli", "run", "--phases", "--json", "-", "--device", device]
        done = subprocess.run(
            [*command, "--host", "1TiB", script.name], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if not done.stdout:
        raise SystemExit(f"{script.name}: {done.stderr}")
    return json.loads(done.stdout)["host"]


class _Real(NamedTuple):
    """A real run, in bytes."""

    base: int
    """Before the script begins."""
    most: int
    """While it runs, beyond that."""
    shared: int
    """The most of ``/dev/shm``."""
    pinned: int
    """The most of pinned blocks."""


def _real(script: Path, on_card: bool, *, returns: bool) -> _Real:
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / script.name
        shutil.copy(script, own)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if returns:
            env["MALLOC_MMAP_THRESHOLD_"] = "131072"
        if on_card:
            env["CARD"] = str(_card())
        command = [sys.executable, "-c", _REAL.format(root=str(ROOT), script=str(own))]
        if not subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
            command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", *command]
        with subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"{script.name} did not start")
            base, base_shared = _anonymous(process.pid), _shared(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
            most = most_shared = 0
            while process.poll() is None:
                shared = _shared(process.pid) - base_shared
                most = max(most, _anonymous(process.pid) + shared - base)
                most_shared = max(most_shared, shared)
                time.sleep(0.003)
            found = re.search(r"^pinned (\d+)$", process.stdout.read(), re.MULTILINE)
        if found is None:
            raise SystemExit(f"{script.name} failed")
    return _Real(base, most, most_shared, int(found[1]))


def _card() -> Path:
    """Return the emulated card, compiled."""
    sys.path.insert(0, str(ROOT))
    from tests.emulated_card import compiled

    return compiled(Path(tempfile.gettempdir()))


def _anonymous(pid: int) -> int:
    """Return the anonymous memory of a process and its children, shared pages by their shares."""
    total, waiting = 0, [pid]
    while waiting:
        process = waiting.pop()
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
            for thread in os.listdir(f"/proc/{process}/task"):
                children = Path(f"/proc/{process}/task/{thread}/children").read_text(encoding="utf-8")
                waiting += map(int, children.split())
        except OSError:  # it has ended
            continue
        found = re.search(r"Pss_Anon:\s+(\d+) kB", text)
        total += int(found[1]) << 10 if found else 0
    return total


def _shared(pid: int) -> int:
    """Return the bytes of the files in ``/dev/shm`` as a process sees it."""
    try:
        files = os.statvfs(f"/proc/{pid}/root/dev/shm")
    except OSError:  # it has ended
        return 0
    return (files.f_blocks - files.f_bfree) * files.f_frsize


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| script | predicted | real, three runs | off | predicted, freed is returned | real | off | /dev/shm | real "
        "| pinned | real |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            row.script, _mib(row.predicted), _between(row.real), _off(row.predicted, row.real),
            _mib(row.predicted_returning), _between(row.real_returning),
            _off(row.predicted_returning, row.real_returning), *map(_mib, (*row.shared, *row.pinned)),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _between(sizes: list[int]) -> str:
    low, high = _mib(min(sizes)), _mib(max(sizes))
    return low if low == high else f"{low.removesuffix(' MiB')} to {high}"


def _off(predicted: int, real: list[int]) -> str:
    """Return how far off a prediction is, from the run that held most to the one that held least."""
    least, most = f"{predicted / max(real) - 1:+.1%}", f"{predicted / min(real) - 1:+.1%}"
    return least if least == most else f"{least} to {most}"


def main() -> None:
    """Run the scripts and write the results."""
    given = [Path(name) for name in sys.argv[1:]]
    rows = [run(path) for path in given or sorted(SCRIPTS.glob("*.py"))]
    print(table(rows))
    if given:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    (RESULTS / "host_memory.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    (RESULTS / "host_memory.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
