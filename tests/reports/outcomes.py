"""A plan, a proof and a frontier made up for tests of what is printed and written."""

from __future__ import annotations

from dataclasses import replace

from memplan.planning.plan.decision import Decision, Scope
from memplan.planning.plan.plan import Plan
from memplan.planning.schedule.actions import Choices
from memplan.simulation.timeline import StepPeak, Timeline
from memplan.verification.fitting.frontier import Frontier, Point
from memplan.verification.measurement.peak_and_time import Times
from memplan.verification.proof.differences import Compared, Difference
from memplan.verification.proof.proof import Proof

MIB = 1 << 20


def timeline(peak: int) -> Timeline:
    return Timeline(
        "cpu", ((0, peak, peak),), StepPeak(0, 0, 0, 0, 0, 0), (StepPeak(0, 1, peak, peak, 0, 0),), peak, peak, 0, 0
    )


def plan(peak: int = 300 * MIB, budget: int = 400 * MIB) -> Plan:
    """8 MiB made again, at 30 ms."""
    again = Decision("recompute", Scope("value", ("relu_1",)), "exact", 8 * MIB, 0.03, "layer1", "net.py:7", "cheap")
    return Plan(
        fingerprint="0123456789abcdef" * 4,
        torch="2.13.0",
        device="cpu",
        budget=budget,
        decisions=(again,),
        choices=Choices(recompute=frozenset({4})),
        names={"relu_1": 4},
        predicted=timeline(peak),
        eager_peak=600 * MIB,
        floor=200 * MIB,
        lower_bound=150 * MIB,
        seconds=0.03,
        step_seconds=0.3,
        lower_bound_seconds=0.02,
        program="def forward(inputs):\n    pass\n",
        notes=("no optimizer was given",),
    )


def kept() -> Plan:
    """A plan that changes nothing."""
    return replace(plan(budget=1 << 30), decisions=(), choices=Choices(), predicted=timeline(600 * MIB), seconds=0.0)


PROOF = Proof(
    3, 1, "SGD", False, Compared(3), Compared(12), Compared(12), Compared(6), (), 50 * MIB, 301 * MIB, 605 * MIB,
    300 * MIB, 400 * MIB, Times(5, 0.32, 0.36, 1.12, (1.1, 1.15)), "2.13.0",
)  # fmt: skip
WRONG = replace(PROOF, gradients=Compared(12, (Difference("a.weight", 1, "differs by up to 1", 1.0, 1.0),)))
FRONTIER = Frontier(
    "net.py:make", (Point(590 * MIB, 0.0), Point(390 * MIB, 0.02), Point(200 * MIB, 0.15)), 600 * MIB, 0.3, 400 * MIB
)
