"""A rank with a part of the experts: its bytes are those of real tensors in the same fake process group."""

from __future__ import annotations

import pytest
from environment import slow
from models.expert_steps import step_of
from truth.rank_peak import measured_peak_of_rank

import memplan
from memplan.errors import DataDependentError


@pytest.mark.parametrize(("exchange", "world"), [("c10d", 2), ("functional", 4), *slow(("c10d", 4), ("functional", 2))])
def test_a_rank_is_what_it_is_with_real_tensors(exchange: str, world: int) -> None:
    build = step_of(exchange)
    predicted = memplan.simulate(memplan.record(build, world=world, rank=1)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(build, world, 1), rel=1e-3)


@pytest.mark.parametrize("exchange", ["c10d", "functional"])
def test_parts_whose_sizes_are_values_are_refused_with_their_line(exchange: str) -> None:
    with pytest.raises(DataDependentError, match=r"(?s)all_to_all_single sends as much as .*even routing") as caught:
        memplan.record(step_of(exchange, dropless=True), world=2)
    assert "expert_steps.py" in str(caught.value)
