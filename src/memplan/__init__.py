"""memplan: where the memory of a PyTorch step goes, before it runs.

Names are looked up when they are first used, so that importing memplan (and the command's help) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memplan.errors import BudgetError, MemplanError

if TYPE_CHECKING:
    from memplan.checks.check import check
    from memplan.checks.model import Finding
    from memplan.explanation.explain import explain
    from memplan.explanation.model import Explanation
    from memplan.planning.losses import with_loss
    from memplan.planning.plan import Plan, load_plan, save_plan
    from memplan.planning.step import plan
    from memplan.simulation.liveness import simulate
    from memplan.simulation.model import Timeline
    from memplan.simulation.replay import Replay, replay
    from memplan.studies.compare import compare
    from memplan.studies.comparison import Comparison
    from memplan.studies.largest import largest
    from memplan.studies.quantize import quantize
    from memplan.studies.quantized import Quantized
    from memplan.studies.sweep import Sweep, sweep
    from memplan.trace.json import load_trace, save_trace
    from memplan.trace.measure import measure
    from memplan.trace.model import Trace
    from memplan.trace.record import record
    from memplan.trace.spec import spec
    from memplan.verification.fit import Fitted, fit
    from memplan.verification.proof import Proof
    from memplan.verification.verify import verify

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "memplan.studies.comparison",
    "Explanation": "memplan.explanation.model",
    "Finding": "memplan.checks.model",
    "Fitted": "memplan.verification.fit",
    "Plan": "memplan.planning.plan",
    "Proof": "memplan.verification.proof",
    "Quantized": "memplan.studies.quantized",
    "Replay": "memplan.simulation.replay",
    "Sweep": "memplan.studies.sweep",
    "Timeline": "memplan.simulation.model",
    "Trace": "memplan.trace.model",
    "check": "memplan.checks.check",
    "compare": "memplan.studies.compare",
    "explain": "memplan.explanation.explain",
    "fit": "memplan.verification.fit",
    "largest": "memplan.studies.largest",
    "load_plan": "memplan.planning.plan",
    "load_trace": "memplan.trace.json",
    "measure": "memplan.trace.measure",
    "plan": "memplan.planning.step",
    "quantize": "memplan.studies.quantize",
    "record": "memplan.trace.record",
    "replay": "memplan.simulation.replay",
    "save_plan": "memplan.planning.plan",
    "save_trace": "memplan.trace.json",
    "simulate": "memplan.simulation.liveness",
    "spec": "memplan.trace.spec",
    "sweep": "memplan.studies.sweep",
    "verify": "memplan.verification.verify",
    "with_loss": "memplan.planning.losses",
}

__all__ = [
    "BudgetError",
    "Comparison",
    "Explanation",
    "Finding",
    "Fitted",
    "MemplanError",
    "Plan",
    "Proof",
    "Quantized",
    "Replay",
    "Sweep",
    "Timeline",
    "Trace",
    "__version__",
    "check",
    "compare",
    "explain",
    "fit",
    "largest",
    "load_plan",
    "load_trace",
    "measure",
    "plan",
    "quantize",
    "record",
    "replay",
    "save_plan",
    "save_trace",
    "simulate",
    "spec",
    "sweep",
    "verify",
    "with_loss",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
