"""memplan: where the memory of a PyTorch step goes, before it runs.

Names are looked up when they are first used, so that importing memplan (and the command's help) needs no torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from memplan._display import draw_with
from memplan._interrupts import deferred
from memplan._version import __version__ as __version__
from memplan.errors import BudgetError as BudgetError
from memplan.errors import MemplanError as MemplanError

if TYPE_CHECKING:
    from memplan import kernels as kernels
    from memplan.checks.check import check as check
    from memplan.checks.finding import Finding as Finding
    from memplan.explanation.explain import explain as explain
    from memplan.explanation.line_profile import LineProfile as LineProfile
    from memplan.explanation.model import Explanation as Explanation
    from memplan.explanation.why import Why as Why
    from memplan.explanation.why import why as why
    from memplan.explanation.why_ranks import RankReasons as RankReasons
    from memplan.explanation.why_ranks import why_ranks as why_ranks
    from memplan.exporting.export import export as export
    from memplan.exporting.exported import Exported as Exported
    from memplan.exporting.weights_file import load_weights as load_weights
    from memplan.integrations.line_profiles.decorator import profile as profile
    from memplan.integrations.scripts.followed import whole_run as whole_run
    from memplan.integrations.watching.watch import watch as watch
    from memplan.planning.api import plan as plan
    from memplan.planning.capture.loss_module import with_loss as with_loss
    from memplan.planning.ops.packed_masters import PackedMasters as PackedMasters
    from memplan.planning.plan.plan import Plan as Plan
    from memplan.planning.search.search import Heuristics as Heuristics
    from memplan.simulation.replays.ranks import RankSnapshots as RankSnapshots
    from memplan.simulation.replays.ranks import replay_ranks as replay_ranks
    from memplan.simulation.replays.replay import replay as replay
    from memplan.simulation.replays.replayed import Replay as Replay
    from memplan.simulation.simulate import simulate as simulate
    from memplan.simulation.timeline import Timeline as Timeline
    from memplan.studies.capacity.largest import largest as largest
    from memplan.studies.comparisons.compare import compare as compare
    from memplan.studies.comparisons.comparison import Comparison as Comparison
    from memplan.studies.guarding.assert_peak import assert_peak as assert_peak
    from memplan.studies.layouts.layouts import Layouts as Layouts
    from memplan.studies.layouts.layouts import layouts as layouts
    from memplan.studies.quantization.quantize import quantize as quantize
    from memplan.studies.quantization.quantized import Quantized as Quantized
    from memplan.studies.roles.roles import Roles as Roles
    from memplan.studies.roles.roles import roles as roles
    from memplan.studies.runs.whole_run import WholeRun as WholeRun
    from memplan.studies.sweeps.sweep import Sweep as Sweep
    from memplan.studies.sweeps.sweep import sweep as sweep
    from memplan.studies.watched.watched import WatchedRanks as WatchedRanks
    from memplan.studies.watched.watched import watched_ranks as watched_ranks
    from memplan.trace.measure import measure as measure
    from memplan.trace.record import record as record
    from memplan.trace.spec import spec as spec
    from memplan.trace.trace import Trace as Trace
    from memplan.verification.fitting.fit import fit as fit
    from memplan.verification.fitting.fitted import Fitted as Fitted
    from memplan.verification.proof.proof import Proof as Proof
    from memplan.verification.proof.verify import verify as verify

_HOMES = {
    "Comparison": "memplan.studies.comparisons.comparison",
    "Explanation": "memplan.explanation.model",
    "Exported": "memplan.exporting.exported",
    "Finding": "memplan.checks.finding",
    "Fitted": "memplan.verification.fitting.fitted",
    "Heuristics": "memplan.planning.search.search",
    "Layouts": "memplan.studies.layouts.layouts",
    "LineProfile": "memplan.explanation.line_profile",
    "PackedMasters": "memplan.planning.ops.packed_masters",
    "Plan": "memplan.planning.plan.plan",
    "Proof": "memplan.verification.proof.proof",
    "Quantized": "memplan.studies.quantization.quantized",
    "RankReasons": "memplan.explanation.why_ranks",
    "RankSnapshots": "memplan.simulation.replays.ranks",
    "Replay": "memplan.simulation.replays.replayed",
    "Roles": "memplan.studies.roles.roles",
    "Sweep": "memplan.studies.sweeps.sweep",
    "Timeline": "memplan.simulation.timeline",
    "Trace": "memplan.trace.trace",
    "WatchedRanks": "memplan.studies.watched.watched",
    "WholeRun": "memplan.studies.runs.whole_run",
    "Why": "memplan.explanation.why",
    "assert_peak": "memplan.studies.guarding.assert_peak",
    "check": "memplan.checks.check",
    "compare": "memplan.studies.comparisons.compare",
    "explain": "memplan.explanation.explain",
    "export": "memplan.exporting.export",
    "fit": "memplan.verification.fitting.fit",
    "largest": "memplan.studies.capacity.largest",
    "load_ipython_extension": "memplan.integrations.notebook.extension",
    "layouts": "memplan.studies.layouts.layouts",
    "load_weights": "memplan.exporting.weights_file",
    "measure": "memplan.trace.measure",
    "plan": "memplan.planning.api",
    "profile": "memplan.integrations.line_profiles.decorator",
    "quantize": "memplan.studies.quantization.quantize",
    "record": "memplan.trace.record",
    "replay": "memplan.simulation.replays.replay",
    "replay_ranks": "memplan.simulation.replays.ranks",
    "roles": "memplan.studies.roles.roles",
    "simulate": "memplan.simulation.simulate",
    "spec": "memplan.trace.spec",
    "sweep": "memplan.studies.sweeps.sweep",
    "verify": "memplan.verification.proof.verify",
    "watch": "memplan.integrations.watching.watch",
    "watched_ranks": "memplan.studies.watched.watched",
    "whole_run": "memplan.integrations.scripts.followed",
    "why": "memplan.explanation.why",
    "why_ranks": "memplan.explanation.why_ranks",
    "with_loss": "memplan.planning.capture.loss_module",
}
"""Modules by the public names in them; the imports above are the same, for type checkers."""
_RENAMED = {
    "load_plan": ("Plan", "load"),
    "load_trace": ("Trace", "load"),
    "save_plan": ("Plan", "save"),
    "save_trace": ("Trace", "save"),
}
"""Earlier names, and the class and method that they are now."""

if not TYPE_CHECKING:  # which reads the imports above
    __all__ = sorted({"BudgetError", "MemplanError", "__version__", *_HOMES} - {"load_ipython_extension"})

    def __dir__() -> list[str]:
        return __all__


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        kind, method = _RENAMED[name]
        warnings.warn(f"memplan.{name} is memplan.{kind}.{method} now", DeprecationWarning, stacklevel=2)
        return getattr(__getattr__(kind), method)
    if name == "kernels":
        return importlib.import_module("memplan.kernels")
    if name not in _HOMES:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    with deferred():  # a library that it imports is not left half imported
        return getattr(importlib.import_module(_HOMES[name]), name)


def _reports() -> Any:
    return importlib.import_module("memplan.reports.results")


draw_with(_reports)
