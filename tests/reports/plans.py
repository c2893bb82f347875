"""A plan of a few decisions, as reports draw it."""

from __future__ import annotations

from memplan.planning.plan.decision import Decision, Scope
from memplan.planning.plan.plan import Plan
from memplan.planning.schedule.actions import Choices
from memplan.reports.plan import report
from memplan.reports.terminal import text_of
from memplan.simulation.timeline import StepPeak, Timeline

MIB = 1 << 20
REASON = "needed by convolution_backward of encoder.layers.3.attention.output; making it again would take 41 ms"
PEAK = StepPeak(0, 2, 252 * MIB, 252 * MIB, 2, 2)
TIMELINE = Timeline("cpu", ((2, 252 * MIB, 252 * MIB),), PEAK, (), 252 * MIB, 252 * MIB, 2, 2)


def value(name: str, lever: str, size: int, seconds: float = 0.0, layer: str = "layer1") -> Decision:
    return Decision(lever, Scope("value", (name,)), "exact", size, seconds, layer, "net.py:3", REASON)


DECISIONS = (
    value("small", "keep", 1 * MIB),
    value("large", "keep", 30 * MIB),
    value("relu", "recompute", 8 * MIB, 0.003),
    value("mask", "encode", 2 * MIB, 0.0005),
    value("relu_1", "recompute", 4 * MIB, 0.001),
    Decision("in place", Scope("step"), "exact", 70 * MIB, 0.0, reason="results in the memory of others: 9"),
)
PLAN = Plan(
    fingerprint="ab" * 32,
    torch="2.13.0",
    device="cpu",
    budget=260 * MIB,
    decisions=DECISIONS,
    choices=Choices(frozenset({5})),
    names={"relu": 5},
    predicted=TIMELINE,
    eager_peak=381 * MIB,
    floor=188 * MIB,
    lower_bound=180 * MIB,
    seconds=0.0045,
    step_seconds=0.1,
    lower_bound_seconds=0.003,
    resident={"input": 9 * MIB, "weight": 44 * MIB},
    notes=("no optimizer was given",),
)


def piped(plan: Plan, top: int = 12) -> str:
    return text_of(report(plan, top))
