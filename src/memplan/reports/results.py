"""Reports of the results that memplan's functions return, for ``print`` and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.checks.finding import Finding
from memplan.explanation.line_profile import LineProfile
from memplan.explanation.model import Explanation
from memplan.explanation.why import Why
from memplan.explanation.why_ranks import RankReasons
from memplan.exporting.exported import Exported
from memplan.planning.plan.plan import Plan
from memplan.reports import (
    check,
    compare,
    explain,
    fit,
    largest,
    layouts,
    lengths,
    line_tables,
    notebook,
    plan,
    quantize,
    rank_snapshots,
    replay,
    roles,
    sweep,
    terminal,
    watched,
    whole_run,
    why,
)
from memplan.reports.document import Document, document
from memplan.reports.exports import export
from memplan.simulation.replays.ranks import RankSnapshots
from memplan.simulation.replays.replayed import Replay
from memplan.studies.capacity.largest import Largest
from memplan.studies.comparisons.comparison import Comparison
from memplan.studies.layouts.layouts import Layouts
from memplan.studies.lengths.lengths import Lengths
from memplan.studies.quantization.quantized import Quantized
from memplan.studies.roles.roles import Roles
from memplan.studies.runs.whole_run import WholeRun
from memplan.studies.sweeps.sweep import Sweep
from memplan.studies.watched.watched import WatchedRanks
from memplan.verification.fitting.fitted import Fitted

_REPORTS: dict[type, Callable[[Any], Document]] = {
    Explanation: explain.report,
    LineProfile: lambda profile: line_tables.report([profile]),
    Comparison: compare.report,
    Plan: plan.report,
    Fitted: fit.fitted_report,
    Sweep: sweep.report,
    Largest: largest.report,
    Layouts: layouts.report,
    Roles: roles.report,
    Lengths: lengths.report,
    Quantized: quantize.report,
    WholeRun: whole_run.report,
    Replay: lambda result: replay.report(replay.Cases(result, base=result, others=(), explanation=None)),
    RankSnapshots: rank_snapshots.report,
    WatchedRanks: watched.report,
    Why: why.report,
    RankReasons: why.ranks_report,
    Exported: export.report,
    Finding: lambda finding: check.report(finding.layer or "step", [finding]),
}


def document_of(result: object) -> Document:
    """Return the report of a result; for a kind without a report, the lines of its ``str``."""
    for kind, report in _REPORTS.items():
        if isinstance(result, kind):
            return report(result)
    return document(None, str(result).splitlines())


def text_of(result: object) -> str:
    """Return the report of a result as text of 80 columns."""
    return terminal.text_of(document_of(result))


def html_of(result: object) -> str:
    """Return the report of a result as HTML for a notebook, under 200 kB; the same text for the same result."""
    return notebook.html_of(document_of(result))
