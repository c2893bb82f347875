"""memplan: where the memory of a PyTorch step goes, before it runs.

Names are looked up when they are first used, so that importing memplan (and the command's help) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memplan._display import draw_with
from memplan._interrupts import deferred
from memplan._version import __version__
from memplan.errors import BudgetError, MemplanError

if TYPE_CHECKING:
    from memplan.checks.check import check
    from memplan.checks.finding import Finding
    from memplan.explanation.explain import explain
    from memplan.explanation.line_profile import LineProfile
    from memplan.explanation.model import Explanation
    from memplan.explanation.why import Why, why
    from memplan.exporting.export import export
    from memplan.exporting.exported import Exported
    from memplan.exporting.weights_file import load_weights
    from memplan.integrations.line_profiles.decorator import profile
    from memplan.integrations.watching.watch import watch
    from memplan.planning.api import plan
    from memplan.planning.capture.loss_module import with_loss
    from memplan.planning.plan.plan import Plan, load_plan, save_plan
    from memplan.planning.search.search import Heuristics
    from memplan.simulation.replays.replay import replay
    from memplan.simulation.replays.replayed import Replay
    from memplan.simulation.simulate import simulate
    from memplan.simulation.timeline import Timeline
    from memplan.studies.capacity.largest import largest
    from memplan.studies.comparisons.compare import compare
    from memplan.studies.comparisons.comparison import Comparison
    from memplan.studies.guarding.assert_peak import assert_peak
    from memplan.studies.quantization.quantize import quantize
    from memplan.studies.quantization.quantized import Quantized
    from memplan.studies.sweeps.sweep import Sweep, sweep
    from memplan.trace.measure import measure
    from memplan.trace.record import record
    from memplan.trace.spec import spec
    from memplan.trace.trace import Trace, load_trace, save_trace
    from memplan.verification.fitting.fit import Fitted, fit
    from memplan.verification.proof.proof import Proof
    from memplan.verification.proof.verify import verify

_HOMES = {
    "Comparison": "memplan.studies.comparisons.comparison",
    "Explanation": "memplan.explanation.model",
    "Exported": "memplan.exporting.exported",
    "Finding": "memplan.checks.finding",
    "Fitted": "memplan.verification.fitting.fit",
    "Heuristics": "memplan.planning.search.search",
    "LineProfile": "memplan.explanation.line_profile",
    "Plan": "memplan.planning.plan.plan",
    "Proof": "memplan.verification.proof.proof",
    "Quantized": "memplan.studies.quantization.quantized",
    "Replay": "memplan.simulation.replays.replay",
    "Sweep": "memplan.studies.sweeps.sweep",
    "Timeline": "memplan.simulation.timeline",
    "Trace": "memplan.trace.trace",
    "Why": "memplan.explanation.why",
    "assert_peak": "memplan.studies.guarding.assert_peak",
    "check": "memplan.checks.check",
    "compare": "memplan.studies.comparisons.compare",
    "explain": "memplan.explanation.explain",
    "export": "memplan.exporting.export",
    "fit": "memplan.verification.fitting.fit",
    "largest": "memplan.studies.capacity.largest",
    "load_ipython_extension": "memplan.integrations.notebook.extension",
    "load_plan": "memplan.planning.plan.plan",
    "load_weights": "memplan.exporting.weights_file",
    "load_trace": "memplan.trace.trace",
    "measure": "memplan.trace.measure",
    "plan": "memplan.planning.api",
    "profile": "memplan.integrations.line_profiles.decorator",
    "quantize": "memplan.studies.quantization.quantize",
    "record": "memplan.trace.record",
    "replay": "memplan.simulation.replays.replay",
    "save_plan": "memplan.planning.plan.plan",
    "save_trace": "memplan.trace.trace",
    "simulate": "memplan.simulation.simulate",
    "spec": "memplan.trace.spec",
    "sweep": "memplan.studies.sweeps.sweep",
    "verify": "memplan.verification.proof.verify",
    "watch": "memplan.integrations.watching.watch",
    "why": "memplan.explanation.why",
    "with_loss": "memplan.planning.capture.loss_module",
}

__all__ = [
    "BudgetError",
    "Comparison",
    "Explanation",
    "Exported",
    "Finding",
    "Fitted",
    "Heuristics",
    "LineProfile",
    "MemplanError",
    "Plan",
    "Proof",
    "Quantized",
    "Replay",
    "Sweep",
    "Timeline",
    "Trace",
    "Why",
    "__version__",
    "assert_peak",
    "check",
    "compare",
    "explain",
    "export",
    "fit",
    "largest",
    "load_plan",
    "load_trace",
    "load_weights",
    "measure",
    "plan",
    "profile",
    "quantize",
    "record",
    "replay",
    "save_plan",
    "save_trace",
    "simulate",
    "spec",
    "sweep",
    "verify",
    "watch",
    "why",
    "with_loss",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    with deferred():  # a library that it imports is not left half imported
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__


def _reports() -> Any:
    return importlib.import_module("memplan.reports.results")


draw_with(_reports)
