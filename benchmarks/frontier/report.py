"""The results as tables: all of them, and the few lines for the README."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .cases import FIT, FLOOR, Mode, Row, Shards, modes_of
from .models import MODELS, TITLES

MB = 1_000_000
ERROR, HALF = 0.01, 0.5
PICTURE = "fit_frontier.png"


@dataclass(frozen=True)
class Frontier:
    """What was measured of one model in one mode."""

    model: str
    mode: Mode
    rows: Sequence[Row]

    def row(self, method: str) -> Row | None:
        """The result of a method."""
        return next((row for row in self.rows if row["method"] == method), None)

    @cached_property
    def ours(self) -> list[Row]:
        """Results of memplan.fit, from the least bytes on."""
        return sorted((row for row in self.rows if row["method"].startswith(FIT)), key=lambda row: row["total"])

    @cached_property
    def peers(self) -> list[Row]:
        """Results of the others, from the least bytes on."""
        return sorted((row for row in self.rows if not row["method"].startswith(FIT)), key=lambda row: row["total"])

    @property
    def share_of_added_time(self) -> float | None:
        """What fit adds at the peak of per-block checkpointing, relative to what that adds."""
        other, mine = self.row("per_block"), self.row(f"{FIT}per_block")
        return None if other is None or mine is None else (mine["ratio"] - 1) / (other["ratio"] - 1)

    @property
    def closed(self) -> float | None:
        """Share of the distance from the lowest peer to the lower bound that our floor closes."""
        floor = self.row(FLOOR)
        if floor is None or not self.peers:
            return None
        lowest = self.peers[0]["total"]
        distance = lowest - floor["lower_bound"]
        return (lowest - floor["total"]) / distance if distance > 0 else 1.0

    def complaints(self) -> list[str]:
        """Where it falls short of what is promised, in words."""
        name, found = f"{self.model}, {self.mode}", list[str]()
        for row in self.ours:
            if row["total"] > row["given"]:
                found.append(f"{name}, {row['method']}: {row['total']:,} bytes measured, {row['given']:,} given")
            if abs(error := row["predicted"] / row["total"] - 1) > ERROR:
                found.append(f"{name}, {row['method']}: the predicted peak is {error:+.2%} off")
            if not (row["gradients_equal"] and row["buffers_equal"] and row["random_state_equal"]):
                found.append(f"{name}, {row['method']}: not equal to eager")
        if self.mode == "fresh":
            share, closed, floor = self.share_of_added_time, self.closed, self.row(FLOOR)
            if share is not None and share > HALF:
                found.append(f"{name}: at the peak of per-block checkpointing {share:.0%} of its added time")
            if floor is not None and floor["total"] > self.peers[0]["total"]:
                found.append(f"{name}: the floor is above the lowest peak of a peer")
            if closed is not None and closed < HALF:
                found.append(f"{name}: {closed:.0%} of the distance to the lower bound closed")
        return found


def frontiers(shards: Shards) -> list[Frontier]:
    """Every model and mode that has a result."""
    found: list[Frontier] = []
    for model in MODELS:
        rows = shards.rows(model)
        for mode in modes_of(model):
            of_mode = [row for row in rows if row["mode"] == mode]
            if of_mode:
                found.append(Frontier(model, mode, of_mode))
    return found


def megabytes(number: float) -> str:
    return f"{number / MB:,.1f}"


def added(row: Row | None) -> str:
    return "-" if row is None else f"{row['ratio'] - 1:+.0%}"


def above(row: Row | None) -> str:
    return "-" if row is None else megabytes(row["above"])


def share(number: float | None) -> str:
    return "-" if number is None else f"{number:.0%}"


Cell = Callable[[Frontier], str]
SUMMARY: dict[str, Cell] = {
    "step": lambda f: TITLES[f.model],
    "eager": lambda f: above(f.row("eager")),
    "checkpoint per block": lambda f: f"{above(f.row('per_block'))}, {added(f.row('per_block'))}",
    "fit, at most that": lambda f: f"{above(f.row(f'{FIT}per_block'))}, {added(f.row(f'{FIT}per_block'))}",
    "lowest peer": lambda f: f"{above(f.peers[0])}, {added(f.peers[0])}" if f.peers else "-",
    "fit, floor": lambda f: f"{above(f.row(FLOOR))}, {added(f.row(FLOOR))}",
    "lower bound": lambda f: megabytes(floor["lower_bound"] - floor["resident"]) if (floor := f.row(FLOOR)) else "-",
    "distance closed": lambda f: share(f.closed),
}
DETAILS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row["mode"],
    "method": lambda row: row["method"],
    "budget": lambda row: megabytes(row["given"]) if "given" in row else "",
    "total": lambda row: megabytes(row["total"]),
    "above": lambda row: megabytes(row["above"]),
    "predicted": lambda row: f"{row['predicted'] / row['total'] - 1:+.2%}" if "predicted" in row else "",
    "time": lambda row: f"{row['ratio']:.3f} [{row['quartiles'][0]:.3f}, {row['quartiles'][1]:.3f}]",
    "gradients": lambda row: "equal" if row["gradients_equal"] else "differ",
    "buffers": lambda row: "equal" if row["buffers_equal"] else "differ",
    "fit, s": lambda row: f"{row['fit_seconds']:.1f}" if "fit_seconds" in row else "",
}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Markdown, the first columns flush left."""
    rule = ["---" if index < left else "--:" for index in range(len(heads))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def versions(found: Sequence[Frontier]) -> str:
    row = found[0].rows[0]
    pairs = sorted({row["pairs"] for frontier in found for row in frontier.rows})
    return (
        f"torch {row['torch']}, python {platform.python_version()}, {row['threads']} threads, "
        f"{' to '.join(map(str, dict.fromkeys((pairs[0], pairs[-1]))))} pairs"
    )


def short(found: Sequence[Frontier]) -> list[str]:
    """The lines for the README: a row for each model without gradients before the step, and the promises."""
    fresh = [frontier for frontier in found if frontier.mode == "fresh"]
    rows = [[cell(frontier) for cell in SUMMARY.values()] for frontier in fresh]
    lines = [
        "MB at the peak above weights, buffers and inputs, and time added to eager's, median of alternating pairs "
        f"({versions(found)}).",
        "",
        *table(list(SUMMARY), rows, 1),
    ]
    ours = [row for frontier in found for row in frontier.ours]
    if ours:
        errors = [abs(row["predicted"] / row["total"] - 1) for row in ours]
        equal = sum(row["gradients_equal"] and row["buffers_equal"] for row in ours)
        over = sum(row["total"] > row["given"] for row in ours)
        lines += [
            "",
            f"**{len(ours)} budgets: {over} exceeded, largest error of the predicted peak {max(errors):.2%}, "
            f"gradients and buffers bitwise equal to eager's in {equal}.**",
        ]
    early = [frontier for frontier in found if frontier.mode == "update" and frontier.row(FLOOR)]
    for frontier in early:
        text = f"{TITLES[frontier.model]}, with AdamW's update: eager {above(frontier.row('eager'))} MB"
        lines += ["", f"{text}, fit with the optimizer early {above(frontier.row(FLOOR))} MB at its floor."]
    return lines


def full(found: Sequence[Frontier]) -> list[str]:
    """Everything that was measured."""
    lines = ["# Peak against time", "", *short(found), "", f"![Peak against time]({PICTURE})", ""]
    lines += [
        "In mode `held` gradients are there before the step and count as resident; in mode `update` AdamW's update is "
        "a part of it. `total` and `above`, with and without what is resident, are measured, in MB; `predicted` is by "
        "how much the plan's peak is off; `time` is relative to eager, median and quartiles; `gradients` (parameters "
        "in mode `update`) and `buffers` are compared bit by bit with eager's after one step.",
    ]
    for model in dict.fromkeys(frontier.model for frontier in found):
        rows = [row for frontier in found if frontier.model == model for row in (*frontier.peers, *frontier.ours)]
        cells = [[cell(row) for cell in DETAILS.values()] for row in rows]
        lines += ["", f"## {TITLES[model]}", "", *table(list(DETAILS), cells, 2)]
    return lines


def write(shards: Shards, folder: Path) -> list[str]:
    """Write the tables and the picture; returns where the results fall short of what is promised."""
    found = frontiers(shards)
    if not found:
        return []
    there = {(frontier.model, frontier.mode) for frontier in found if frontier.row(FLOOR)}
    missing = [f"{model}, {mode}: no floor measured" for model in MODELS for mode in modes_of(model)
               if (model, mode) not in there]  # fmt: skip
    quick = sum(row.get("quick", False) for frontier in found for row in frontier.rows)
    complaints = [*missing, *(text for frontier in found for text in frontier.complaints())]
    if quick:
        complaints.append(f"{quick} results are quick ones")
    for name, lines in (("fit_frontier.md", full(found)), ("fit_frontier_short.md", short(found))):
        (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    from .picture import draw

    draw([frontier for frontier in found if frontier.mode == "fresh"], folder / PICTURE)
    return complaints
