"""The folder that an export writes to: whose files are in it, and how they are replaced, all or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from memplan.errors import InputError

README_MARK = "Written by memplan"
"""Stands in NAME.md, by which an export is known."""
SHARED_FILE = "Makefile"
"""The same for every export."""


def files_of(name: str) -> set[str]:
    """Return the files that belong to an export of this name, compiled ones included."""
    own = (".c", ".h", "_weights.h", ".bin", ".json", ".md", ".o")
    return {*(f"{name}{ending}" for ending in own), f"test_{name}.c", f"test_{name}"}


def prepared_folder(folder: Path, name: str, force: bool) -> Path:
    """Create a folder if it is missing, and return it. Exports of other names may be in it.

    Args:
        folder: its path.
        name: name of the export's files.
        force: accept a folder with other files in it.

    Raises:
        InputError: it contains files that no export wrote, or another export has a file of one of these names, or it
            cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {path.name for path in folder.iterdir()}
        exports = {file[:-3] for file in files if file.endswith(".md") and _is_export(folder, file[:-3])}
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise InputError(
            f"{folder} ({getattr(error, 'strerror', None) or error})",
            expected="a folder that can be written to",
            do="Name another",
        ) from error
    for other in sorted(exports - {name}):
        shared = sorted(files_of(name) & files_of(other))
        if shared:
            raise InputError(
                f"{shared[0]} is a file of the export {other} in {folder}, too",
                expected="a name whose files are no other export's",
                do="Choose another name or folder",
            )
    files_of_exports = {file for export in exports for file in files_of(export)} | ({SHARED_FILE} if exports else set())
    foreign = sorted(files - files_of_exports)
    if foreign and not force:
        raise InputError(
            f"{folder} holds other files ({', '.join(foreign[:3])}{', ...' if foreign[3:] else ''})",
            expected="an empty folder, or one that exports wrote",
            do="Name another, or write into it all the same: force=True (--force)",
        )
    return folder


def _is_export(folder: Path, name: str) -> bool:
    """Return whether a folder has the C file of an export, and its NAME.md with memplan's mark."""
    readme = folder / f"{name}.md"
    is_complete = readme.is_file() and (folder / f"{name}.c").is_file()
    return is_complete and README_MARK in readme.read_text(encoding="utf-8", errors="replace")


def replace_files(folder: Path, name: str, contents: Mapping[str, str | bytes]) -> None:
    """Write the files of an export in place of those that one of this name wrote before: all, or none.

    All new files are written before the first old file is moved away; after an error the old files are moved back.

    Raises:
        OSError: they cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".memplan-", dir=folder) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        old.mkdir()
        for file, content in contents.items():
            (new / file).write_bytes(content.encode() if isinstance(content, str) else content)
        outdated = {f"{name}.bin", f"{name}_weights.h"} - set(contents)  # an export has one of them
        try:
            for file in (*contents, *outdated):
                if os.path.lexists(folder / file):
                    os.replace(folder / file, old / file)
            for file in contents:
                os.replace(new / file, folder / file)
        except BaseException:  # an interrupt, too
            for file in contents:
                if not (new / file).exists():  # it was moved to the folder already
                    (folder / file).unlink(missing_ok=True)
            for file in old.iterdir():
                os.replace(file, folder / file.name)
            raise
