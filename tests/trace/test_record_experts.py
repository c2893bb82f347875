"""A rank with a part of the experts: its bytes are those of real tensors in the same fake process group."""

from __future__ import annotations

import pytest
from environment import slow
from models.expert_steps import EXPERTS, TOKENS, line_of, step_of
from truth.rank_peak import measured_peak_of_rank

import memplan
from memplan.errors import DataDependentError


@pytest.mark.parametrize(("exchange", "world"), [("c10d", 2), ("functional", 4), *slow(("c10d", 4), ("functional", 2))])
def test_a_rank_is_what_it_is_with_real_tensors(exchange: str, world: int) -> None:
    build = step_of(exchange)
    predicted = memplan.simulate(memplan.record(build, world=world, rank=1)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(build, world, 1), rel=1e-3)


@pytest.mark.parametrize(
    ("exchange", "received"),
    [("c10d", 1), ("functional", TOKENS), *slow(*((way, TOKENS // 2) for way in ("c10d", "functional")))],
)
def test_assumed_routing_is_what_it_is_with_real_tensors(exchange: str, received: int) -> None:
    """One, the even half, or all of each rank's tokens come to this one; an element of counts is of two experts."""
    shares = {line_of("what it sends"): 1 / EXPERTS, line_of("what it receives"): received / TOKENS / 2}
    trace = memplan.record(step_of(exchange, dropless=True), world=2, rank=1, assume=shares)
    truth = measured_peak_of_rank(step_of(exchange, received=received), 2, 1)
    # beside counts, which are not there where sizes are fixed
    assert memplan.simulate(trace).peak_allocated == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("exchange", ["c10d", "functional"])
def test_parts_whose_sizes_are_values_are_refused_with_the_share_of_even_routing(exchange: str) -> None:
    with pytest.raises(DataDependentError, match=r"(?s)all_to_all_single sends as much as .*even routing") as caught:
        memplan.record(step_of(exchange, dropless=True), world=2)
    assert f"--assume {line_of('what it receives')}={1 / EXPERTS:.6g}" in str(caught.value)
