"""Every result shows itself."""

from __future__ import annotations

import memplan
from memplan._display import Displayed

NAMES = ("Comparison", "Explanation", "Exported", "Finding", "Fitted", "LineProfile", "Plan", "Proof", "Quantized",
         "Replay", "Sweep", "Timeline", "Trace")  # fmt: skip


def test_every_public_result_is_displayed() -> None:
    results = {name for name in memplan.__all__ if isinstance(getattr(memplan, name), type)}
    assert results - {"BudgetError", "Heuristics", "MemplanError"} == set(NAMES)
    assert all(issubclass(getattr(memplan, name), Displayed) for name in NAMES)
