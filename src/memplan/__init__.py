"""memplan: where the memory of a PyTorch step goes, before it runs.

Names are looked up when they are first used, so that importing memplan (and the command's help) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memplan.errors import MemplanError

if TYPE_CHECKING:
    from memplan.explanation.explain import explain
    from memplan.explanation.model import Explanation
    from memplan.simulation.liveness import simulate
    from memplan.simulation.model import Timeline
    from memplan.simulation.replay import Replay, replay
    from memplan.trace.json import load_trace, save_trace
    from memplan.trace.measure import measure
    from memplan.trace.model import Trace
    from memplan.trace.record import record
    from memplan.trace.spec import spec

__version__ = "0.1.0"

_HOMES = {
    "Explanation": "memplan.explanation.model",
    "Replay": "memplan.simulation.replay",
    "Timeline": "memplan.simulation.model",
    "Trace": "memplan.trace.model",
    "explain": "memplan.explanation.explain",
    "load_trace": "memplan.trace.json",
    "measure": "memplan.trace.measure",
    "record": "memplan.trace.record",
    "replay": "memplan.simulation.replay",
    "save_trace": "memplan.trace.json",
    "simulate": "memplan.simulation.liveness",
    "spec": "memplan.trace.spec",
}

__all__ = [
    "Explanation",
    "MemplanError",
    "Replay",
    "Timeline",
    "Trace",
    "__version__",
    "explain",
    "load_trace",
    "measure",
    "record",
    "replay",
    "save_trace",
    "simulate",
    "spec",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
