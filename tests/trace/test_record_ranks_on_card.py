"""One rank on a card: its bytes are those of torch's own CUDA build in a fake process group."""

from __future__ import annotations

import functools

import pytest
from environment import ENVIRONMENT, needs_cuda_torch, slow
from models.card_ranks import LENGTH, step_of
from models.sharded_steps import WIDTH

import memplan

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


@needs_cuda_torch
@pytest.mark.parametrize(
    ("way", "world", "options"),
    [
        ("ddp", 2, ()), ("fsdp from the host", 2, ()), ("fsdp1", 2, ()),
        ("context", 2, ("allgather", "FLASH_ATTENTION")),
        *slow(
            ("fsdp", 2, ()), ("fsdp1 kept, own parameters", 2, ()), ("context", 4, ("alltoall", "FLASH_ATTENTION")),
            ("context", 2, ("allgather", "EFFICIENT_ATTENTION")), ("context", 2, ("alltoall", "CUDNN_ATTENTION")),
        ),
    ],
)  # fmt: skip
def test_a_rank_is_what_it_is_in_a_dry_run(way: str, world: int, options: tuple[str, ...]) -> None:
    build = functools.partial(step_of, way, world, *options)
    dry = memplan.measure(build, device="h100", dry=True, environment=ENVIRONMENT)
    recorded = memplan.record(build, device="h100", world=world)
    assert memplan.simulate(recorded).peak_allocated == memplan.simulate(dry).peak_allocated


def test_a_rank_keeps_its_part_of_sequences_and_gets_keys_and_values_of_the_others() -> None:
    """What flash attention reads beside its queries comes from another rank: keys and values, of the same size."""

    by_world: dict[int, dict[str, int]] = {}
    for world in (1, 2):
        build = functools.partial(step_of, "context", world, "alltoall", "FLASH_ATTENTION")
        trace = memplan.record(build, device="h100", world=world, steps=1)
        by_world[world] = dict(memplan.explain(trace).by_cause_most)
    layers, activation = 3, 4 * LENGTH * WIDTH * 2
    # merged results are contiguous by head, so that each layer's are saved once more for the product behind
    expected = (by_world[1]["saved"] + layers * activation) / 2
    assert by_world[2]["saved"] == pytest.approx(expected, rel=1e-4)
    assert by_world[2]["communication"] >= activation
