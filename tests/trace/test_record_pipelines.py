"""A rank of a pipeline: its bytes are those of real tensors in the same fake process group."""

from __future__ import annotations

import pytest
from environment import slow
from models.pipelined_steps import LENGTH, SEQUENCES, step_of
from models.sharded_steps import WIDTH
from truth.rank_peak import measured_peak_of_rank

import memplan
from memplan.errors import StepError


@pytest.mark.parametrize(
    ("schedule", "world", "rank"),
    [
        ("1f1b", 4, 0),
        *slow(
            ("interleaved", 2, 1), ("gpipe", 2, 0), ("gpipe", 4, 3), ("1f1b", 4, 3), ("1f1b", 2, 1),
            ("interleaved", 4, 0), ("zbv", 2, 0),
        ),
    ],
)  # fmt: skip
def test_a_rank_is_what_it_is_with_real_tensors(schedule: str, world: int, rank: int) -> None:
    build = step_of(schedule, 8)
    predicted = memplan.simulate(memplan.record(build, world=world, rank=rank)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(build, world, rank), rel=1e-3)


def _in_flight(trace: memplan.Trace) -> int:
    """Micro-batches whose saved tensors are alive at once, by the results of the one gelu of a stage."""
    size = SEQUENCES * LENGTH * 4 * WIDTH * 4
    results = [s for s in trace.storages if s.bytes == size and trace.ops[s.op or 0].name == "aten.gelu.default"]
    ends = [storage.died or trace.end for storage in results]
    return max(sum(other.born <= one.born < end for other, end in zip(results, ends, strict=True)) for one in results)


@pytest.mark.parametrize(
    ("rank", "device"), [(2, "h100"), *slow((0, "cpu"), (0, "h100"), (2, "cpu"), (3, "cpu"), (3, "h100"))]
)
def test_as_many_micro_batches_are_in_flight_as_stages_lie_behind(rank: int, device: str) -> None:
    """PipeDream's 1F1B, of p stages: rank r keeps p - r of them; GPipe keeps all, on each rank."""
    place = "cpu" if device == "cpu" else "cuda"
    one_by_one = memplan.record(step_of("1f1b", 8, device=place), device=device, world=4, rank=rank)
    assert _in_flight(one_by_one) == 4 - rank
    assert _in_flight(memplan.record(step_of("gpipe", 8, device=place), device=device, world=4, rank=rank)) == 8


def test_stages_without_shapes_are_recorded_where_they_can_be_known() -> None:
    """The first one has its inputs; what it gets back has the shapes of what it sent."""
    build = step_of("1f1b", 4, shapes=False)
    predicted = memplan.simulate(memplan.record(build, world=2)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(build, 2, 0), rel=1e-3)
    with pytest.raises(StepError, match=r"stage 1 .* learns the shapes .* from stage 0.* input_args"):
        memplan.record(build, world=2, rank=1)


def test_stages_may_have_a_communicator_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they learn their shapes in the first step."""
    config = pytest.importorskip("torch.distributed.config")
    if not hasattr(config, "pipeline_per_edge_p2p"):
        pytest.skip("before torch 2.15 a pipeline's ranks share their communicator")
    monkeypatch.setattr(config, "pipeline_per_edge_p2p", True)
    build = step_of("1f1b", 2, shapes=False)
    predicted = memplan.simulate(memplan.record(build, world=2)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(build, 2, 0), rel=1e-3)
