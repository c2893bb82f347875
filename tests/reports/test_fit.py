"""What `memplan fit` says: the figures of plan and proof, and no success where there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from reports.outcomes import FRONTIER, MIB, PROOF, WRONG, kept, plan

from memplan.errors import BudgetError
from memplan.planning.graph.precision import Precision
from memplan.planning.plan.plan import Plan
from memplan.reports.fit import report, script_report
from memplan.reports.terminal import text_of
from memplan.verification.fitting.outcome import Fitting, Lines, Outcome
from memplan.verification.proof.moments import MomentsError
from memplan.verification.proof.proof import Proof

SHORT = BudgetError(
    "The budget is 100.0 MiB", expected="at least 200.0 MiB", do="Halve the batch", smallest_budget=200 * MIB
)
DONE = Outcome("net.py:make", plan(budget=390 * MIB), PROOF)  # tightened: the budget asked for is the proof's
CASES = {
    "done": (DONE, True, "net.py:make fits the budget of 400.0 MiB now, and its result is the same."),
    "predicted": (
        Outcome("net.py:make", plan()), True,
        "net.py:make can be made to fit the budget of 400.0 MiB; nothing was run.",
    ),
    "already": (
        Outcome("net.py:make", kept(), changed=False), True,
        "net.py:make fits the budget of 1.0 GiB already: nothing was changed.",
    ),
    "wrong": (
        Outcome("net.py:make", plan(), WRONG), False,
        "net.py:make was NOT made to fit the budget of 400.0 MiB: the proof failed.",
    ),
    "too small": (
        Outcome("net.py:make", None, changed=False, shortfall=SHORT), False,
        "net.py:make does not fit. The smallest budget that it fits is 200.0 MiB.",
    ),
}  # fmt: skip


def printed(outcome: Outcome) -> list[str]:
    return [" ".join(line.split()) for line in text_of(report(outcome)).splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str) -> None:
    outcome, fits, verdict = CASES[name]
    assert outcome.fits is fits
    assert printed(outcome)[0] == verdict


def test_before_and_after_as_predicted_and_as_measured() -> None:
    lines = printed(DONE)
    at = lines.index("Of a step before after change")
    assert lines[at + 2 : at + 6] == [
        "predicted peak 600.0 MiB 300.0 MiB -50.0 %",
        "measured peak 605.0 MiB 301.0 MiB -50.2 %",
        "predicted time 300 ms 330 ms +10.0 %",
        "measured time 320 ms 360 ms +12.0 %",  # the median of ratios, not the ratio of medians
    ]


def test_plan_proof_and_frontier_are_shown() -> None:
    text = "\n".join(printed(Outcome("t", plan(), PROOF, frontier=FRONTIER, notes=("it is new",))))
    assert "relu_1 layer1 8.0 MiB recompute 30 ms" in text
    assert "the same bit for bit over 3 steps" in text
    assert "note: it is new" in text
    assert text.endswith("200.0 MiB 33 % 150 ms 50.0 % the floor")


def test_a_step_that_fits_already_shows_no_plan_but_its_peak() -> None:
    lines = printed(CASES["already"][0])
    assert lines[2:6] == ["Of a step as it is", lines[3], "predicted peak 600.0 MiB", "predicted time 300 ms"]
    assert "note: no optimizer was given" in lines
    assert not any("Plan for" in line or "measured" in line for line in lines)


def test_a_shortfall_says_why_and_what_would_help() -> None:
    assert printed(CASES["too small"][0])[1:] == [
        "The budget is 100.0 MiB.",
        "Expected at least 200.0 MiB.",
        "Halve the batch.",
    ]


def test_json_holds_the_plan_and_the_proof_as_they_are_written_alone() -> None:
    data = json.loads(Outcome("t", plan(), PROOF, frontier=FRONTIER).to_json())
    assert Plan.from_dict(data["plan"]) == plan()
    assert Proof.from_dict(data["proof"]) == PROOF
    assert isinstance(PROOF, Proof)
    assert (data["format"], data["fits"], data["changed"]) == ("memplan.fit", True, True)
    assert data["frontier"]["points"][2] == {"peak": 200 * MIB, "seconds": 0.15, "lost": ""}


def test_json_of_a_shortfall() -> None:
    data = json.loads(CASES["too small"][0].to_json())
    assert (data["fits"], data["plan"], data["smallest_budget"]) == (False, None, 200 * MIB)
    assert data["reason"] == "The budget is 100.0 MiB. Expected at least 200.0 MiB. Halve the batch."


LINES = Lines("train.py:13", False, ("import memplan", 'memplan.fit(model, "8x8", budget=380)'))
SCRIPT = Fitting("train.py", 500 * MIB, 700 * MIB, 80 * MIB, 20 * MIB, plan(), lines=LINES)
SCRIPTS = {
    "planned": (SCRIPT, [
        "train.py can be made to fit 500.0 MiB; nothing was run.",
        "",
        "the script as it is 700.0 MiB",
        "the model's step 600.0 MiB -> 300.0 MiB",
        "beside the model at most 80.0 MiB",
        "the allocator's 20.0 MiB: context and cached blocks, as recorded",
        "the script planned at most 500.0 MiB",
    ]),
    "already": (Fitting("train.py", 500 * MIB, 400 * MIB), [
        "train.py fits 500.0 MiB already: it takes 400.0 MiB. There is nothing to change.",
    ]),
    "already, about": (Fitting("train.py", 500 * MIB, 400 * MIB, recorded_band=(390 * MIB, 420 * MIB)), [
        "train.py fits 500.0 MiB already: it takes about 400.0 MiB (95 %: 390.0 MiB to",
        "420.0 MiB). There is nothing to change.",
    ]),
    "too small": (Fitting("train.py", 100 * MIB, 700 * MIB, 80 * MIB, shortfall=SHORT), [
        "train.py does not fit 100.0 MiB. The smallest budget with a plan is 280.0 MiB.",
        "",
        "the script as it is 700.0 MiB",
        "beside the model at most 80.0 MiB",
    ]),
}  # fmt: skip


def printed_script(found: Fitting) -> list[str]:
    return [" ".join(line.split()) for line in text_of(script_report(found)).splitlines()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_figures(name: str) -> None:
    found, lines = SCRIPTS[name]
    assert printed_script(found)[: len(lines)] == lines


@pytest.mark.parametrize(
    ("where", "before", "said"),
    [
        ("train.py:13", False, "Add after train.py:13:"),
        ("train.py:13", True, "Add before train.py:13:"),
        (None, False, "Add before the first step, where the model is at hand:"),
    ],
)
def test_the_lines_to_add_and_their_place(where: str | None, before: bool, said: str) -> None:
    lines = printed_script(replace(SCRIPT, lines=Lines(where, before, LINES.text)))
    at = lines.index(said)
    assert lines[at + 2 : at + 4] == ["import memplan", 'memplan.fit(model, "8x8", budget=380)']


def test_a_script_as_json() -> None:
    data = json.loads(SCRIPT.to_json())
    assert (data["format"], data["fits"], data["changed"]) == ("memplan.fit_script", True, True)
    assert (data["recorded"], data["planned"], data["smallest_budget"]) == (700 * MIB, (400 + 80 + 20) * MIB, None)
    assert data["lines"]["where"] == "train.py:13"
    assert Plan.from_dict(data["plan"]) == plan()


def test_the_verdict_has_the_error_of_moments_in_8_bits() -> None:
    lossy = replace(plan(), precision=Precision(moments="int8"))
    near = replace(PROOF, grade="lossy", moments=MomentsError(20, 0.0198, "weight", 0.0214))
    text = " ".join(printed(Outcome("net.py:make", lossy, near)))
    assert "It is lossy, moments in 8 bits: its gradients are 0.00% off, and what 20 updates add is 1.98% off." in text
    assert near.same
    far = replace(near, moments=MomentsError(20, 0.25, "weight", 0.5))
    assert not far.same
    assert any("25.00% off" in failure for failure in far.failures)
    assert "the proof failed" in printed(Outcome("net.py:make", lossy, far))[0]


def test_the_verdict_where_moments_alone_are_lossy() -> None:
    lossy = replace(plan(), precision=Precision(moments="int8"))
    near = replace(PROOF, moments=MomentsError(20, 0.0198, "weight", 0.0214))
    text = " ".join(printed(Outcome("net.py:make", lossy, near)))
    assert (
        "It is lossy, moments in 8 bits: its gradients are the same bit for bit, and what 20 updates add is 1.98% off."
    ) in text
    assert near.same
    assert not near.exact
    idle = replace(PROOF, moments=MomentsError(20, 0.0, "", 0.0, compared=False))
    assert "what 20 updates add was not compared." in " ".join(printed(Outcome("net.py:make", lossy, idle)))
