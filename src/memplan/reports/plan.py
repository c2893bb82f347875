"""Reports of plans on the terminal: the figures of the step, and a table of decisions with their reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from operator import itemgetter

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.planning.plan.decision import Decision
from memplan.planning.plan.plan import Plan
from memplan.planning.plan.table import COLUMNS, by_lever, split_shown
from memplan.reports import fusion
from memplan.reports.output import Field, Page, facts_table

_INDENT = 4
_LEGEND = (
    "bytes: what keep holds from the forward to the backward pass, what anything else frees. "
    "cost: what it adds to the step. Below each: the reason."
)
_Row = list[str]
_SHRINKS_TO = 12


def render(plan: Plan, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    yield Text(f"Plan for a step on {printable(plan.device)}, torch {printable(plan.torch)}", "bold")
    yield _head(plan)
    if plan.decisions:
        yield ""
        yield from _table(plan.decisions, page, top)
        yield Text(_LEGEND, "dim")
    if plan.fusion is not None:
        yield ""
        yield from fusion.render(plan.fusion, page, top)
    if plan.notes:
        yield ""
    for note in plan.notes:
        yield Text(f"note: {printable(note)}")


def _head(plan: Plan) -> Table:
    """Draw the figures of the whole step: budget, peak, floor, added time and further bounds."""
    reduction = plan.eager_peak - plan.peak
    share = f", {100 * reduction / plan.eager_peak:.0f} % less" if reduction > 0 and plan.eager_peak else ""
    base = plan.step_seconds if plan.base_seconds is None else plan.base_seconds
    of = f" of {format_seconds(base)} ({100 * plan.seconds / base:.1f} %)" if base else ""
    facts = {
        "budget": format_bytes(plan.budget),
        "predicted peak": f"{format_bytes(plan.eager_peak)} before, {format_bytes(plan.peak)} after{share}",
        "floor": f"{format_bytes(plan.floor)}; no schedule of these ops is below {format_bytes(plan.lower_bound)}",
        "added time": format_seconds(plan.seconds) + of,
        "gap": f"{format_seconds(plan.gap)}: no plan in this budget adds less than "
        + format_seconds(plan.lower_bound_seconds),
    }
    if plan.choices.fused:
        floor, lower_bound = format_bytes(plan.floor), format_bytes(plan.lower_bound)
        facts["floor"] = (
            f"{floor} is the least that was looked at; {lower_bound} is there when the backward pass has ended"
        )
        del facts["gap"]  # the search's bounds hold for unfused ops only
    if plan.grade == "lossy":
        facts["lossy"] = str(plan.lost)
    if plan.base_seconds is not None and plan.step_seconds is not None:
        facts["time"] = f"{format_seconds(plan.base_seconds + plan.seconds)} a step predicted, "
        facts["time"] += f"{format_seconds(plan.step_seconds)} as it is written"
    if plan.cast_copies:
        facts["cast copies"] = f"{format_bytes(plan.cast_copies)} at the most, of weights in {plan.precision.compute}"
    if plan.host_bytes:
        facts["host memory"] = f"{format_bytes(plan.host_bytes)}, pinned, for what is offloaded"
    if plan.resident:
        parts = sorted(plan.resident.items(), key=lambda item: (-item[1], item[0]))
        facts["always there"] = ", ".join(f"{printable(cause)} {format_bytes(size)}" for cause, size in parts if size)
    return facts_table(facts)


def _table(decisions: Sequence[Decision], page: Page, top: int) -> Iterator[RenderableType]:
    """Yield the table of decisions, each with its reason below, and the sums by memory technique.

    Decisions about the whole step come first, then the ``top`` largest of the others.
    """
    shown, hidden = split_shown(decisions, top)
    rows: list[_Row] = [[column.cell(decision) for column in COLUMNS] for decision in shown]
    hidden_sums = _sums(hidden, "... {} more")
    all_sums = _sums([decision for decision in decisions if decision.scope.kind != "step"], "all {}")
    header, _, *lines = page.lines(page.rows([*rows, *hidden_sums, *all_sums], _FIELDS))
    rule = Text(("-" if page.ascii_only else "─") * page.width)
    yield from (Text(header, "bold"), rule)
    for line, decision in zip(lines, shown, strict=False):
        yield Text(line)
        for part in textwrap.wrap(printable(decision.reason), page.width - _INDENT):
            yield Text(" " * _INDENT + part, "dim")
    totals_from = len(rows) + len(hidden_sums)
    yield from (Text(line) for line in lines[len(rows) : totals_from])
    yield rule
    yield from (Text(line, "bold") for line in lines[totals_from:])


_FIELDS = tuple(
    Field(
        column.header, itemgetter(index), right=column.right, shrinks_to=_SHRINKS_TO if column.longest else None,
        from_left=column.keeps_end, drop=int(column.keeps_end),
    )
    for index, column in enumerate(COLUMNS)
)  # fmt: skip


def _sums(decisions: Sequence[Decision], label: str) -> list[_Row]:
    """Return a row of totals for each memory technique, the most bytes first."""
    return [[label.format(len(group)), *(column.sum(group) for column in COLUMNS[1:])] for group in by_lever(decisions)]
