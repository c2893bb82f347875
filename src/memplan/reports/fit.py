"""Reports of `memplan fit`, for a step or a script: verdict, figures, plan and proof."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.errors import BudgetError
from memplan.planning.plan.plan import Plan
from memplan.reports import frontier as frontiers
from memplan.reports import plan as plans
from memplan.reports.document import Code, Document, Facts, Field, Line, Part, Section, Table, document, notes, table_of
from memplan.verification.fitting.fitted import Fitted
from memplan.verification.fitting.outcome import Fitting, InferenceOutcome, Lines, Outcome
from memplan.verification.proof.proof import Proof
from memplan.verification.proof.rounding import overall

_LAYERS = 8
"""Layers listed in the error table of a lossy step, those with the largest error first."""
_ALIKE = {"exact": "the same bit for bit", "reordered": "the same but for rounding"}
"""By grade, how near the results of a plan are that loses nothing but moments."""


def report(outcome: Outcome, top: int = 12) -> Document:
    """Return verdict, figures, proof, plan and frontier; tables with ``top`` rows, 0 for all."""
    plan, proof = outcome.plan, outcome.proof
    applied = plan if outcome.changed else None
    # the sections of an applied plan include its notes
    remarks = outcome.notes if plan is None or applied is not None else (*plan.notes, *outcome.notes)
    return document(
        _verdict(outcome),
        [] if outcome.shortfall is None else _shortfall_sentences(outcome.shortfall),
        [] if plan is None else [_figures(plan, proof, changed=outcome.changed)],
        _proof_section(proof) if proof is not None and (outcome.changed or not proof.ok) else [],
        *([] if applied is None else plans.sections(applied, top)),
        notes(remarks),
        *([] if outcome.frontier is None else frontiers.parts(outcome.frontier)),
    )


def inference_report(outcome: InferenceOutcome) -> Document:
    """Report whether inference fits its budget, in which parts, and what it takes."""
    figures = outcome.figures
    if figures is None:
        least = outcome.smallest_budget
        smallest = "" if least is None else f" The smallest budget that it fits is {format_bytes(least)}."
        return document(
            Line(f"Inference of {outcome.title} does not fit.{smallest}", "bad"), [outcome.reason or "No reason given."]
        )
    how = f"in {figures.parts} parts" if figures.parts else "already: nothing was changed"
    verdict = f"Inference of {outcome.title} fits the budget of {format_bytes(figures.budget)} {how}."
    facts = {
        "peak": f"{format_bytes(figures.measured)} measured, {format_bytes(figures.predicted)} predicted, "
        f"{format_bytes(figures.before)} as it is"
    }
    if figures.parts:
        sizes = " x ".join(map(str, figures.largest_part))
        facts["a part"] = f"at most {sizes}; together they read {figures.overlap:.2f} times the input"
        facts["result"] = f"the same but for rounding: across a border {figures.difference:.1g} of the largest value"
    return document(Line(verdict, "good"), [Facts(facts)])


def fitted_report(fitted: Fitted, top: int = 12) -> Document:
    """Report the verdict on a fitted model, its plan, the proof and remarks; tables with ``top`` rows, 0 for all."""
    name = type(fitted.model).__name__
    how = "runs as planned" if fitted.changed else "runs unplanned: nothing is changed"
    sections = (
        plans.report(fitted.plan, top).sections
        if fitted.changed and isinstance(fitted.plan, Plan)
        else ([fitted.plan.summary],)
    )
    return document(f"{name} {how}", [], *sections, _proof_section(fitted.proof), notes(fitted.notes))


def _proof_section(proof: Proof) -> Section:
    """Return the proof's sentences, and the table of errors of a lossy step."""
    verdict: list[Part] = [Line(line, "" if proof.ok else "bad") for line in str(proof).splitlines()]
    return Section((*verdict, *([_errors(proof)] if proof.grade == "lossy" else [])), "Proof")


def _verdict(outcome: Outcome) -> Line:
    """Return the heading: whether the step fits, whether it had to be changed, and how exact its result is."""
    title, plan, proof = outcome.title, outcome.plan, outcome.proof
    if outcome.shortfall is not None:
        least = format_bytes(outcome.shortfall.smallest_budget)
        return Line(f"{title} does not fit. The smallest budget that it fits is {least}.", "bad")
    limit = None if proof is None else proof.budget  # the plan's own budget may be smaller
    if limit is None:
        assert plan is not None, "without a plan there is a reason"
        limit = plan.budget
    budget = f"the budget of {format_bytes(limit)}"
    if proof is not None and not proof.ok:
        return Line(f"{title} was NOT made to fit {budget}: the proof failed.", "bad")
    if not outcome.changed:
        return Line(f"{title} fits {budget} already: nothing was changed.", "good")
    if proof is None:
        return Line(f"{title} can be made to fit {budget}; nothing was run.", "good")
    if proof.grade == "lossy" or proof.moments is not None:
        assert plan is not None, "it was proven"
        total = overall(proof.rounded, "gradients")
        off = f"{total.relative:.2%} off" if proof.grade == "lossy" else _ALIKE[proof.grade]
        error = f"its gradients are {off}"
        if proof.moments is not None:
            add = f"add is {proof.moments.relative:.2%} off" if proof.moments.compared else "add was not compared"
            error += f", and what {proof.moments.updates} updates {add}"
        return Line(f"{title} fits {budget} now. It is lossy, {plan.lost}: {error}.", "good")
    rounding = "" if proof.exact else " but for rounding"
    return Line(f"{title} fits {budget} now, and its result is the same{rounding}.", "good")


def _errors(proof: Proof) -> Table:
    """Return relative L2 errors of a lossy step: of all outputs and gradients, then of the layers with the largest.
    Rows are (label, error)."""
    totals = [overall(proof.rounded, kind) for kind in ("outputs", "gradients")]
    layers = sorted((layer for layer in proof.layers if layer.kind == "gradients"), key=lambda layer: -layer.relative)
    rows = [(f"all {total.kind}", total) for total in totals if total.norm or total.error]
    rows += [(f"gradients of {layer.layer or 'the model'}", layer) for layer in layers[:_LAYERS]]
    fields = [
        Field("Off by (relative, L2)", lambda row: row[0]),
        Field("planned", lambda row: f"{row[1].relative:.2%}", right=True),
        Field("autocast, no plan", lambda row: f"{row[1].relative_reference:.2%}", right=True),
    ]
    return table_of(rows, fields)


def _shortfall_sentences(error: BudgetError) -> Iterator[str]:
    """Yield sentences: why a step does not fit, the smallest budget that would, and what to do."""
    yield f"{error.found.rstrip('.')}."
    if error.expected:
        yield f"Expected {error.expected.rstrip('.')}."
    if error.do:
        yield f"{error.do.rstrip('.')}."


def _figures(plan: Plan, proof: Proof | None, *, changed: bool) -> Table:
    """Return a step's peak and time, predicted and measured, before and after the plan."""
    rows = [_bytes_row("predicted peak", plan.eager_peak, plan.peak)]
    if proof is not None:
        rows += _measured_peak(proof)
    if plan.step_seconds is not None and plan.total_seconds is not None:
        rows.append(_seconds_row("predicted time", plan.step_seconds, plan.total_seconds))
    if proof is not None and proof.times is not None:
        samples = "" if proof.cut is None else f", {proof.cut.samples} of {proof.cut.of} samples"
        rows.append(_seconds_row(f"measured time{samples}", proof.times.before, proof.times.after, proof.times.ratio))
    headers = ("Of a step", "before", "after", "change") if changed else ("Of a step", "as it is")
    return table_of(rows, [Field(header, itemgetter(index), right=index > 0) for index, header in enumerate(headers)])


def _measured_peak(proof: Proof) -> list[tuple[str, str, str, str]]:
    """Return the row (label, before, after, change) of the measured peak; [] if it was not measured.

    A proof on a cut batch has no measured peak of the whole step before planning.
    """
    if proof.cut is None:
        return [_bytes_row("measured peak", proof.reference_peak, proof.peak)]
    return [("measured peak", "", format_bytes(proof.peak), "")] if proof.measured else []


def _bytes_row(label: str, before: int, after: int) -> tuple[str, str, str, str]:
    """Return (label, before, after, change in percent) as texts."""
    return label, format_bytes(before), format_bytes(after), _change(after / before) if before else ""


def _seconds_row(label: str, before: float, after: float, ratio: float | None = None) -> tuple[str, str, str, str]:
    """Return (label, before, after, change in percent) as texts. ``ratio``: after / before, if it was measured in pairs
    of runs."""
    if ratio is None and before:
        ratio = after / before
    return label, format_seconds(before), format_seconds(after), "" if ratio is None else _change(ratio)


def _change(ratio: float) -> str:
    """Return the change in percent to ``ratio`` times a value."""
    return f"{100 * (ratio - 1):+.1f} %"


def script_report(fitting: Fitting, top: int = 12) -> Document:
    """Return verdict, figures, the lines to add and the plan for a script; tables with ``top`` rows, 0 for all."""
    title, budget = fitting.title, format_bytes(fitting.budget)
    if not fitting.changes and fitting.smallest is None:
        verdict = f"{title} fits {budget} already: it takes {_as_recorded(fitting)}. There is nothing to change."
        return document(Line(verdict, "good"))
    if fitting.smallest is not None:
        least = format_bytes(fitting.smallest)
        heading = Line(f"{title} does not fit {budget}. The smallest budget with a plan is {least}.", "bad")
    else:
        heading = Line(f"{title} can be made to fit {budget}; nothing was run.", "good")
    facts = Facts(_script_facts(fitting))
    return document(
        heading,
        [],
        [facts, Line(_BESIDE, "dim")] if fitting.beside else [facts],
        *([] if fitting.lines is None else _lines_to_add(fitting.lines)),
        *([] if fitting.plan is None else plans.sections(fitting.plan, top)),
    )


_BESIDE = (
    "beside the model: the most that the script holds at one time and the plan does not count, such as a loss outside "
    "of the model. The plan leaves it free for the whole step, so the sum is a bound."
)


def _as_recorded(fitting: Fitting) -> str:
    """Return the peak of the unchanged script as text, with its 95 % band if cuDNN's workspaces are expected."""
    needs = format_bytes(fitting.recorded)
    if fitting.recorded_band is None:
        return needs
    low, high = map(format_bytes, fitting.recorded_band)
    return f"about {needs} (95 %: {low} to {high})"


def _script_facts(fitting: Fitting) -> dict[str, str]:
    """Return the parts of a script's peak: the model's step, other live memory, and the sum with a plan."""
    rows = {"the script as it is": _as_recorded(fitting)}
    if fitting.plan is not None:
        rows["the model's step"] = f"{format_bytes(fitting.plan.eager_peak)} -> {format_bytes(fitting.plan.peak)}"
    if fitting.beside:
        rows["beside the model"] = f"at most {format_bytes(fitting.beside)}"
    if fitting.surplus:
        rows["the allocator's"] = f"{format_bytes(fitting.surplus)}: context and cached blocks, as recorded"
    if fitting.planned is not None:
        rows["the script planned"] = f"at most {format_bytes(fitting.planned)}"
    return rows


def _lines_to_add(lines: Lines) -> list[Section]:
    """Return the lines of code to add to the script, and where to add them."""
    if lines.where is None:
        where = "before the first step, where the model is at hand"
    else:
        where = f"{'before' if lines.before else 'after'} {lines.where}"
    explanation = "It trains nothing: it plans again on that machine, and proves that the result is the same."
    return [Section((Line(f"Add {where}:", "bold"),)), Section((Code("\n".join(lines.text)),)), Section((explanation,))]
