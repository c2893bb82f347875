"""Gradients that are reduced more than once: as many collective operations as real gloo sends, and no alarm."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from environment import slow
from models.parallel_uses import data_parallel, without_wrapper
from models.sharded_steps import step_of

import memplan

ID = "reduced-twice"
pytestmark = pytest.mark.usefixtures("this_check_alone")
BYTES = 4 * 2 * (16 * 16 + 16)


def found(way: str) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(data_parallel(way), world=2) if finding.id == ID]


@pytest.mark.parametrize("way", ["by hand", *slow("by hand twice no_sync")])
def test_by_hand_after_the_module_has_done_it(way: str) -> None:
    (finding,) = found(way)
    assert finding.severity == "warning"
    assert finding.details == {"kind": "by hand", "gradients": 4, "sent": BYTES}
    assert finding.where is not None
    assert finding.where.startswith("tests/models/parallel_uses.py:")


@pytest.mark.parametrize("way", ["twice", *slow("twice search")])
def test_by_each_micro_batch(way: str) -> None:
    (finding,) = found(way)
    assert (finding.severity, finding.details) == ("info", {"kind": "each pass", "times": 2, "sent": BYTES})


@pytest.mark.parametrize(
    "way", ["", "twice no_sync", "norm", "twice zeroed between", *slow("twice zeroed between to none", "search")]
)
def test_clean_steps_have_none(way: str) -> None:
    assert found(way) == []


def test_gradients_reduced_by_hand_alone_are_none() -> None:
    assert ID not in {finding.id for finding in memplan.check(without_wrapper, world=2)}


@pytest.mark.parametrize(
    "way", ["ddp", *slow("ddp views", "ddp static", "ddp, states sharded", "fsdp", "hsdp", "tensor")]
)
def test_other_ways_to_train_have_none(way: str) -> None:
    assert ID not in {finding.id for finding in memplan.check(step_of(way), world=4)}


@pytest.mark.parametrize(("way", "buckets", "by_hand"), [("twice", 2, 0), ("twice no_sync", 1, 0), ("by hand", 1, 4)])
def test_torch_sends_as_many(way: str, buckets: int, by_hand: int) -> None:
    """A real process of gloo: one bucket in each synchronized pass, and the four gradients by hand."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        step = data_parallel(way)()
        step()
        with torch.profiler.profile(acc_events=True) as profile:
            step()
    finally:
        dist.destroy_process_group()
    events = profile.events()
    assert events is not None
    assert [event.name for event in events].count("c10d::allreduce_") == buckets + by_hand
