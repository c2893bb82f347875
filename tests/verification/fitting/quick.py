"""Fit and plan with a short search, in tests that do not ask how good the plans are."""

from __future__ import annotations

from typing import Any

from memplan.planning import api
from memplan.planning.plan.plan import Plan
from memplan.planning.search.search import Heuristics
from memplan.verification.fitting import fit as fit_module
from memplan.verification.fitting.fit import Fitted

QUICK = Heuristics(relaxation=False, shakes=0, rounds=4)


def fit(model: Any, *inputs: Any, **options: Any) -> Fitted:
    """As `memplan.fit`."""
    return fit_module.fit(model, *inputs, **{"heuristics": QUICK, **options})


def plan(model: Any, *inputs: Any, **options: Any) -> Plan:
    """As `memplan.plan`."""
    return api.plan(model, *inputs, **{"heuristics": QUICK, **options})
