"""Scripts as they are: what `memplan run` predicts, beside the same script run for real, and how long the answer takes.

    python benchmarks/scripts.py               # writes benchmarks/results/scripts.json and scripts.md
    python benchmarks/scripts.py --libraries   # those of benchmarks/library_scripts, to results/library_scripts.*
    python benchmarks/scripts.py FILE.py ...   # other scripts: prints alone

The first scripts are those of the tests, of ten styles; those of ``--libraries`` are of ten libraries and compilers
(peft, trl, lightning, MONAI, diffusers, timm and bitsandbytes have to be installed). "imports" is what python takes to
import what the script imports, and nothing else: an answer cannot come sooner.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEN = ROOT / "tests" / "integrations" / "scripts" / "ten"
LIBRARIES = ROOT / "benchmarks" / "library_scripts"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One script; sizes in bytes, times in seconds."""

    script: str
    predicted: int
    measured: int
    seconds: float
    imports: float
    left: int
    """Files that the script left behind."""

    @property
    def error(self) -> float:
        """Return how far off the prediction is, as a share."""
        return self.predicted / self.measured - 1


def run(script: Path) -> Row:
    """Record a script and run it for real, each in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(script, folder)
        start = time.monotonic()
        predicted = _peak(folder, script.name)
        seconds = time.monotonic() - start
        measured = _peak(folder, script.name, "--measure")
        left = len([path for path in Path(folder).rglob("*") if path.is_file()]) - 1
        return Row(script.name, predicted, measured, seconds, _imports(script, folder), left)


def _peak(folder: str, name: str, *options: str) -> int:
    command = [sys.executable, "-m", "memplan.cli", "run", "--json", "-", "--device", "cpu", *options, name]
    done = subprocess.run(command, cwd=folder, env=_variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {' '.join(options)}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)["timeline"]["peak_allocated"]


def _imports(script: Path, folder: str) -> float:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    lines = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=folder, env=_variables(), check=True)
    return time.monotonic() - start


def _variables() -> dict[str, str]:
    paths = filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def table(rows: list[Row]) -> str:
    """Return the rows as a page shows them."""
    lines = [
        "| script | predicted | measured | off | answer after | of it imports |",
        "|---|--:|--:|--:|--:|--:|",
        *(
            f"| {row.script} | {row.predicted:,} B | {row.measured:,} B | {row.error:+.4%} | {row.seconds:.1f} s | "
            f"{row.imports:.1f} s |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run from the command line."""
    libraries = sys.argv[1:] == ["--libraries"]
    given = [] if libraries else [Path(name) for name in sys.argv[1:]]
    rows = [run(script) for script in given or sorted((LIBRARIES if libraries else TEN).glob("*.py"))]
    print(table(rows))
    if not given:
        data = [{**asdict(row), "error": row.error} for row in rows]
        name = "library_scripts" if libraries else "scripts"
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (RESULTS / f"{name}.md").write_text(table(rows), encoding="utf-8")
    return int(any(abs(row.error) > 0.001 or row.left for row in rows))


if __name__ == "__main__":
    sys.exit(main())
