"""The table of what tools/gpu/fit.py measured on CUDA cards. Needs no GPU; what has no figures is said to have none.

    python benchmarks/fit_gpu.py

Reads benchmarks/results/fit_gpu/*.json and writes benchmarks/results/fit_gpu.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
if str(ROOT / "tools" / "gpu") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools" / "gpu"))

from fit_steps import LARGE, TITLES  # noqa: E402  # of tools/gpu/

HEADS = ("step", "card", "method", "budget, GB", "reserved, GB", "held", "time", "of copy bandwidth")
NONE = "not yet measured"
GB = 1_000_000_000
Row = dict[str, Any]


def table(results: Sequence[Row]) -> list[str]:
    """Markdown: a row for each case, and for each large step without any one that says so.

    Args:
        results: the files' contents.
    """
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * 3}{'--:|' * 5}"]
    for step, title in TITLES.items():
        rows = [(one, row) for one in results for row in one["cases"] if row["step"] == step]
        cells = [_cells(title, one, row) for one, row in rows]
        if not cells and step in LARGE:
            cells = [(title, "-", "-", *(NONE for _ in HEADS[3:]))]
        lines += [f"| {' | '.join(row)} |" for row in cells]
    return lines


def _cells(title: str, one: Row, row: Row) -> tuple[str, ...]:
    head = (title, f"{one['gpu']}, torch {one['torch']}", row["method"])
    given = row.get("given", row["budget"])
    budget = "" if given is None else f"{given / GB:.2f}"
    if "error" in row:
        said = shorten(row["error"].replace("|", "/").removeprefix("memplan.errors."), 100, placeholder=" ...")
        return *head, budget, NONE, "", "", said
    low, high = row["quartiles"]
    held = "" if given is None else "yes" if row["reserved"] <= given else "**no**"
    moved = row.get("moved")
    share = NONE if not moved else f"{moved / row['seconds'] / row['copy_bytes_per_second']:.0%}"
    return *head, budget, f"{row['reserved'] / GB:.2f}", held, f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]", share


def main() -> int:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / "fit_gpu").glob("*.json"))]
    (RESULTS / "fit_gpu.md").write_text("\n".join([*table(found), ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
