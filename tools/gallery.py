"""Make the reports of docs/gallery.md: run the commands that it shows, in order, in an empty folder.

    python tools/gallery.py FOLDER

The pages, what `--html` names, are in FOLDER then. Commands run in one process of their own, beside a copy of
examples/, so that names and places are those that a reader of the page gets.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
DONE = (0, 1)
"""Exit codes of a command that did its work: 1 says that it found something."""


def commands(block: str) -> list[list[str]]:
    """Return the arguments of each memplan command of a block."""
    return [shlex.split(line)[2:] for line in block.splitlines() if line.startswith("$ memplan ")]


def report_of(block: str) -> str | None:
    """Return the file that a block's ``--html`` names; None where there is none."""
    named = [words[words.index("--html") + 1] for words in commands(block) if "--html" in words]
    return named[-1] if named else None


def run(arguments: list[str]) -> None:
    """Run a memplan command.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    from memplan.cli import main

    before = dict(os.environ)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(arguments, standalone_mode=True)
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
    os.environ.clear()  # importing MONAI sets what sizes cuBLAS's workspaces: that is of one command, as in a shell
    os.environ.update(before)
    if code not in DONE:
        raise RuntimeError(f"memplan {shlex.join(arguments)} ended with {code}:\n{said.getvalue()}")


def make(blocks: Iterable[str], folder: Path) -> list[Path]:
    """Run the commands of blocks; return the reports, which are in a folder then."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(ROOT / "examples", Path(work, "examples"))
        with contextlib.chdir(work):
            for block in blocks:
                for arguments in commands(block):
                    run(arguments)
                name = report_of(block)
                if name is not None:
                    made.append(Path(shutil.copy(name, folder / name)))
    return made


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    os.environ.setdefault("COLUMNS", "80")
    for path in make(BLOCK.findall(PAGE.read_text(encoding="utf-8")), target):
        print(path)
