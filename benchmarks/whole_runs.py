"""Whole runs of scripts: the peaks of `memplan run --phases`, beside the same script run for real to its end.

    python benchmarks/whole_runs.py               # writes benchmarks/results/whole_runs.json and whole_runs.md
    python benchmarks/whole_runs.py FILE.py ...   # other scripts: prints alone

The scripts are those in benchmarks/whole_runs, and one of the tests' with sliding windows. "real" are the peaks of
``--measure``, which runs a script's loaders to their ends; two run side by side, each with kernels of one thread. Those
that end in ``_trl`` need trl and datasets; where these are not installed, their stored rows stay.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (
    *sorted((ROOT / "benchmarks" / "whole_runs").glob("*.py")),
    ROOT / "tests" / "integrations" / "scripts" / "ten" / "sliding_window.py",
)
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One script; sizes in bytes, by phase."""

    script: str
    phases: tuple[str, ...]
    predicted: tuple[int, ...]
    real: tuple[int, ...]

    @property
    def errors(self) -> list[float]:
        """Return how far off the peak of each phase is, as a share."""
        return [abs(said / real - 1) for said, real in zip(self.predicted, self.real, strict=True)]

    @property
    def whole(self) -> float:
        """Return how far off the peak of the whole run is, as a share."""
        return abs(max(self.predicted) / max(self.real) - 1)


def run(script: Path) -> Row:
    """Follow a script's phases, and run it for real, each in an empty folder."""
    predicted, real = _phases(script), _phases(script, "--measure")
    kinds = [phase["kind"] for phase in predicted]
    if kinds != [phase["kind"] for phase in real]:
        raise SystemExit(f"{script.name}: the real run has other phases than {kinds}")
    peaks = [tuple(phase["allocated"] for phase in phases) for phases in (predicted, real)]
    return Row(script.stem, tuple(kinds), *peaks)


def _phases(script: Path, *options: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(script, folder)
        command = [sys.executable, "-m", "memplan.cli", "run", "--phases", "--json", "-", "--device", "cpu"]
        command += ["--limit", "900"]
        done = subprocess.run(
            [*command, *options, script.name], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if not done.stdout:  # a branch that values decide ends with a code of its own, and an answer
        raise SystemExit(f"{script.name}: {done.stderr}")
    return json.loads(done.stdout)["run"]["phases"]


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| script | phases | whole run off by | largest error of a phase |", "|---|--:|--:|--:|"]
    lines += [f"| {row.script} | {len(row.phases)} | {row.whole:.3%} | {max(row.errors):.3%} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the scripts and write the results."""
    given = [Path(name) for name in sys.argv[1:]]
    has_trl = importlib.util.find_spec("trl") is not None
    scripts = given or [path for path in SCRIPTS if has_trl or not path.stem.endswith("_trl")]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(run, scripts))
    if not given and not has_trl:
        stored = json.loads((RESULTS / "whole_runs.json").read_text(encoding="utf-8"))
        rows += [Row(**row) for row in stored if row["script"].endswith("_trl")]
    rows.sort(key=lambda row: row.script)
    print(table(rows))
    if not given:
        (RESULTS / "whole_runs.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (RESULTS / "whole_runs.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
