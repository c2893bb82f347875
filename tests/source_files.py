"""The files of the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "memplan"
FILES = sorted(SRC.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
