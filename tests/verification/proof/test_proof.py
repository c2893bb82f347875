from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from memplan.errors import UsageError
from memplan.planning.plan.plan import Grade
from memplan.verification.measurement.peak_and_time import Times
from memplan.verification.proof.differences import Compared, Difference
from memplan.verification.proof.proof import Cut, Proof
from memplan.verification.proof.rounding import Rounded

GOOD = Proof(
    3, 1, "AdamW", False, Compared(3), Compared(12), Compared(12), Compared(6), (), 1 << 20, 5 << 20, 9 << 20,
    5 << 20, 6 << 20, Times(5, 0.5, 0.6, 1.2, (1.1, 1.3)), "2.13.0",
)  # fmt: skip
BAD = dataclasses.replace(
    GOOD,
    gradients=Compared(12, (Difference("a.weight", 1, "differs by up to 1 (relative inf, in L2)", 1.0, float("inf")),)),
    random_streams=("torch",),
    budget=4 << 20,
    times=None,
)


PART = dataclasses.replace(GOOD, cut=Cut(2, 16, 40 << 20, 32 << 20, True))


@pytest.mark.parametrize("proof", [GOOD, BAD, PART])
def test_json_and_pickle_give_the_same_value_back(proof: Proof) -> None:
    assert Proof.from_json(proof.to_json()) == proof
    assert pickle.loads(pickle.dumps(proof)) == proof
    assert json.loads(proof.to_json())["ok"] is proof.ok


def test_what_is_wrong_is_said() -> None:
    assert GOOD.ok
    assert GOOD.exact
    assert GOOD.above_resident == 4 << 20
    assert (BAD.ok, BAD.exact, BAD.within_budget) == (False, False, False)
    assert BAD.failures == (
        "the gradient of a.weight differs by up to 1 (relative inf, in L2) in step 2",
        "the random stream of torch is elsewhere after the step",
        "the measured peak is 1.0 MiB over the budget of 4.0 MiB",
    )


def test_a_proof_prints_itself() -> None:
    assert str(GOOD) == (
        "the same bit for bit over 3 steps with AdamW: 3 outputs, 12 gradients, 12 updated parameters, 6 buffers, "
        "the random streams\n"
        "peak 5.0 MiB measured, 5.0 MiB predicted, 6.0 MiB budget, 9.0 MiB before (1.0 MiB of each are weights, "
        "buffers and inputs)\n"
        "1.20 times the time (1.10 to 1.30, the middle half of 5 pairs): 0.5 s before, 0.6 s now"
    )
    assert str(BAD).startswith("NOT the same: the gradient of a.weight differs")
    assert "EXCEEDED" in str(BAD)


@pytest.mark.parametrize(
    ("truth", "reference", "own", "told"),
    [
        ("float64", 0.3, 0.01, "off from float64 by {}; the step without a plan under autocast by 30.00%; the"),
        ("float64", 0.01, 0.01, "off from float64 by {}; the step without a plan by 1.00%; the"),
        ("reference", 0.0, 0.0, "off from the step without a plan by {}; the"),
    ],
    ids=["autocast ran", "it did not", "neither did float64"],
)
def test_a_lossy_proof_says_of_what_ran_how_far_off_it_is(truth: str, reference: float, own: float, told: str) -> None:
    judged = Rounded("gradients", "a.weight", 0, 0.2, reference, 1.0, 0.5, own)
    text = str(dataclasses.replace(GOOD, grade="lossy", truth=truth, rounded=(judged,)))
    assert told.format("(relative, in L2): gradients 20.00%") in text


@pytest.mark.parametrize(
    ("truth", "reference", "told"),
    [
        ("float64", 0.1, "0.2 from float64 in L2 (its norm is 4); 0.5 is allowed, and the step without a plan is 0.1 "
         "from it"),
        ("reference", 0.3, "0.2 from the step without a plan in L2 (its norm is 4); 0.5 is allowed, and another run of "
         "that step 0.3"),
    ],
)  # fmt: skip
def test_where_rounding_is_allowed_the_gradient_nearest_to_its_limit_is_named(
    truth: str, reference: float, told: str
) -> None:
    """Not the one with the largest error: that of b.weight may be off by more."""
    errors = (
        Rounded("gradients", "a.weight", 0, 0.2, reference, 4.0, 0.5, 0.1),
        Rounded("gradients", "b.weight", 0, 0.3, 0.3, 4.0, 6.0, 0.1),
    )
    text = str(dataclasses.replace(GOOD, grade="reordered", truth=truth, rounded=errors))
    assert f"\nnearest to its limit: the gradient of a.weight, {told}\n" in text


@pytest.mark.parametrize(
    ("grade", "told"),
    [
        (
            "exact",
            "the same bit for bit over 3 steps with AdamW, applied early: 3 outputs, 12 gradients, 12 updated "
            "parameters, 36 tensors of the optimizer's state, 6 buffers, the random streams",
        ),
        (
            "reordered",
            "the same but for rounding over 3 steps with AdamW, applied early: 3 outputs, 12 gradients, 6 buffers, the "
            "random streams; bit for bit what step() makes of these gradients: 12 updated parameters, 36 tensors of "
            "the optimizer's state",
        ),
    ],
)
def test_a_proof_of_early_updates_says_what_they_were_compared_with(grade: Grade, told: str) -> None:
    early = dataclasses.replace(GOOD, early=True, grade=grade, state=Compared(36))
    assert str(early).splitlines()[0] == told
    stale = Difference("exp_avg of a.weight", 0, "is missing")
    wrong = dataclasses.replace(early, state=Compared(36, (stale,)))
    assert wrong.failures == ("after the update exp_avg of a.weight is missing in step 1",)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "memplan.trace", "schema": 1}', GOOD.to_json().replace('"schema":1', '"schema":2'),
     GOOD.to_json().replace('"resident"', '"dweller"')],
)  # fmt: skip
def test_what_is_no_proof_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"f\.json is no proof"):
        Proof.from_json(text, "f.json")


def test_a_proof_says_what_was_compared_and_what_was_only_measured_or_predicted() -> None:
    said = str(PART).splitlines()
    assert said[1] == (
        "compared with 2 of the 16 samples: with all of them that takes 40.0 MiB, and 32.0 MiB are available; the "
        "planned step was measured with all"
    )
    assert said[2].startswith("peak 5.0 MiB measured, 5.0 MiB predicted, 6.0 MiB budget, 9.0 MiB predicted before")
    assert said[3].startswith("1.20 times the time of 2 of the 16 samples")
    blind = dataclasses.replace(PART, cut=Cut(2, 16, 40 << 20, 32 << 20, False), budget=4 << 20)
    assert "Not even the planned step was run with all" in str(blind)
    assert "peak not measured, 5.0 MiB predicted" in str(blind)
    assert blind.failures == ("the predicted peak is 1.0 MiB over the budget of 4.0 MiB",)


@pytest.mark.parametrize("part", ["cut", "state"])
def test_a_proof_written_before_there_was_such_a_part_is_read(part: str) -> None:
    data = json.loads(GOOD.to_json())
    del data[part]
    assert Proof.from_json(json.dumps(data)) == GOOD
