"""Files that commands read and write."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from memplan.errors import InputError


def is_trace(target: str) -> bool:
    """Return whether a target is a file that --trace wrote, by its name or by how it begins."""
    if target.endswith(".json"):
        return True
    try:
        with open(target, encoding="utf-8") as file:
            return file.read(24).startswith('{"format":"memplan.trace')
    except (OSError, ValueError):
        return False


def check_writable(path: str | None, option: str) -> None:
    """See that a file can be written before the work for it is done.

    Raises:
        InputError: its folder does not exist or takes no new file, or it is a folder itself.
    """
    if path is None or path == "-":
        return
    folder = Path(path).resolve().parent
    if os.path.isdir(path):
        found = f"{option} {path} is a folder"
    elif not folder.is_dir():
        found = f"{option} {path}: there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        found = f"{option} {path}: the folder {folder} cannot be written to"
    else:
        return
    raise InputError(found, expected="a file in a folder that can be written to", do="Choose another path")


def write(path: str, text: str) -> None:
    """Write a file in one move; ``-`` is stdout, and a pipe or a device is written to directly."""
    from memplan._text import write_whole

    if path == "-":
        sys.stdout.write(text)
    elif os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):  # /dev/null must stay what it is
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        write_whole(os.path.realpath(path), text)
