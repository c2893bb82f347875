"""Rounding is told from errors by float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from memplan.verification.proof.differences import Difference
from memplan.verification.proof.rounding import (
    LOSSY,
    ROUNDING,
    Rounded,
    Tolerance,
    beyond_tolerance,
    by_layer,
    distance,
    is_truth,
    is_yardstick,
    overall,
    rounding_errors,
    truth_label,
)

EPS = 2.0**-23
"""Of float32."""


def judged(candidate: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor) -> bool:
    (one,) = rounding_errors("gradients", 0, {"a.weight": truth}, [{"a.weight": reference}], {"a.weight": candidate})
    return one.within


def test_a_sum_in_another_order_is_rounding_and_a_lost_term_is_none() -> None:
    torch.manual_seed(0)
    terms = torch.randn(4096, 64, dtype=torch.float64)
    narrow = terms.float()
    reference = narrow.sum(0)
    other = narrow.flip(0).view(64, 64, 64).sum(0).sum(0)
    assert not torch.equal(other, reference)
    assert judged(other, reference, terms.sum(0))
    assert not judged(narrow[1:].sum(0), reference, terms.sum(0))
    assert not judged(other * 1.001, reference, terms.sum(0))


# The bounds are those that docs/fit.md states to people who read a proof: written out here, so that another one is
# another promise.


def is_within(
    error: float,
    reference: float,
    tolerance: Tolerance = ROUNDING,
    *,
    largest: float = 1.0,
    norm: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether a tensor of this norm may be off by ``error`` where the step without a plan is by ``reference``, in a
    module whose largest gradient has the norm ``largest``."""

    def named(weight: float, bias: float) -> dict[str, torch.Tensor]:
        return {"a.weight": torch.tensor([weight, 0.0]), "a.bias": torch.tensor([0.0, bias], dtype=dtype)}

    truth = {name: one.double() for name, one in named(largest, 0.0).items()}
    truth["a.bias"] = torch.tensor([norm, 0.0]).double()
    steps = [{"a.weight": named(largest, 0.0)["a.weight"], "a.bias": (torch.tensor([norm, off])).to(dtype)}
             for off in (reference, error)]  # fmt: skip
    found = {one.name: one for one in rounding_errors("gradients", 0, truth, steps[:1], steps[1], tolerance)}
    assert found["a.bias"].error == pytest.approx(error, rel=0.01, abs=1e-12)
    return found["a.bias"].within


def test_twice_the_rounding_of_the_step_without_a_plan_is_allowed() -> None:
    assert is_within(1.97e-3, 1e-3)  # the 64 eps are less than 1e-5 of these
    assert not is_within(2.03e-3, 1e-3)


def test_the_worst_of_several_steps_is_what_is_doubled() -> None:
    truth, near, far = torch.zeros(9).double(), torch.full((9,), 1.0), torch.full((9,), 2.0)
    for value, within in ((3.9, True), (4.1, False)):
        (one,) = rounding_errors(
            "gradients", 0, {"x": truth}, [{"x": near}, {"x": far}], {"x": torch.full((9,), value)}
        )
        assert (one.within, one.reference) == (within, 6.0)


def test_what_is_zero_in_truth_may_be_64_eps_of_the_module_s_largest_gradient() -> None:
    assert is_within(63 * 2.0**-23 * 10, 0.0, largest=10.0, norm=0.0)
    assert not is_within(65 * 2.0**-23 * 10, 0.0, largest=10.0, norm=0.0)
    assert is_within(63 * 2.0**-7, 0.0, norm=0.0, dtype=torch.bfloat16)  # an eps is that of the tensor's own dtype
    assert not is_within(65 * 2.0**-7, 0.0, norm=0.0, dtype=torch.bfloat16)
    alone = {"b.bias": torch.tensor([EPS])}
    (one,) = rounding_errors("gradients", 0, {"b.bias": torch.zeros(1).double()}, [{"b.bias": torch.zeros(1)}], alone)
    assert not one.within  # a module without another gradient has nothing that it could be rounding of


def test_steps_that_round_much_may_differ_by_a_quarter_beyond_what_a_lossy_plan_is_allowed() -> None:
    """Of a gradient that the yardstick loses by ``r``, min(4 r, 0.75) is allowed, or 1.25 r, and two bfloat16 eps."""
    eps = 2 * 2.0**-7
    for reference, allowed in ((0.05, 0.2), (0.1, 0.4), (0.3, 0.75), (0.59, 0.75), (0.7, 0.875), (1.0, 1.25)):
        assert is_within(0.99 * (allowed + eps), reference, LOSSY)
        assert not is_within(1.01 * (allowed + eps), reference, LOSSY)
    assert is_within(0.99 * eps, 0.0, LOSSY)
    assert not is_within(1.01 * eps, 0.0, LOSSY)


def of_gradients(own: float, other: float | None = None) -> list[Rounded]:
    """The errors of a layer that the step without a plan, and another one, are off by these shares."""
    truth = {"layer.weight": torch.linspace(1, 2, 100, dtype=torch.float64)}
    shares = (own,) if other is None else (own, other)
    ran = [{name: one * (1 + share) for name, one in truth.items()} for share in shares]
    return rounding_errors("gradients", 0, truth, ran, ran[0])


def test_float64_is_no_truth_where_the_step_is_a_tenth_of_all_gradients_off() -> None:
    """Batch norms of few samples make 0.02 of rounding; another mask of a dropout of p is sqrt(2 p / (1 - p)) off in
    what it masks, which for p of 0.01 is 0.14."""
    assert is_truth(of_gradients(0.02))
    assert is_truth(of_gradients(0.098))
    assert not is_truth(of_gradients(0.102))
    assert not is_truth(of_gradients(math.sqrt(2 * 0.01 / 0.99)))


def test_float64_is_the_truth_of_a_step_in_bfloat16_that_draws_nothing() -> None:
    """Rounding to bfloat16 makes more than a tenth; no mask of a dropout can be another."""
    assert is_truth(of_gradients(0.14), draws=False)
    assert not is_truth(of_gradients(0.14), draws=True)
    assert not is_truth(of_gradients(0.21), draws=False)


@pytest.mark.parametrize(
    ("own", "other", "tolerance", "accepted"),
    [
        (0.05, 0.098, ROUNDING, True),
        (0.05, 0.102, ROUNDING, False),
        (1e-5, 0.98e-2, ROUNDING, True),  # a thousand times as far off as the step without a plan
        (1e-5, 1.04e-2, ROUNDING, False),
        (0.05, 0.49, LOSSY, True),
        (0.05, 0.51, LOSSY, False),
        (1e-5, 0.49, LOSSY, True),  # autocast rounds more than the step does
    ],
)
def test_a_yardstick_is_not_off_by_more_than_rounding(
    own: float, other: float, tolerance: Tolerance, accepted: bool
) -> None:
    assert is_yardstick(of_gradients(own, other), tolerance) is accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_no_rounding(bad: float) -> None:
    one = torch.ones(3)
    assert not judged(torch.tensor([1.0, bad, 1.0]), one, one.double())


def test_infinities_that_belong_there_do_not_differ() -> None:
    masked = torch.tensor([-math.inf, 1.0])
    assert distance(masked.double(), masked) == 0.0
    assert judged(masked, masked, masked.double())


def test_only_what_is_more_than_rounding_is_told() -> None:
    truth, reference = {"x": torch.ones(2).double()}, {"x": torch.ones(2)}
    differs = Difference("x", 0, "differs", 1e-8, 1e-8)
    shape = Difference("x", 0, "has the shape (3,), not (2,)")
    near = rounding_errors("gradients", 0, truth, [reference], {"x": torch.ones(2) * (1 + EPS)})
    far = rounding_errors("gradients", 0, truth, [reference], {"x": torch.ones(2) * 1.5})
    assert beyond_tolerance([differs], near) == []
    assert [one.what.partition(" (")[0] for one in beyond_tolerance([differs], far)] == ["is 0.5 from float64"]
    assert beyond_tolerance([shape], near) == [shape]
    assert beyond_tolerance([differs], far, truth_label("the step run again"))[0].what.startswith(
        "is 0.5 from the step without a plan"
    )


@pytest.mark.parametrize(
    ("own", "told"),
    [(math.nan, "and so has the step without a plan"), (1.0, "where the step without a plan has numbers")],
)
def test_of_a_nan_it_is_said_whose_it_is(own: float, told: str) -> None:
    truth = {"a.w": torch.tensor([own]).double()}
    judged = rounding_errors("gradients", 0, truth, [{"a.w": torch.tensor([own])}], {"a.w": torch.tensor([math.nan])})
    (found,) = beyond_tolerance([Difference("a.w", 0, "differs", 1.0)], judged)
    assert found.what == f"has a nan, {told}"


def test_of_a_gradient_that_is_zero_in_truth_no_ratio_is_told() -> None:
    truth, one = torch.tensor([1e-18]).double(), torch.tensor([3e-6])
    judged = rounding_errors(
        "gradients", 0, {"a.b": truth, "a.w": torch.ones(1).double()}, [{"a.b": one / 10}], {"a.b": one}
    )
    (found,) = beyond_tolerance([Difference("a.b", 0, "differs", 3e-6)], [replace(one, allowed=1e-7) for one in judged])
    assert found.what == "is 3e-06 from float64 (in L2, where float64 has 1e-18), and 1e-07 is allowed"


def test_lossy_is_what_autocast_loses_a_few_times_and_never_a_gradient_that_is_gone() -> None:
    torch.manual_seed(0)
    truth = torch.randn(200).double()
    off = torch.randn(200).double()
    off /= off.norm()

    def within(error: float, autocast: float) -> bool:
        one, other = (truth + share * float(truth.norm()) * off for share in (error, autocast))
        (found,) = rounding_errors(
            "gradients", 0, {"a.w": truth}, [{"a.w": other.float()}], {"a.w": one.float()}, LOSSY
        )
        assert found.relative == pytest.approx(error, abs=1e-6, nan_ok=True)
        return found.within

    assert within(0.039, 0.01)
    assert not within(0.1, 0.01)
    assert not within(1.0, 0.01)
    assert not within(1.0, 0.3)  # four times 0.3 would allow that
    assert within(0.3, 0.3)
    assert within(0.76, 0.53)  # autocast itself is off by half of it
    assert not within(0.8, 0.53)
    assert within(0.87, 0.7)
    assert not within(1.0, 0.7)
    assert not within(math.nan, 0.3)
    assert within(0.01, 0.0)
    assert not within(0.03, 0.0)


def test_an_output_is_held_against_itself_not_against_a_larger_one() -> None:
    truth = {"output 0": torch.full((64,), 30.0).double(), "output 1": torch.tensor(2.0).double()}
    right = {name: one.float() for name, one in truth.items()}
    lost = {**right, "output 1": torch.tensor(0.0)}
    for tolerance in (ROUNDING, LOSSY):
        found = {one.name: one.within for one in rounding_errors("outputs", 0, truth, [right], lost, tolerance)}
        assert found == {"output 0": True, "output 1": False}


def test_the_table_adds_up_squares() -> None:
    torch.manual_seed(0)
    truth = {name: torch.randn(7).double() for name in ("a.weight", "a.bias", "b.weight")}
    found = {name: (one + 0.1 * torch.randn(7)).float() for name, one in truth.items()}
    judged = rounding_errors("gradients", 0, truth, [{name: one.float() for name, one in truth.items()}], found, LOSSY)
    rows = {one.layer: one for one in by_layer(judged)}
    assert list(rows) == ["a", "b"]
    both = [torch.cat([one["a.weight"].double(), one["a.bias"].double()]) for one in (truth, found)]
    assert rows["a"].relative == pytest.approx(float((both[0] - both[1]).norm() / both[0].norm()))
    every = [torch.cat([one[name].double() for name in truth]) for one in (truth, found)]
    assert overall(judged, "gradients").relative == pytest.approx(float((every[0] - every[1]).norm() / every[0].norm()))
    assert overall(judged, "outputs").norm == 0


@pytest.mark.parametrize(
    ("own", "other", "exact", "told"),
    [
        (1e-6, 1e-6, True, True),
        (1e-6, 2e-4, True, True),
        (1e-6, 0.05, True, False),  # dropout of few, by other numbers
        (0.01, 0.05, True, True),  # batch norms of few samples
        (0.01, 1.4, True, False),  # and dropout by other numbers
        (0.0, 0.02, False, True),  # errors are measured from the step itself
        (0.0, 1.4, False, False),
    ],
)
def test_what_is_much_farther_off_than_rounding_says_nothing_of_it(
    own: float, other: float, exact: bool, told: bool
) -> None:
    truth = {"layer.weight": torch.linspace(1, 2, 100, dtype=torch.float64)}
    ran = [{name: one * (1 + error) for name, one in truth.items()} for error in (own, other)]
    assert is_yardstick(rounding_errors("gradients", 0, truth, ran, ran[0]), exact=exact) is told
