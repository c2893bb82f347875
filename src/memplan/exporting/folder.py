"""The folder that an export writes to, and the name of what is in it."""

from __future__ import annotations

import re
from pathlib import Path

from memplan.errors import InputError

KEYWORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
    """.split()  # noqa: SIM905  # thirty quoted words are harder to read
)


def c_name(text: str) -> str:
    """Return a C identifier for a name.

    Example:
        >>> c_name("ResNet-8"), c_name("2d"), c_name("int")
        ('resnet_8', 'net_2d', 'net_int')
    """
    found = re.sub(r"\W+", "_", text.encode("ascii", "replace").decode().replace("?", "_")).strip("_").lower()
    return f"net_{found}".rstrip("_") if not found or found[0].isdigit() or found in KEYWORDS else found


def prepared_folder(folder: Path, force: bool) -> Path:
    """Make a folder where it is missing.

    Raises:
        InputError: it holds files that no export wrote, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        theirs = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(
            f"{folder} ({error.strerror})", expected="a folder that can be written to", do="Name another"
        ) from error
    if theirs and not force and not _is_export(folder):
        raise InputError(
            f"{folder} holds other files ({', '.join(theirs[:3])}{', ...' if theirs[3:] else ''})",
            expected="an empty folder, or one that an export wrote",
            do="Name another, or write into it all the same: force=True (--force)",
        )
    return folder


def _is_export(folder: Path) -> bool:
    readme = folder / "README.md"
    return readme.is_file() and "Written by memplan" in readme.read_text(encoding="utf-8", errors="replace")
