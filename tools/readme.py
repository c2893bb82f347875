"""Fill README.md: the output of its commands and the tables of the benchmarks are generated, never typed.

    python tools/readme.py            writes README.md anew
    python tools/readme.py --check    exits 1 if it would change

A block begins with ``<!-- run: COMMAND -->`` or ``<!-- include: FILE -->`` and ends with ``<!-- end -->``; what stands
between is replaced. Commands run in the repository's root with a plain 80-column output.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"<!-- (run|include): (.+?) -->\n.*?<!-- end -->", re.S)


def filled(text: str) -> str:
    """The text with every block made anew."""
    return _BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    kind, what = match.groups()
    body = _output(what) if kind == "run" else (ROOT / what).read_text(encoding="utf-8").strip()
    return f"<!-- {kind}: {what} -->\n{body}\n<!-- end -->"


def _output(command: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "memplan", "the README shows no other command's output"
    # importing MONAI sets this one, which sizes cuBLAS's workspaces: it must not come from who asks for the output
    inherited = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "memplan.cli", *arguments],
        cwd=ROOT,
        env=inherited | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr}")
    lines = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    return f"```console\n$ {command}\n{lines}\n```"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if README.md would change")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = filled(before)
    if check:
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
