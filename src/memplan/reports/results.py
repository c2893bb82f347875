"""Reports of the results that memplan's functions return, for ``print`` and notebooks."""

from __future__ import annotations

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


def document_of(result: object) -> Document:
    """Return the report of a result; for a kind without a report, the lines of its ``str``."""
    match result:
        case Explanation():
            return explain.report(result)
        case LineProfile():
            return line_tables.report([result])
        case Comparison():
            return compare.report(result)
        case Plan():
            return plan.report(result)
        case Fitted():
            return fit.fitted_report(result)
        case Sweep():
            return sweep.report(result)
        case Largest():
            return largest.report(result)
        case Layouts():
            return layouts.report(result)
        case Roles():
            return roles.report(result)
        case Lengths():
            return lengths.report(result)
        case Quantized():
            return quantize.report(result)
        case WholeRun():
            return whole_run.report(result)
        case Replay():
            return replay.report(replay.Cases(result, result, (), None))
        case RankSnapshots():
            return rank_snapshots.report(result)
        case WatchedRanks():
            return watched.report(result)
        case Why():
            return why.report(result)
        case RankReasons():
            return why.ranks_report(result)
        case Exported():
            return export.report(result)
        case Finding():
            return check.report(result.layer or "step", [result])
        case _:
            return document(None, str(result).splitlines())


def text_of(result: object) -> str:
    """Return the report of a result as text of 80 columns."""
    return terminal.text_of(document_of(result))


def html_of(result: object) -> str:
    """Return the report of a result as HTML for a notebook, under 200 kB; the same text for the same result."""
    return notebook.html_of(document_of(result))
