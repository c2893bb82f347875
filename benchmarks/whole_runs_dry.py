"""Whole runs of scripts on an emulated card: the peaks of `memplan.whole_run`, beside torch's own counters there.

    ENV/bin/python benchmarks/whole_runs_dry.py               # writes benchmarks/results/whole_runs_dry.json and .md
    ENV/bin/python benchmarks/whole_runs_dry.py FILE.py ...   # other scripts: prints alone

ENV is an environment with a CUDA build of torch and memplan's requirements, so that both sides have the same torch. The
counters are `torch.cuda.max_memory_allocated` and `max_memory_reserved`, reset where each part of the run begins, of a
script that runs on the emulated card with its loaders at full length (docs/dry.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from memplan.devices import find
from memplan.dry.cuda_torch import find_torch
from memplan.dry.library import library_for
from memplan.errors import MemplanError
from memplan.integrations.scripts.followed import whole_run
from memplan.trace.dry_run.process import process_command, process_variables

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = tuple(
    ROOT / "benchmarks" / "whole_runs" / f"{name}.py" for name in ("gan", "predictions_kept", "resumed", "rollouts")
)
RESULTS = ROOT / "benchmarks" / "results"
CARD = "h100"


@dataclass(frozen=True)
class Row:
    """One script; sizes in bytes, by phase."""

    script: str
    phases: tuple[str, ...]
    predicted: tuple[tuple[int, int], ...]
    """Allocated and reserved."""
    counted: tuple[tuple[int, int], ...]

    def error(self, which: int) -> float:
        """Return how far off the peak of a phase is at most, as a share: 0 for allocated bytes, 1 for reserved."""
        return max(abs(a[which] / b[which] - 1) for a, b in zip(self.predicted, self.counted, strict=True))

    def whole(self, which: int) -> float:
        """Return how far off the peak of the whole run is."""
        return max(a[which] for a in self.predicted) / max(b[which] for b in self.counted) - 1


def run(script: Path) -> Row:
    """Follow a script's phases for the card, and run it on the emulated one."""
    run = whole_run(script, device=CARD)
    counted = _counted(script)
    kinds = [phase.kind for phase in run.phases]
    if kinds != [kind for kind, *_ in counted]:
        raise SystemExit(f"{script.name}: the dry run has other phases than {kinds}: {counted}")
    predicted = tuple((phase.allocated, phase.reserved) for phase in run.phases)
    return Row(script.stem, tuple(kinds), predicted, tuple((a, b) for _, a, b in counted))


def _counted(script: Path) -> list[tuple[str, int, int]]:
    """Return kind, allocated and reserved peak of each phase, as torch counted them on the emulated card."""
    torch = find_torch(None)
    with tempfile.TemporaryDirectory() as folder:
        variables = process_variables(os.environ, find(CARD), library_for(torch), Path(folder, "log"))
        code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        code += f"import whole_runs_dry; whole_runs_dry.in_process({str(script)!r})"
        done = subprocess.run(
            process_command(torch, code), cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{script.name}: {done.stderr}")
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def in_process(script: str) -> NoReturn:
    """In the process with the emulated card: run a script there, and print what torch counted in its phases."""
    from memplan.integrations.scripts.command import Command
    from memplan.integrations.scripts.request import Request
    from memplan.integrations.scripts.script import Script
    from memplan.integrations.scripts.views import View
    from memplan.studies.runs.phases import phases_of
    from memplan.trace.dry_run.observe import observe

    def give_up(error: MemplanError) -> NoReturn:
        raise SystemExit(str(error))

    request = Request(Command(script), CARD, really=True, phases=True, limit=3600.0)
    followed: Any = Script(request, View(), give_up)
    trace = observe(followed, find(CARD), request.steps, None)
    built, *parts = trace.counters
    rows = [("build", built.allocated, built.reserved)]
    for span in phases_of(followed.facts(trace).parts):
        peaks = [parts[number] for number in span.parts]
        rows.append((span.kind, max(p.allocated for p in peaks), max(p.reserved for p in peaks)))
    print(json.dumps(rows), flush=True)
    os._exit(0)  # the emulated driver takes no part in torch's own teardown


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| script | phases | whole run: allocated | reserved | largest error of a phase: allocated | reserved |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.script} | {len(row.phases)} | {row.whole(0):+.3%} | {row.whole(1):+.3%} | {row.error(0):.3%} "
        f"| {row.error(1):.3%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the scripts and write the results."""
    given = [Path(name).resolve() for name in sys.argv[1:]]
    rows = [run(script) for script in given or SCRIPTS]
    print(table(rows))
    for row in rows if given else ():
        for kind, *peaks in zip(row.phases, row.predicted, row.counted, strict=True):
            print(row.script, kind, *peaks)
    if not given:
        (RESULTS / "whole_runs_dry.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (RESULTS / "whole_runs_dry.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
