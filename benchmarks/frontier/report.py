"""The results as tables: all of them, and the few lines for the README."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .cases import (
    FIT,
    FLOOR,
    INDUCTOR,
    INDUCTOR_FLOOR,
    LOSSY,
    LOSSY_MEGABYTES,
    REORDERED,
    REORDERED_MEGABYTES,
    Case,
    Mode,
    Row,
    Shards,
    modes_of,
    right,
)
from .models import MODELS, TITLES
from .peers import LOWEST_LOSSY, PLAIN, group_of

MB = 1_000_000
ERROR, HALF = 0.01, 0.5
INDUCTOR_ERROR = 0.05
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

    def _sorted(self, wanted: Callable[[Row, Case], bool]) -> list[Row]:
        """Results from the least bytes on."""
        rows = (row for row in self.rows if wanted(row, Case(row["model"], row["mode"], row["method"])))
        return sorted(rows, key=lambda row: row["total"])

    @cached_property
    def ours(self) -> list[Row]:
        """Results of memplan.fit, engine `graph`."""
        return self._sorted(lambda _, case: case.ours and case.engine == "graph" and case.allow == "exact")

    @cached_property
    def inductor(self) -> list[Row]:
        """Results of memplan.fit, engine `inductor`."""
        return self._sorted(lambda _, case: case.ours and case.engine == "inductor" and case.allow == "exact")

    @cached_property
    def lossy(self) -> list[Row]:
        """Results of memplan.fit with lossy levers, either engine."""
        return self._sorted(lambda _, case: case.ours and case.allow == "lossy")

    @cached_property
    def reordered(self) -> list[Row]:
        """Results of memplan.fit with sums in another order."""
        return self._sorted(lambda _, case: case.ours and case.allow == "reordered")

    @cached_property
    def peers(self) -> list[Row]:
        """Results of eager mode and checkpoints."""
        return self._sorted(lambda row, case: not case.ours and group_of(row["method"]) == "eager")

    @cached_property
    def compiled(self) -> list[Row]:
        """Results of torch.compile whose gradients are right."""
        return self._sorted(lambda row, case: not case.ours and group_of(row["method"]) == "compiled" and right(row))

    @cached_property
    def wrong(self) -> list[Row]:
        """Results whose gradients are wrong."""
        return self._sorted(lambda row, _: not right(row))

    @cached_property
    def lossy_peers(self) -> list[Row]:
        """Results of autocast."""
        return self._sorted(lambda row, case: not case.ours and group_of(row["method"]) == "lossy")

    @property
    def everything(self) -> list[Row]:
        """All results, kind by kind."""
        compiled = [row for row in self.wrong if row not in (*self.ours, *self.inductor, *self.reordered)]
        peers = (*self.peers, *self.compiled, *compiled, *self.lossy_peers)
        return [*peers, *self.ours, *self.inductor, *self.reordered, *self.lossy]

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
            found += self._complaints_of_inductor()
        return found + self._complaints_of_reordered() + self._complaints_of_lossy()

    def _complaints_of_inductor(self) -> list[str]:
        name, found = f"{self.model}, {self.mode}", list[str]()
        for row in self.inductor:
            found += _over(name, row)
            if abs(error := row["predicted"] / row["total"] - 1) > INDUCTOR_ERROR:
                found.append(f"{name}, {row['method']}: the predicted peak is {error:+.2%} off")
            if not right(row):
                found.append(f"{name}, {row['method']}: gradients are wrong ({row['worst']:.1%} in {row['worst_in']})")
            found += _slower(name, row)
        floor = self.row(INDUCTOR_FLOOR)
        if floor is not None and self.compiled and floor["total"] >= self.compiled[0]["total"]:
            found.append(f"{name}: the compiled floor is not below the lowest peak of a compiled peer")
        return found

    def _complaints_of_reordered(self) -> list[str]:
        name, found = f"{self.model}, {self.mode}", list[str]()
        megabytes = REORDERED_MEGABYTES.get((self.model, self.mode))
        if megabytes is not None and not self.reordered:
            found.append(f"{name}: no reordered plan in {megabytes} MB")
        for row in self.reordered:
            found += _over(name, row)
            if not right(row):
                found.append(f"{name}, {row['method']}: gradients are wrong ({row['worst']:.1%} in {row['worst_in']})")
        return found

    def _complaints_of_lossy(self) -> list[str]:
        name, megabytes = f"{self.model}, {self.mode}", LOSSY_MEGABYTES.get((self.model, self.mode))
        found = [text for row in self.lossy for text in (*_over(name, row), *_slower(name, row))]
        if megabytes is not None and not any(row["method"].endswith(f"{megabytes}MB") for row in self.lossy):
            found.append(f"{name}: no lossy plan in {megabytes} MB")
        return found


def _over(name: str, row: Row) -> list[str]:
    within = row["total"] <= row["given"]
    return [] if within else [f"{name}, {row['method']}: {row['total']:,} bytes measured, {row['given']:,} given"]


def _slower(name: str, row: Row) -> list[str]:
    """Whether it takes more time than the peer that it stands beside, by more than the spread."""
    times = row.get("beside")
    slower = times is not None and times["quartiles"][0] > 1
    return [f"{name}, {row['method']}: {times['ratio']:.2f} times as long as that peer"] if slower else []


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


def lowest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=lambda row: (row["total"], row["ratio"]), default=None)


def fastest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=lambda row: row["ratio"], default=None)


def pair(row: Row | None) -> str:
    return "-" if row is None else f"{above(row)}, {added(row)}"


def duel(row: Row | None) -> str:
    """The same, with the share of that peer's time, by turns in one process."""
    times = None if row is None else row.get("beside")
    return pair(row) if times is None else f"{pair(row)}, {times['ratio']:.2f} of its time"


def against(frontier: Frontier, row: Row | None, kind: str) -> Row | None:
    """Ours with the peak of a peer as its budget."""
    return None if row is None else frontier.row(f"{FIT}{kind}{row['method']}")


def lossy_at(frontier: Frontier, name: str) -> Row | None:
    """Ours with lossy levers and a budget by that name, of the engine that takes less time."""
    rows = (frontier.row(f"{FIT}{engine}{LOSSY}{name}") for engine in ("", INDUCTOR))
    return fastest([row for row in rows if row is not None])


def wrong(frontier: Frontier) -> str:
    rows = frontier.wrong
    return f"{len(rows)} of {len(rows) + len(frontier.compiled)}, up to {worst(rows)}" if rows else "-"


def worst(rows: Sequence[Row]) -> str:
    return f"{max(row['worst'] for row in rows):.0%}"


def gradients(row: Row) -> str:
    """What became of a result's gradients, in words."""
    if row["gradients_equal"]:
        return "equal"
    said = row.get("gradients", "differ")
    if said == "wrong":
        return f"**wrong gradients** ({row['worst']:.0%} in {row['worst_in']})"
    return said if "gradient_error" not in row else f"{said}, {row['gradient_error']:.1e} off"


def ratio_of(times: Row) -> str:
    """A median of pairs with its quartiles."""
    low, high = times["quartiles"]
    return f"{times['ratio']:.3f} [{low:.3f}, {high:.3f}]"


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
COMPILED: dict[str, Cell] = {
    "step": lambda f: TITLES[f.model],
    "torch.compile": lambda f: pair(f.row(PLAIN)),
    "fit at its peak": lambda f: duel(against(f, f.row(PLAIN), INDUCTOR)),
    "fastest compiled peer": lambda f: pair(fastest(f.compiled)),
    "fit at its peak, too": lambda f: duel(against(f, fastest(f.compiled), INDUCTOR)),
    "lowest compiled peer": lambda f: pair(lowest(f.compiled)),
    "fit at that peak": lambda f: duel(against(f, lowest(f.compiled), INDUCTOR)),
    "fit, floor": lambda f: pair(f.row(INDUCTOR_FLOOR)),
    "peers with wrong gradients": wrong,
}
LOSSY_CELLS: dict[str, Cell] = {
    "step": lambda f: TITLES[f.model],
    "autocast": lambda f: pair(f.row("autocast")),
    "fit at its peak": lambda f: duel(lossy_at(f, "autocast")),
    "autocast, checkpoint per block": lambda f: pair(f.row(LOWEST_LOSSY)),
    "fit at that peak": lambda f: duel(lossy_at(f, LOWEST_LOSSY)),
}
DETAILS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row["mode"],
    "method": lambda row: row["method"],
    "budget": lambda row: megabytes(row["given"]) if "given" in row else "",
    "total": lambda row: megabytes(row["total"]),
    "above": lambda row: megabytes(row["above"]),
    "predicted": lambda row: f"{row['predicted'] / row['total'] - 1:+.2%}" if "predicted" in row else "",
    "time": ratio_of,
    "beside that peer": lambda row: ratio_of(row["beside"]) if "beside" in row else "",
    "gradients": gradients,
    "buffers": lambda row: "equal" if row["buffers_equal"] else "differ",
    "fit, s": lambda row: f"{row['fit_seconds']:.1f}" if "fit_seconds" in row else "",
}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Markdown, the first columns flush left."""
    rule = ["---" if index < left else "--:" for index in range(len(heads))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def versions(found: Sequence[Frontier]) -> str:
    row = found[0].rows[0]
    pairs = sorted({row["pairs"] for frontier in found if frontier.mode != "held" for row in frontier.rows})
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
    lines += compiled(fresh)
    lines += reordered_targets(found)
    lines += lossy_targets(found)
    early = [frontier for frontier in found if frontier.mode == "update" and frontier.row(FLOOR)]
    for frontier in early:
        text = f"{TITLES[frontier.model]}, with AdamW's update: eager {above(frontier.row('eager'))} MB"
        lines += ["", f"{text}, fit with the optimizer early {above(frontier.row(FLOOR))} MB at its floor."]
    return lines


def compiled(fresh: Sequence[Frontier]) -> list[str]:
    """The table of the compiled peers and of the engine `inductor`, where there are any."""
    there = [frontier for frontier in fresh if frontier.compiled or frontier.inductor]
    if not there:
        return []
    rows = [[cell(frontier) for cell in COMPILED.values()] for frontier in there]
    text = (
        "Beside `torch.compile` and its `activation_memory_budget` (0.9 to 0.0), with `engine='inductor'`. Peers with "
        "wrong gradients, held against float64, are not counted. Added time is on top of eager's; `of its time` is by "
        "turns with that very peer."
    )
    return ["", text, "", *table(list(COMPILED), rows, 1), *_kept([row for one in there for row in one.inductor])]


def _kept(rows: Sequence[Row]) -> list[str]:
    """How the budgets of the engine `inductor` fared."""
    if not rows:
        return []
    over = [row["total"] - row["given"] for row in rows if row["total"] > row["given"]]
    errors = [abs(row["predicted"] / row["total"] - 1) for row in rows]
    exceeded = f"{len(over)} exceeded" + (f" (by at most {max(over)} bytes)" if over else "")
    near = sum(map(right, rows))
    return [
        "",
        f"**{len(rows)} budgets with fused kernels: {exceeded}, largest error of the predicted peak {max(errors):.2%}, "
        f"gradients right, held against float64, in {near}.**",
    ]


def reordered_targets(found: Sequence[Frontier]) -> list[str]:
    """The table of plans that may add in another order, beside eager mode and the exact floor."""
    rows = list[list[str]]()
    for frontier in found:
        megabytes = REORDERED_MEGABYTES.get((frontier.model, frontier.mode))
        ours = frontier.row(f"{FIT}{REORDERED}{megabytes}MB")
        if ours is not None:
            early = ", AdamW early" if frontier.mode == "update" else ""
            eager, floor = above(frontier.row("eager")), above(frontier.row(FLOOR))
            said = gradients(ours) if frontier.mode == "fresh" else "right, by the proof of `fit`"
            rows.append([TITLES[frontier.model] + early, eager, floor, pair(ours), said])
    heads = ["step", "eager", "fit, exact floor", "fit, reordered", "gradients"]
    text = "With `allow='reordered'`, segments run in pieces, below the floors of exact plans:"
    return ["", text, "", *table(heads, rows, 1)] if rows else []


def lossy_targets(found: Sequence[Frontier]) -> list[str]:
    """A line for each step that lossy plans are to do with so many megabytes."""
    lines: list[str] = []
    for frontier in found:
        megabytes = LOSSY_MEGABYTES.get((frontier.model, frontier.mode))
        ours = lossy_at(frontier, f"{megabytes}MB")
        if ours is not None:
            early = ", with the optimizer early" if frontier.mode == "update" else ""
            peers = "".join(f"; {_lossy_peer(row, ours)}" for row in frontier.lossy_peers)
            lines += ["", f"{TITLES[frontier.model]}, lossy{early}: {pair(ours)}{peers}."]
    return lines


def _lossy_peer(row: Row, ours: Row) -> str:
    """A peer in bfloat16; of the one that ours was timed beside, by turns, the share of its time that ours takes."""
    text = f"{row['method'].replace('_', ' ')} {pair(row)}"
    timed = ours.get("beside") if row["method"] == LOWEST_LOSSY else None
    return text if timed is None else f"{text}, ours in {timed['ratio']:.2f} of its time"


def lossy(fresh: Sequence[Frontier]) -> list[str]:
    """The table of the peers in bfloat16 and of lossy plans, where there are any."""
    there = [frontier for frontier in fresh if frontier.lossy_peers or frontier.lossy]
    rows = [[cell(frontier) for cell in LOSSY_CELLS.values()] for frontier in there]
    return ["", "In bfloat16, with `allow='lossy'`:", "", *table(list(LOSSY_CELLS), rows, 1)] if rows else []


def unmeasured(failed: Sequence[Row]) -> list[str]:
    """What has no figures, and why."""
    if not failed:
        return []
    rows = [[TITLES[row["model"]], row["mode"], row["method"], row["error"].replace("|", "/")] for row in failed]
    return ["", "## Not measured", "", *table(["step", "mode", "method", "because"], rows, 4)]


def full(found: Sequence[Frontier], failed: Sequence[Row] = ()) -> list[str]:
    """Everything that was measured."""
    fresh = [frontier for frontier in found if frontier.mode == "fresh"]
    lines = ["# Peak against time", "", *short(found), *lossy(fresh), "", f"![Peak against time]({PICTURE})", ""]
    lines += [
        "In mode `held` gradients are there before the step and count as resident (it is about bytes: two pairs); in "
        "mode `update` AdamW's update is a part of it. "
        "`total` and `above`, with and without what is resident, are measured, in MB; `predicted` is by "
        "how much the plan's peak is off; `time` is relative to eager, median and quartiles; `gradients` (parameters "
        "in mode `update`) and `buffers` are compared bit by bit with eager's after one step. Gradients that are not "
        "equal are held against float64: `right` where the error (L2, of each parameter) is at most twice that of "
        "eager mode or of torch.compile and 64 eps of the largest gradient. `beside that peer` is the time relative to "
        "the peer whose peak is the budget (of so many MB: autocast with checkpoints per block), by turns in one "
        "process, median and quartiles.",
    ]
    for model in dict.fromkeys(frontier.model for frontier in found):
        rows = [row for frontier in found if frontier.model == model for row in frontier.everything]
        cells = [[cell(row) for cell in DETAILS.values()] for row in rows]
        lines += ["", f"## {TITLES[model]}", "", *table(list(DETAILS), cells, 2)]
    return [*lines, *unmeasured(failed)]


def write(shards: Shards, folder: Path) -> list[str]:
    """Write the tables and the picture; returns where the results fall short of what is promised."""
    found = frontiers(shards)
    if not found:
        return []
    there = {(frontier.model, frontier.mode) for frontier in found if frontier.row(FLOOR)}
    missing = [f"{model}, {mode}: no floor measured" for model in MODELS for mode in modes_of(model)
               if (model, mode) not in there]  # fmt: skip
    missing += [f"{model}: no compiled floor measured" for model in MODELS
                if not any(frontier.row(INDUCTOR_FLOOR) for frontier in found if frontier.model == model)]  # fmt: skip
    quick = sum(row.get("quick", False) for frontier in found for row in frontier.rows)
    complaints = [*missing, *(text for frontier in found for text in frontier.complaints())]
    if quick:
        complaints.append(f"{quick} results are quick ones")
    failed = [row for model in MODELS for row in shards.failed(model)]
    for name, lines in (("fit_frontier.md", full(found, failed)), ("fit_frontier_short.md", short(found))):
        (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    from .picture import draw

    draw([frontier for frontier in found if frontier.mode == "fresh"], folder / PICTURE)
    return complaints
