"""A case is one process and one shard: a model, a mode, and who makes it fit into what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .models import MODELS
from .peers import LOSSY as AUTOCAST
from .peers import LOWEST_LOSSY, PLAIN, group_of, peers

Mode = Literal["fresh", "held", "update"]
"""``fresh``: no gradients before the step. ``held``: they are there, and are added to. ``update``: an optimizer
updates the parameters at the end of the step, in `fit` early."""
MODES: tuple[Mode, ...] = get_args(Mode)
Row = dict[str, Any]

FIT = "fit-"
FLOOR = "fit-floor"
INDUCTOR, LOSSY, REORDERED = "inductor-", "lossy-", "reordered-"
"""After ``fit-``: the engine, where it is not `graph`, and then the grade, where it is not `exact`."""
INDUCTOR_FLOOR = f"{FIT}{INDUCTOR}floor"
FRACTIONS = tuple(round(0.1 * tenth, 1) for tenth in range(9, 0, -1))
UPDATED = ("gpt", "gpt_dropout", "resnet18")
"""Models that are run in mode ``update`` too."""
LOSSY_MEGABYTES: dict[tuple[str, Mode], int] = {("resnet18", "fresh"): 120, ("resnet18", "update"): 76}
"""What lossy plans are to do with, above what is resident; in mode ``update`` the optimizer is early."""
REORDERED_MEGABYTES: dict[tuple[str, Mode], int] = {
    ("resnet18", "fresh"): 105, ("resnet18", "update"): 80, ("resnet50", "fresh"): 190, ("basic_unet", "fresh"): 70,
    ("unetr", "fresh"): 110,
}  # fmt: skip
"""The same of plans that may add in another order: segments run in pieces there."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    model: str
    mode: Mode
    method: str
    """A peer's name, or ``fit-``, ``inductor-`` and ``lossy-`` or ``reordered-`` where they are, and what its budget
    is: ``0.8`` of eager's total, a peer's peak, so many ``MB``, or the ``floor``."""
    budget: int | None = None

    @property
    def file(self) -> str:
        """Name of its shard."""
        return f"{self.model}.{self.mode}.{self.method}.json"

    @property
    def ours(self) -> bool:
        """Whether memplan makes it fit."""
        return self.method.startswith(FIT)

    @property
    def engine(self) -> str:
        """Of ours: which one runs it."""
        return "inductor" if self.method.startswith(f"{FIT}{INDUCTOR}") else "graph"

    @property
    def allow(self) -> str:
        """Of ours: what its levers may change."""
        name = self.method.removeprefix(FIT).removeprefix(INDUCTOR)
        return next((grade[:-1] for grade in (LOSSY, REORDERED) if name.startswith(grade)), "exact")

    @property
    def beside(self) -> str:
        """Of ours: the peer whose peak is its budget, if it is one's; of a lossy plan in so many ``MB``, the lowest."""
        name = self.method.removeprefix(FIT).removeprefix(INDUCTOR).removeprefix(LOSSY)
        return LOWEST_LOSSY if self.allow == "lossy" and name.endswith("MB") else name


class Shards:
    """The results that are there, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, case: Case, *, quick: bool = True) -> Row | None:
        """Its result, if there is one without an error, for the same budget, and (if not ``quick``) no quick one."""
        path = self.folder / case.file
        if not path.exists():
            return None
        row = json.loads(path.read_text(encoding="utf-8"))
        stale = "error" in row or row["budget"] != case.budget or (row.get("quick", False) and not quick)
        return None if stale else row

    def write(self, case: Case, row: Row) -> Row:
        """Store a result, whole or not at all."""
        row = {**asdict(case), **row}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / case.file
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
        return row

    def remove(self, model: str, mode: Mode, unwanted: Callable[[Case], bool]) -> None:
        """Delete results of a model in a mode."""
        for path in self.folder.glob(f"{model}.{mode}.*.json"):
            if unwanted(Case(model, mode, path.name.removeprefix(f"{model}.{mode}.").removesuffix(".json"))):
                path.unlink()

    def rows(self, model: str) -> list[Row]:
        """Every result of a model that is no error, by name of the file."""
        found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob(f"{model}.*.json")))
        return [row for row in found if "error" not in row]

    def failed(self, model: str) -> list[Row]:
        """What could not be measured of a model, with the reason."""
        found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob(f"{model}.*.json")))
        return [row for row in found if "error" in row]


def modes_of(model: str) -> tuple[Mode, ...]:
    """The modes that a model is run in."""
    return MODES if model in UPDATED else ("fresh", "held")


def peer_cases(model: str, mode: Mode) -> list[Case]:
    """Every peer in mode ``fresh``; in the others eager mode and checkpoints, and autocast where a lossy plan is to be
    held against it."""
    subject = MODELS[model]()
    lossy = AUTOCAST if (model, mode) in LOSSY_MEGABYTES else ()
    names = peers(subject) if mode == "fresh" else ["eager", *subject.blocks, *lossy]
    return [Case(model, mode, name) for name in names]


def front(rows: list[Row]) -> list[Row]:
    """Those that no other beats in both peak and time."""
    return [
        row
        for row in rows
        if not any(
            other["total"] <= row["total"] and other["ratio"] <= row["ratio"] and other is not row for other in rows
        )
    ]


def fit_cases(model: str, mode: Mode, peers_rows: list[Row], smallest: int) -> list[Case]:
    """Budgets of 0.9, 0.8 ... of eager's total, the peaks of per-block checkpointing and of the best eager peers."""
    eager = next(row for row in peers_rows if row["method"] == "eager")
    budgets = {f"{fraction}": int(fraction * eager["total"]) for fraction in FRACTIONS}
    others = [row for row in peers_rows if row is not eager and group_of(row["method"]) == "eager"]
    best = front([eager, *others])
    budgets |= {row["method"]: row["total"] for row in others if row in best or row["method"].startswith("per_")}
    return [Case(model, mode, f"{FIT}{name}", budget) for name, budget in budgets.items() if budget >= smallest]


def right(row: Row) -> bool:
    """Whether a result's gradients are those of the step, as far as they were compared."""
    return row.get("gradients") != "wrong"


def compiled_cases(model: str, mode: Mode, peers_rows: list[Row], smallest: int) -> list[Case]:
    """For the engine `inductor`: the peaks of torch.compile as it is, and of the compiled peers that are right and that
    none of them beats in both peak and time. Who is ahead of these is ahead of all."""
    rows = [row for row in peers_rows if group_of(row["method"]) == "compiled" and right(row)]
    best = front(rows)
    return [
        Case(model, mode, f"{FIT}{INDUCTOR}{row['method']}", row["total"])
        for row in rows
        if row["total"] >= smallest and (row in best or row["method"] == PLAIN)
    ]


def reordered_cases(model: str, mode: Mode, peers_rows: list[Row]) -> list[Case]:
    """`REORDERED_MEGABYTES`."""
    megabytes = REORDERED_MEGABYTES.get((model, mode))
    if megabytes is None:
        return []
    eager = next(row for row in peers_rows if row["method"] == "eager")
    return [Case(model, mode, f"{FIT}{REORDERED}{megabytes}MB", eager["resident"] + 1_000_000 * megabytes)]


def lossy_cases(model: str, mode: Mode, peers_rows: list[Row]) -> list[Case]:
    """In mode ``fresh`` the peaks of the peers in bfloat16; `LOSSY_MEGABYTES` in all; for either engine."""
    eager = next(row for row in peers_rows if row["method"] == "eager")
    lossy = [row for row in peers_rows if group_of(row["method"]) == "lossy"]
    budgets = {row["method"]: row["total"] for row in lossy if mode == "fresh"}
    megabytes = LOSSY_MEGABYTES.get((model, mode))
    if megabytes is not None:
        budgets[f"{megabytes}MB"] = eager["resident"] + 1_000_000 * megabytes
    engines = ("", INDUCTOR)
    return [
        Case(model, mode, f"{FIT}{engine}{LOSSY}{name}", budget)
        for engine in engines
        for name, budget in budgets.items()
    ]
