"""Report of `memplan run`: the explanation of the step and the facts about the script; and its JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator

from memplan._json import to_plain
from memplan._text import counted
from memplan.explanation.model import Explanation
from memplan.reports import compare, explain, whole_run
from memplan.reports.document import Document, Field, Part, Table, document, name_field, table_of
from memplan.studies.comparisons.measured import MeasuredComparison
from memplan.studies.runs.whole_run import WholeRun
from memplan.trace.program_facts import Batch, Facts, Held

_KINDS = {
    "file": "written", "removed": "removed", "changed": "changed in mode or times", "checkpoint": "saved",
    "network": "connected to", "process": "started",
}  # fmt: skip
_PROTECTIONS = {
    "landlock": "Linux grants no namespaces here: what libraries write without Python is refused, not shown to them.",
    "none": "Nothing of it was held back but checkpoints.",
}
_ROWS = 8


def dumps(
    command: str,
    facts: Facts,
    explanation: Explanation,
    measured: MeasuredComparison | None = None,
    whole: WholeRun | None = None,
) -> str:
    """Return the explanation, the facts about the script, the comparison with a measurement on a card, and the phases
    of a whole run as JSON. All sizes are bytes."""
    return explain.dumps(explanation, script={"command": command, **to_plain(facts)}, beside=measured, run=whole)


def report(
    command: str,
    facts: Facts,
    explanation: Explanation,
    top: int = 12,
    measured: MeasuredComparison | None = None,
    whole: WholeRun | None = None,
) -> Document:
    """Report the phases of a whole run, the explanation, the comparison with a measurement on a card, and the facts
    about the script, in this order. Tables have ``top`` rows, 0 for all."""
    if whole is None:
        step = explain.report(explanation, top)
    else:
        step = whole_run.report(whole, top) + explain.at_peak(explanation, top)
    if measured is not None:
        step += compare.measured_report(measured, top)
    script = document(
        f"The script: {command}",
        _facts(facts, top),
        [_sandboxed_effects(facts, top)] if facts.held else [],
        [f"At least {facts.unlisted:,} more are not listed."] if facts.unlisted else [],
    )
    return step + script


def _facts(facts: Facts, top: int) -> Iterator[Part]:
    """Yield how the script ended, its batches, and the number of output lines that are not shown.

    Data sets whose data are missing on this machine are named: their batches are those that the user described. What
    the sandbox could not hold back is noted, unless the script ran for real.
    """
    yield _ending(facts)
    yield from (_batch_line(batch, follows_phases=bool(facts.parts)) for batch in facts.batches[: top or None])
    for name in facts.absent:
        yield f"The data of {name} are not here: its batches are those described."
    if facts.lines:
        lines = "1 line that it printed is" if facts.lines == 1 else f"{facts.lines} lines that it printed are"
        yield f"{lines} not shown (--show-output)"
    if facts.protection in _PROTECTIONS and not facts.really:
        yield _PROTECTIONS[facts.protection]


def _sandboxed_effects(facts: Facts, top: int) -> Table:
    """Return the sandboxed effects of the script: files, connections and processes that did not happen."""
    fields = [
        name_field("Held back", _short_name, from_left=True),
        Field("would be", lambda row: _KINDS[row.kind] + (f" {row.count} times" if row.count > 1 else "")),
        Field("at", lambda row: row.where or "-", shrinks_to=14, from_left=True, drop=1),
    ]
    return table_of(facts.held, fields, min(top, _ROWS) if top else 0)


def _ending(facts: Facts) -> str:
    """Return how far the script ran, and why it ended there."""
    how = "ran for real" if facts.really else "ran on tensors without values"
    updates = counted(facts.updates, "update")
    match facts.ending:
        case "steps":
            return f"It {how} until it had made {updates}; what comes after was not looked at."
        case "no update":
            return (
                f"It {how} over 256 batches, or 4,096 without gradients, in which no optimizer of torch.optim made "
                "another update, and was ended."
            )
        case "passes":
            return f"It {how} until a third pass over its training data began, with {updates}."
        case "time":
            return f"It {how} until its time was over (--limit), with {updates}."
        case _:
            code = "" if facts.code in (None, 0) else f", with exit code {facts.code}"
            updated = f"with {updates}" if facts.updates else "without an update: all of it counts as one step"
            return f"It {how} to its end{code}, {updated}."


def _batch_line(batch: Batch, *, follows_phases: bool) -> str:
    """Return where a batch came from and what it contained, as a sentence."""
    where = f" ({batch.where})" if batch.where else ""
    source = "The batch described" if batch.given else "A loader's batch"
    why = "so that the run reaches what comes after" if follows_phases else "as nothing trains on them"
    cut = f"; {batch.taken} of {batch.length or 'its'} batches were taken, {why}" if batch.cut else ""
    return f"{source}{where}: {batch.text}{cut}."


def _short_name(row: Held) -> str:
    """Return the name of a sandboxed effect; paths in the working directory are relative."""
    if row.kind in ("network", "process") or not os.path.isabs(row.what):
        return row.what
    relative = os.path.relpath(row.what)
    path = row.what.rstrip(os.sep) if relative.startswith("..") else relative
    return path + (os.sep if row.what.endswith(os.sep) else "")
