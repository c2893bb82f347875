"""HTML sections of plans, fits, proofs and frontiers: memory before and after, decisions, the step as Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.explanation.course import Course
from memplan.planning.plan.decision import Decision
from memplan.planning.plan.plan import Plan
from memplan.reports.html.fields import Fields
from memplan.reports.html.page_parts import (
    Chart,
    Code,
    Mood,
    Paragraphs,
    Part,
    Result,
    Section,
    number,
    seconds,
    size,
    table,
    text,
)
from memplan.reports.html.step_sections import over_time
from memplan.verification.proof.proof import Proof


def plan_result(plan: Plan) -> Result:
    """Return the page content of a plan."""
    title = f"Plan for a step on {plan.device}, torch {plan.torch}"
    summary = plan.summary.partition(": ")
    verdict = f"{summary[0]}{summary[1]}{summary[2].split(', ')[0]}." if not plan.changes_nothing else plan.summary
    lines = () if plan.changes_nothing else (plan.summary,)
    mood: Mood = "good" if plan.peak <= plan.budget else "bad"
    return Result(
        "plan", title, verdict, mood, _facts(plan), tuple(_sections(plan)), lines, peak=plan.peak,
        causes=None if plan.course is None else _causes(plan), remarks=plan.notes,
    )  # fmt: skip


def _facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    return (
        ("before", format_bytes(plan.eager_peak)),
        ("after", format_bytes(plan.peak)),
        ("budget", format_bytes(plan.budget)),
        ("added time", format_seconds(plan.seconds)),
        ("floor", format_bytes(plan.floor)),
        ("grade", plan.grade),
    )


def _causes(plan: Plan) -> dict[str, int]:
    """Return bytes by category at the planned peak."""
    assert plan.course is not None
    top = plan.course.allocated.index(max(plan.course.allocated))
    return {cause: column[top] for cause, column in plan.course.causes.items()}


def _sections(plan: Plan) -> Iterator[Section]:
    if plan.course is not None:
        before = [("before", _from_first_op(plan.eager_course))] if plan.eager_course is not None else []
        timelines = [*before, ("after", plan.course)]
        yield Section("Memory over time, before and after", (over_time(timelines, budget=plan.budget),))
    if plan.decisions:
        yield Section("Decisions", (_decisions(plan.decisions),))
    if plan.fusion is not None:
        yield Section("Fused kernels", (Paragraphs((plan.fusion.summary,)),))
    if plan.program:
        yield Section("The planned step", (Code("as Python", plan.program),))


def _from_first_op(course: Course) -> Course:
    """Cut off the frees before the first op of a step, which belong to the previous step."""
    step = course.spans[0].step if course.spans else 0
    first = next((index for index, op in enumerate(course.ops) if op >= 0 and course.op_rows[op].step == step), 0)
    columns = {name: getattr(course, name)[first:] for name in ("ticks", "allocated", "reserved", "ops")}
    causes = {name: column[first:] for name, column in course.causes.items()}
    spans = (replace(course.spans[0], start=columns["ticks"][0]), *course.spans[1:]) if first else course.spans
    return replace(course, **columns, causes=causes, spans=spans)


def _decisions(decisions: tuple[Decision, ...]) -> Part:
    rows = [
        (
            text(row.lever), text(str(row.scope)), text(row.layer), size(row.bytes), seconds(row.seconds),
            text(row.grade), text(row.reason), text(row.where),
        )
        for row in decisions
    ]  # fmt: skip
    headers = ("lever", "of", "layer", "bytes", "cost", "grade", "reason", "at")
    return table("Decisions", headers, rows)


def fit_result(data: Fields) -> Result:
    """Return the page content of `memplan fit --json`."""
    title, fits = data.get("title", str), data.get("fits", bool)
    plan = _plan(data)
    proof = _proof(data)
    least = data.maybe("smallest_budget", int)
    sections = list(_sections(plan)) if plan is not None else []
    if proof is not None:
        sections.insert(0, Section("Proof", tuple(_proof_parts(proof))))
    frontier = data.inner("frontier")
    if frontier is not None:
        sections.insert(0, Section("Peak against time", tuple(_frontier(frontier, plan))))
    reason = data.maybe("reason", str)
    if not fits and least is not None:
        verdict = f"{title} does not fit. The smallest budget that it fits is {format_bytes(least)}."
    elif not fits:
        verdict = f"{title} was NOT made to fit: the proof failed."
    elif data.get("changed", bool):
        outcome = "fits now, and its result is proven" if proof is not None else "can be made to fit; nothing was run"
        verdict = f"{title} {outcome}: {format_bytes(plan.eager_peak)} -> {format_bytes(plan.peak)}." if plan else title
    else:
        verdict = f"{title} fits already: nothing was changed."
    facts = _facts(plan) if plan is not None else ()
    notes = (*(plan.notes if plan is not None else ()), *data.texts("notes"))
    return Result(
        "fit", title, verdict, "good" if fits else "bad", facts, tuple(sections),
        tuple(line for line in (reason, plan.summary if plan is not None else None) if line),
        causes=_causes(plan) if plan is not None and plan.course is not None else None,
        peak=None if plan is None else plan.peak, remarks=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def script_fit_result(data: Fields) -> Result:
    """Return the page content of `memplan fit --script --json`."""
    title, fits, budget = data.get("title", str), data.get("fits", bool), data.get("budget", int)
    plan, least, planned = _plan(data), data.maybe("smallest_budget", int), data.maybe("planned", int)
    facts = [("the script as it is", format_bytes(data.get("recorded", int))), ("budget", format_bytes(budget))]
    facts += [("planned, at most", format_bytes(planned))] if planned is not None else []
    if least is not None:
        verdict = f"{title} does not fit. The smallest budget with a plan is {format_bytes(least)}."
    else:
        verdict = f"{title} {'can be made to fit' if data.get('changed', bool) else 'fits already'}."
    lines = data.inner("lines")
    sections = list(_sections(plan)) if plan is not None else []
    if lines is not None:
        sections.insert(0, Section("Lines to add", (Code("lines", "\n".join(lines.texts("text"))),)))
    mood: Mood = "good" if fits else "bad"
    return Result("fit of a script", title, verdict, mood, tuple(facts), tuple(sections))


def proof_result(proof: Proof) -> Result:
    """Return the page content of a proof."""
    verdict = "The planned step is proven to be the same." if proof.ok else "The proof failed."
    mood: Mood = "good" if proof.ok else "bad"
    after = "after, measured" if proof.measured else "after, predicted"
    facts = (("before", format_bytes(proof.reference_peak)), (after, format_bytes(proof.peak)))
    sections = (Section("Proof", tuple(_proof_parts(proof))),)
    return Result("proof", "Proof", verdict, mood, facts, sections, peak=proof.peak)


def _proof_parts(proof: Proof) -> Iterator[Part]:
    yield Paragraphs(tuple(str(proof).splitlines()))
    if proof.layers:
        rows = [(text(row.layer or row.kind), text(row.kind), number(row.relative)) for row in proof.layers]
        yield table("Errors by layer", ("layer", "of", "relative error"), rows)


def _plan(data: Fields) -> Plan | None:
    saved = data.plain.get("plan")
    return None if saved is None else Plan.from_dict(saved, f"{data.place}.plan")


def _proof(data: Fields) -> Proof | None:
    saved = data.plain.get("proof")
    return None if saved is None else Proof.from_dict(saved, f"{data.place}.proof")


def _frontier(data: Fields, plan: Plan | None) -> Iterator[Part]:
    base = data.maybe("step_seconds", float) or 0.0
    eager = data.get("eager_peak", int)
    points: list[dict[str, Any]] = []
    for row in data.rows("points"):
        lost = row.maybe("lost", str) or ""
        point = {"peak": row.get("peak", int), "seconds": row.get("seconds", float)}
        points.append(point | {"group": "planned, lossy" if lost else "planned", "text": lost or "planned"})
    points.append({"peak": eager, "seconds": 0.0, "group": "without a plan", "text": "without a plan"})
    if plan is not None:
        points.append({"peak": plan.peak, "seconds": plan.seconds, "group": "this plan", "text": "this plan"})
    for row in data.rows("peers"):
        ratio = row.maybe("ratio", float)
        if ratio is not None:
            added = (ratio - 1) * (base or (row.maybe("seconds", float) or 0.0) / ratio)
            name = f"{row.get('name', str)}, gradients {row.get('gradients', str)}"
            points.append({"peak": row.get("peak", int), "seconds": added, "group": "measured", "text": name})
    budget = None if plan is None else plan.budget
    yield Chart("frontier", "Peak against time", {"points": points, "base": base, "budget": budget})
    rows = [(text(point["text"]), size(point["peak"]), seconds(point["seconds"])) for point in points]
    yield table("Plans", ("plan", "peak", "added time"), rows)
