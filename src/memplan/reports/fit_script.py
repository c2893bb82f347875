"""Whether a script's model can be made to fit a budget of the whole script, and the lines that do it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import RenderableType
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.errors import BudgetError
from memplan.planning.plan.plan import Plan
from memplan.reports import plan as plans
from memplan.reports.output import Page, facts_table, print_parts

FORMAT = "memplan.fit_script"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines to add to a script."""

    where: str | None
    """``file:line`` beside which they go; None where nothing of the script's was seen there."""
    before: bool
    """Whether before that line; else after it."""
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fitting:
    """Outcome of planning a script's model. All sizes are bytes."""

    title: str
    budget: int
    """Of the whole script."""
    recorded: int
    """What the script takes as it is: on a card reserved bytes and the context, else the allocated peak."""
    beside: int = 0
    """Most that the script holds at any moment and a plan of its model does not count: a loss, other models."""
    surplus: int = 0
    """On a card: context, rounding and what is reserved and not allocated, as recorded."""
    plan: Plan | None = None
    """None where the script fits already, or no plan does."""
    shortfall: BudgetError | None = None
    """Why no plan fits."""
    lines: Lines | None = None

    @property
    def fits(self) -> bool:
        """Return whether the script is within the budget, as it is or with the plan."""
        return self.shortfall is None

    @property
    def changes(self) -> bool:
        """Return whether there is something to change."""
        return self.plan is not None

    @property
    def planned(self) -> int | None:
        """Bound on what the script takes with the plan; None without one."""
        return None if self.plan is None else self.plan.peak + self.beside + self.surplus

    @property
    def smallest(self) -> int | None:
        """The smallest budget for which there is a plan; None where the given one is enough."""
        return None if self.shortfall is None else self.shortfall.smallest_budget + self.beside + self.surplus


def dumps(found: Fitting) -> str:
    """Return it as indented JSON. All sizes are bytes."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "title": found.title,
        "fits": found.fits,
        "changed": found.changes,
        "budget": found.budget,
        "recorded": found.recorded,
        "beside": found.beside,
        "surplus": found.surplus,
        "planned": found.planned,
        "smallest_budget": found.smallest,
        "plan": None if found.plan is None else json.loads(found.plan.to_json()),
        "lines": None if found.lines is None else dataclasses.asdict(found.lines),
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def print_fitting(found: Fitting, file: TextIO | None = None, top: int = 12) -> None:
    """Print it to a file, stdout by default; ``top`` rows of long tables, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(found, page, top), file)


def render(found: Fitting, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    title, budget = printable(found.title), format_bytes(found.budget)
    if found.smallest is not None:
        least = format_bytes(found.smallest)
        yield Text(f"{title} does not fit {budget}. The smallest budget with a plan is {least}.", "bold red")
    elif not found.changes:
        needs = format_bytes(found.recorded)
        yield Text(f"{title} fits {budget} already: it takes {needs}. There is nothing to change.", "bold green")
        return
    else:
        yield Text(f"{title} can be made to fit {budget}; nothing was run.", "bold green")
    yield ""
    yield facts_table(_facts(found))
    if found.beside:
        yield Text(
            "beside the model: the most that the script holds at one time and the plan does not count, such as a loss "
            "outside of the model. The plan leaves it free for the whole step, so the sum is a bound.", "dim",
        )  # fmt: skip
    if found.lines is not None:
        yield ""
        yield from _lines(found.lines)
    if found.plan is not None:
        yield ""
        yield from plans.render(found.plan, page, top)


def _facts(found: Fitting) -> dict[str, str]:
    rows = {"the script as it is": format_bytes(found.recorded)}
    if found.plan is not None:
        rows["the model's step"] = f"{format_bytes(found.plan.eager_peak)} -> {format_bytes(found.plan.peak)}"
    if found.beside:
        rows["beside the model"] = f"at most {format_bytes(found.beside)}"
    if found.surplus:
        rows["the allocator's"] = f"{format_bytes(found.surplus)}: context, rounding and reserved blocks, as recorded"
    if found.planned is not None:
        rows["the script planned"] = f"at most {format_bytes(found.planned)}"
    return rows


def _lines(lines: Lines) -> Iterator[RenderableType]:
    if lines.where is None:
        place = "before the first step, where the model is at hand"
    else:
        place = f"{'before' if lines.before else 'after'} {printable(lines.where)}"
    yield Text(f"Add {place}:", "bold")
    yield ""
    for line in lines.text:
        yield Text(f"    {printable(line)}")
    yield ""
    yield Text("It trains nothing: it plans again on that machine, and proves that the result is the same.")
