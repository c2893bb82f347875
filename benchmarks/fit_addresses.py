"""How much of what a planned step reserves on a card is fragmentation, at most?

    python benchmarks/fit_addresses.py

Reads benchmarks/results/fit_dry.json: planned steps in processes that see an emulated card, where torch's own allocator
counts (`python benchmarks/fit_dry.py`). What it reserves at most less what it has allocated at most bounds what other
addresses could save, as no addresses take less than what is allocated. Writes fit_addresses.json and fit_addresses.md.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def unallocated(cell: Mapping[str, Any]) -> float:
    """Return the share of a cell's reserved bytes that is not allocated at the peak of allocated bytes."""
    return 1 - cell["allocated"] / cell["reserved"]


def report(cells: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each step and engine, and the report's text. ``cells``: entries of fit_dry.json; cells that
    ended in an error do not count."""
    shares = dict[tuple[str, str], list[float]]()
    for cell in cells:
        if "error" not in cell:
            shares.setdefault((cell["step"], cell["engine"]), []).append(unallocated(cell))
    rows = [
        {"step": step, "engine": engine, "least": min(values), "median": statistics.median(values), "most": max(values)}
        for (step, engine), values in shares.items()
    ]
    every = [value for values in shares.values() for value in values]
    lines = ["| step | engine | least | median | most |", "|---|---|--:|--:|--:|"]
    lines += [
        f"| {row['step']} | {row['engine']} | {row['least']:.1%} | {row['median']:.1%} | {row['most']:.1%} |"
        for row in rows
    ]
    median = statistics.median(every)
    said = f"{len(every)} planned steps: in the median {median:.1%} of the reserved bytes are not allocated at the peak"
    return rows, "\n".join([*lines, "", said, ""])


if __name__ == "__main__":
    rows, text = report(json.loads((RESULTS / "fit_dry.json").read_text(encoding="utf-8")))
    (RESULTS / "fit_addresses.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "fit_addresses.md").write_text(text, encoding="utf-8")
    print(text)
