"""Reports of `memplan fit`, for a step or a script, on the terminal: verdict, figures, plan and proof."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.errors import BudgetError
from memplan.planning.plan.plan import Plan
from memplan.reports import frontier as frontiers
from memplan.reports import plan as plans
from memplan.reports.output import Field, Page, facts_table, print_parts
from memplan.verification.fitting.outcome import Fitting, Lines, Outcome
from memplan.verification.proof.proof import Proof
from memplan.verification.proof.rounding import overall

_LAYERS = 8
"""Layers listed in the error table of a lossy step, those with the largest error first."""


def print_fit(outcome: Outcome, file: TextIO | None = None, top: int = 12) -> None:
    """Print an outcome to a file, stdout by default; ``top`` rows of long tables, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(outcome, page, top), file)


def render(outcome: Outcome, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    yield _verdict(outcome)
    if outcome.shortfall is not None:
        yield from (Text(printable(line)) for line in _shortfall_sentences(outcome.shortfall))
    if outcome.plan is not None:
        yield ""
        yield _figures(outcome.plan, outcome.proof, page, changed=outcome.changed)
    if outcome.proof is not None and (outcome.changed or not outcome.proof.ok):
        yield ""
        yield Text("Proof", "bold")
        yield Text(str(outcome.proof), "" if outcome.proof.ok else "bold red")
        if outcome.proof.grade == "lossy":
            yield _errors(outcome.proof, page)
    if outcome.plan is not None and outcome.changed:
        yield ""
        yield from plans.render(outcome.plan, page, top)
    notes = outcome.notes if outcome.plan is None or outcome.changed else (*outcome.plan.notes, *outcome.notes)
    yield from (Text(f"note: {printable(note)}") for note in dict.fromkeys(notes))
    if outcome.frontier is not None:
        yield ""
        yield frontiers.table(outcome.frontier, page)
        if outcome.frontier.peers:
            yield ""
            yield frontiers.peers_table(outcome.frontier, page)
            yield from map(Text, frontiers.why_not(outcome.frontier))


def _verdict(outcome: Outcome) -> Text:
    title, plan, proof = printable(outcome.title), outcome.plan, outcome.proof
    if outcome.shortfall is not None:
        least = format_bytes(outcome.shortfall.smallest_budget)
        return Text(f"{title} does not fit. The smallest budget that it fits is {least}.", "bold red")
    limit = None if proof is None else proof.budget  # the plan's own budget may be smaller
    if limit is None:
        assert plan is not None, "without a plan there is a reason"
        limit = plan.budget
    budget = f"the budget of {format_bytes(limit)}"
    if proof is not None and not proof.ok:
        return Text(f"{title} was NOT made to fit {budget}: the proof failed.", "bold red")
    if not outcome.changed:
        return Text(f"{title} fits {budget} already: nothing was changed.", "bold green")
    if proof is None:
        return Text(f"{title} can be made to fit {budget}; nothing was run.", "bold green")
    if proof.grade == "lossy":
        assert plan is not None, "it was proven"
        total = overall(proof.rounded, "parameters" if proof.early else "gradients")
        error = f"its {'updates' if proof.early else 'gradients'} are {total.relative:.2%} off"
        return Text(f"{title} fits {budget} now. It is lossy, {plan.lost}: {error}.", "bold green")
    rounding = "" if proof.exact else " but for rounding"
    return Text(f"{title} fits {budget} now, and its result is the same{rounding}.", "bold green")


def _errors(proof: Proof, page: Page) -> Table:
    """Draw the relative L2 errors of a lossy step: over all outputs and gradients, then the layers with the largest."""
    labels = {"outputs": "outputs", "gradients": "gradients", "parameters": "updates"}
    totals = [overall(proof.rounded, kind) for kind in labels]
    layers = sorted((layer for layer in proof.layers if layer.kind != "outputs"), key=lambda layer: -layer.relative)
    rows = [(f"all {labels[total.kind]}", total) for total in totals if total.norm or total.error]
    rows += [(f"{labels[layer.kind]} of {layer.layer or 'the model'}", layer) for layer in layers[:_LAYERS]]
    fields = [
        Field("Off by (relative, L2)", lambda row: printable(row[0])),
        Field("planned", lambda row: f"{row[1].relative:.2%}", right=True),
        Field("autocast, no plan", lambda row: f"{row[1].relative_reference:.2%}", right=True),
    ]
    return page.rows(rows, fields)


def _shortfall_sentences(error: BudgetError) -> Iterator[str]:
    yield f"{error.found.rstrip('.')}."
    if error.expected:
        yield f"Expected {error.expected.rstrip('.')}."
    if error.do:
        yield f"{error.do.rstrip('.')}."


def _figures(plan: Plan, proof: Proof | None, page: Page, *, changed: bool) -> Table:
    """Draw a step's peak and time, predicted and measured, before and after the plan."""
    rows = [_bytes_row("predicted peak", plan.eager_peak, plan.peak)]
    if proof is not None:
        rows += _measured_peak(proof)
    if plan.step_seconds is not None and plan.total_seconds is not None:
        rows.append(_seconds_row("predicted time", plan.step_seconds, plan.total_seconds))
    if proof is not None and proof.times is not None:
        samples = "" if proof.cut is None else f", {proof.cut.samples} of {proof.cut.of} samples"
        rows.append(_seconds_row(f"measured time{samples}", proof.times.before, proof.times.after, proof.times.ratio))
    headers = ("Of a step", "before", "after", "change") if changed else ("Of a step", "as it is")
    return page.rows(rows, [Field(header, itemgetter(index), right=index > 0) for index, header in enumerate(headers)])


def _measured_peak(proof: Proof) -> list[tuple[str, str, str, str]]:
    if proof.cut is None:
        return [_bytes_row("measured peak", proof.reference_peak, proof.peak)]
    return [("measured peak", "", format_bytes(proof.peak), "")] if proof.measured else []


def _bytes_row(label: str, before: int, after: int) -> tuple[str, str, str, str]:
    return label, format_bytes(before), format_bytes(after), _change(after / before) if before else ""


def _seconds_row(label: str, before: float, after: float, ratio: float | None = None) -> tuple[str, str, str, str]:
    ratio = after / before if ratio is None and before else ratio
    return label, format_seconds(before), format_seconds(after), "" if ratio is None else _change(ratio)


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def print_script(fitting: Fitting, file: TextIO | None = None, top: int = 12) -> None:
    """Print the outcome for a script to a file, stdout by default; ``top`` rows of long tables, 0 for all."""
    print_parts(lambda page: render_script(fitting, page, top), file)


def render_script(fitting: Fitting, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    title, budget = printable(fitting.title), format_bytes(fitting.budget)
    if fitting.smallest is not None:
        least = format_bytes(fitting.smallest)
        yield Text(f"{title} does not fit {budget}. The smallest budget with a plan is {least}.", "bold red")
    elif not fitting.changes:
        needs = format_bytes(fitting.recorded)
        yield Text(f"{title} fits {budget} already: it takes {needs}. There is nothing to change.", "bold green")
        return
    else:
        yield Text(f"{title} can be made to fit {budget}; nothing was run.", "bold green")
    yield ""
    yield facts_table(_script_facts(fitting))
    if fitting.beside:
        yield Text(
            "beside the model: the most that the script holds at one time and the plan does not count, such as a loss "
            "outside of the model. The plan leaves it free for the whole step, so the sum is a bound.", "dim",
        )  # fmt: skip
    if fitting.lines is not None:
        yield ""
        yield from _lines_to_add(fitting.lines)
    if fitting.plan is not None:
        yield ""
        yield from plans.render(fitting.plan, page, top)


def _script_facts(fitting: Fitting) -> dict[str, str]:
    rows = {"the script as it is": format_bytes(fitting.recorded)}
    if fitting.plan is not None:
        rows["the model's step"] = f"{format_bytes(fitting.plan.eager_peak)} -> {format_bytes(fitting.plan.peak)}"
    if fitting.beside:
        rows["beside the model"] = f"at most {format_bytes(fitting.beside)}"
    if fitting.surplus:
        rows["the allocator's"] = f"{format_bytes(fitting.surplus)}: context and cached blocks, as recorded"
    if fitting.planned is not None:
        rows["the script planned"] = f"at most {format_bytes(fitting.planned)}"
    return rows


def _lines_to_add(lines: Lines) -> Iterator[RenderableType]:
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
