"""Peak against time, a panel for each model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import FLOOR, Case, Row, right
from .peers import PLAIN, SEQUENTIAL, group_of
from .report import MB, TITLES, Frontier

COLUMNS = 3
IN_A_LINE = 7
"""Names in a line of the legend, at most."""
WRONG = "wrong gradients"
LOOKS = {
    "eager": {"fmt": "s", "color": "black"},
    "checkpoint per block": {"fmt": "o", "color": "tab:red"},
    "checkpoint per layer": {"fmt": "D", "color": "tab:brown"},
    "checkpoint_sequential": {"fmt": ".", "color": "tab:orange"},
    "torch.compile": {"fmt": "^", "color": "tab:purple"},
    "its memory budgets": {"fmt": "v", "color": "tab:purple", "markersize": 4},
    "compile, checkpoint per block": {"fmt": "D", "color": "tab:purple", "markersize": 4},
    WRONG: {"fmt": "x", "color": "red"},
    "bf16 autocast": {"fmt": "P", "color": "tab:gray"},
    "memplan.fit": {"fmt": "-o", "color": "tab:blue", "markersize": 4},
    "memplan.fit, inductor": {"fmt": "-o", "color": "tab:green", "markersize": 4},
    "memplan.fit, reordered": {"fmt": "-s", "color": "tab:olive", "markersize": 4},
    "memplan.fit, lossy": {"fmt": "-d", "color": "tab:cyan", "markersize": 4},
}


def kind(row: Row) -> str:
    """Under which name a result stands in the legend."""
    method, case = row["method"], Case(row["model"], row["mode"], row["method"])
    if not right(row):
        return WRONG
    if case.ours:
        what = case.allow if case.allow != "exact" else case.engine
        return "memplan.fit" + ("" if what == "graph" else f", {what}")
    if method.startswith(SEQUENTIAL):
        return "checkpoint_sequential"
    if group_of(method) == "lossy":
        return "bf16 autocast"
    names = {
        "eager": "eager",
        "per_block": "checkpoint per block",
        "per_layer": "checkpoint per layer",
        PLAIN: "torch.compile",
        "compile-per_block": "compile, checkpoint per block",
    }
    return names.get(method, "its memory budgets")


def draw(frontiers: Sequence[Frontier], path: Path) -> None:
    """A PNG of all models; the bars are quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = math.ceil(len(frontiers) / COLUMNS)
    figure, grid = pyplot.subplots(height, COLUMNS, figsize=(4.2 * COLUMNS, 3.2 * height), squeeze=False)
    panels = list(grid.flat)
    for panel, frontier in zip(panels, frontiers, strict=False):
        fill(panel, frontier)
    for panel in panels[len(frontiers) :]:
        panel.axis("off")
    legends = [panel.get_legend_handles_labels() for panel in panels]
    handles = {label: handle for pair in legends for handle, label in zip(*pair, strict=True)}
    lines = math.ceil(len(handles) / IN_A_LINE)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=math.ceil(len(handles) / lines), frameon=False
    )
    figure.tight_layout(rect=(0, 0.3 * lines / (3.2 * height), 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def fill(panel: Any, frontier: Frontier) -> None:
    """One model."""
    groups: dict[str, list[Row]] = {}
    for row in frontier.everything:
        groups.setdefault(kind(row), []).append(row)
    for name, look in LOOKS.items():
        rows = groups.get(name, [])
        if rows:
            ratios = [row["ratio"] for row in rows]
            spread = [
                [max(0.0, row["ratio"] - row["quartiles"][0]) for row in rows],
                [max(0.0, row["quartiles"][1] - row["ratio"]) for row in rows],
            ]
            peaks = [row["above"] / MB for row in rows]
            panel.errorbar(peaks, ratios, yerr=spread, label=name, elinewidth=0.7, capsize=2, **look)
    floor = frontier.row(FLOOR)
    if floor is not None:
        bound = (floor["lower_bound"] - floor["resident"]) / MB
        panel.axvline(bound, color="gray", linestyle=":", label="lower bound")
    panel.set_title(TITLES[frontier.model], fontsize=9)
    panel.set_xlim(left=0)
    panel.set_xlabel("peak above weights and inputs, MB", fontsize=8)
    panel.set_ylabel("time, of eager", fontsize=8)
    panel.tick_params(labelsize=8)
