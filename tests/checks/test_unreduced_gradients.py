"""Gradients of whole weights between micro-batches: bytes as real tensors have them in the mended step."""

from __future__ import annotations

import pytest
from environment import slow
from models.sharded_steps import Transformer, step_of
from truth.rank_peak import measured_peak_of_rank

import memplan

ID = "unreduced-gradients"
PARAMETERS = sum(p.numel() * p.element_size() for p in Transformer().parameters())

# torch's own, in a real run, too
pytestmark = [
    pytest.mark.usefixtures("this_check_alone"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp bf16", "fsdp1", "fsdp", "fsdp1 bf16", "hsdp"])
def test_bytes_are_what_real_tensors_take_less_if_each_pass_reduces(way: str) -> None:
    kept, reduced = (step_of(f"{way}, twice{end}") for end in ("", " reduced"))
    (finding,) = memplan.check(kept, world=4)
    saved = measured_peak_of_rank(kept, 4) - measured_peak_of_rank(reduced, 4)
    assert (finding.id, finding.severity, finding.bytes) == (ID, "warning", pytest.approx(saved, rel=1e-3))
    (estimated,) = memplan.check(memplan.record(kept, world=4))
    # an estimate, as nothing is recorded again without a build
    assert estimated.bytes == pytest.approx(saved, rel=0.55 if way == "fsdp1 bf16" else 0.25)


def test_gradients_are_whole_in_float32() -> None:
    """As verl's users saw with ``reduce_dtype`` float32: 4 bytes a parameter."""
    (finding,) = memplan.check(step_of("fsdp bf16, twice"), world=4)
    assert (finding.details["held"], finding.details["dtypes"]) == (PARAMETERS, ["float32"])
    assert finding.details["shards"] == 4


@pytest.mark.parametrize("way", ["fsdp, twice reduced", *slow("fsdp1, twice reduced", "ddp, twice", "fsdp1", "tensor")])
def test_a_rank_that_reduces_or_copies_has_no_finding(way: str) -> None:
    assert ID not in {finding.id for finding in memplan.check(step_of(way), world=4)}
