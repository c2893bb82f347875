"""Check and create the folder that an export writes to."""

from __future__ import annotations

from pathlib import Path

from memplan.errors import InputError


def prepared_folder(folder: Path, name: str, force: bool) -> Path:
    """Create a folder if it is missing, and return it.

    Args:
        folder: its path.
        name: name of the export's files.
        force: accept a folder with other files in it.

    Raises:
        InputError: it contains files that no export of this name wrote, or cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(path.name for path in folder.iterdir())
        readme = folder / "README.md"
        is_export = (
            readme.is_file() and (folder / f"{name}.c").is_file()
            and "Written by memplan" in readme.read_text(encoding="utf-8", errors="replace")
        )  # fmt: skip
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise InputError(
            f"{folder} ({getattr(error, 'strerror', None) or error})",
            expected="a folder that can be written to",
            do="Name another",
        ) from error
    if files and not force and not is_export:
        raise InputError(
            f"{folder} holds other files ({', '.join(files[:3])}{', ...' if files[3:] else ''})",
            expected=f"an empty folder, or one that an export of the name {name} wrote",
            do="Name another, or write into it all the same: force=True (--force)",
        )
    return folder
