"""Report of a plan: the figures of the step, and a table of decisions with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.plan.decision import Decision
from memplan.planning.plan.plan import Plan
from memplan.reports import fusion
from memplan.reports.document import Document, Facts, Field, Line, Section, Table, document, notes, table_of

_LEGEND = (
    "bytes: what keep holds from the forward to the backward pass, what anything else frees. "
    "cost: what it adds to the step. Below each: the reason."
)


def report(plan: Plan, top: int = 12) -> Document:
    """Report the figures of a plan and its decisions; of decisions about values the ``top`` largest, 0 for all."""
    (first, *others) = sections(plan, top)
    verdict = [plan.summary] if plan.changes_nothing else []
    return document(first.title, [*verdict, *first.parts], *others)


def sections(plan: Plan, top: int = 12) -> Iterator[Section]:
    """Yield the sections of `report` with its title as the heading of the first, for reports that include a plan."""
    yield Section((Facts(_facts(plan)),), f"Plan for a step on {plan.device}, torch {plan.torch}")
    if plan.decisions:
        yield Section((_table(plan.decisions, top), Line(_LEGEND, "dim")))
    if plan.fusion is not None:
        yield from fusion.sections(plan.fusion, top)
    yield Section(tuple(notes(plan.notes)))


def _facts(plan: Plan) -> dict[str, str]:
    """Return the figures of the whole step: budget, peak, floor, added time and further bounds."""
    reduction = plan.eager_peak - plan.peak
    share = f", {100 * reduction / plan.eager_peak:.0f} % less" if reduction > 0 and plan.eager_peak else ""
    # base_seconds: the step before the plan, where the plan's other choices change its time
    base = plan.step_seconds if plan.base_seconds is None else plan.base_seconds
    of = f" of {format_seconds(base)} ({100 * plan.seconds / base:.1f} %)" if base else ""
    facts = {
        "budget": format_bytes(plan.budget),
        "predicted peak": f"{format_bytes(plan.eager_peak)} before, {format_bytes(plan.peak)} after{share}",
        "floor": f"{format_bytes(plan.floor)}; its order of ops needs at least {format_bytes(plan.lower_bound)}",
        "added time": format_seconds(plan.seconds) + of,
        "gap": f"{format_seconds(plan.gap)}: no plan in this order and budget adds less than "
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
        facts["always there"] = ", ".join(f"{cause} {format_bytes(size)}" for cause, size in parts if size)
    return facts


def _table(decisions: Sequence[Decision], top: int) -> Table:
    """Return the decisions about the whole step, then the ``top`` largest of the others, 0 for all, each with its
    reason below; and sums by memory technique."""
    step = [decision for decision in decisions if decision.scope.kind == "step"]
    others = [decision for decision in decisions if decision.scope.kind != "step"]
    others.sort(key=lambda decision: -decision.bytes)  # stable: of the same size in the order of the step
    listed = others[:top] if top else others
    shown = [*step, *listed]
    groups = [(f"... {len(group)} more", group) for group in _by_lever(others[len(listed) :])]
    totals = [(f"all {len(group)}", group) for group in _by_lever(others)]
    table = table_of([("", [decision]) for decision in shown] + groups + totals, _FIELDS)
    return replace(table, sums_from=len(shown) + len(groups), below=tuple(decision.reason for decision in shown))


def _by_lever(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Group decisions by memory technique, that with the most bytes first."""
    groups: dict[str, list[Decision]] = {}
    for decision in decisions:
        groups.setdefault(decision.lever, []).append(decision)
    return sorted(groups.values(), key=lambda group: (-_bytes(group), group[0].lever))


_Row = tuple[str, list[Decision]]
"""A label and the decisions that the row adds up; no label for the row of a single decision."""


def _bytes(decisions: Iterable[Decision]) -> int:
    return sum(decision.bytes for decision in decisions)


def _seconds(row: _Row) -> float:
    return sum(decision.seconds for decision in row[1])


def _lever(row: _Row) -> str:
    """Return the memory technique of a row; for a single decision that changes the result, also its grade."""
    label, decisions = row
    first = decisions[0]
    return first.lever if label or first.grade == "exact" else f"{first.lever}, {first.grade}"


_FIELDS = (
    Field("value", lambda row: row[0] or str(row[1][0].scope), shrinks_to=12),
    Field("layer", lambda row: "" if row[0] else row[1][0].layer, shrinks_to=12, from_left=True, drop=1),
    Field("bytes", lambda row: format_bytes(_bytes(row[1])), right=True, number=lambda row: _bytes(row[1])),
    Field("decision", _lever),
    Field("cost", lambda row: format_seconds(_seconds(row)) if _seconds(row) else "-", right=True, number=_seconds),
)
