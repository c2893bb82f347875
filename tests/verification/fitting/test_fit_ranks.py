"""A fitted model under data parallelism: two real ranks of gloo train it, beside one that is not fitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from environment import slow
from models.fitted_ranks import WAYS, trained
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import memplan
from memplan.errors import InputError

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


@pytest.mark.parametrize(
    "way", ["DDP", "FSDP of blocks", *slow(*(way for way in WAYS if way not in ("DDP", "FSDP of blocks")))]
)
def test_gradients_of_ranks_are_equal_bit_for_bit_and_the_peak_is_lower(way: str, tmp_path: Path) -> None:
    spawn(trained, (str(tmp_path / "store"), way, str(tmp_path)), nprocs=2)
    blocks = 3 if "blocks" in way else 1
    for rank in range(2):
        equal, peak, unfitted, planned, unplanned = json.loads((tmp_path / str(rank)).read_text())
        assert equal
        assert (planned, unplanned) == (3 * blocks, 0)
        assert peak < (0.97 if "blocks" in way else 0.85) * unfitted


@pytest.fixture
def _rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_rank")
def test_a_model_that_is_wrapped_already_is_refused_with_the_order() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    for wrap in (DistributedDataParallel, fully_shard):
        with pytest.raises(InputError, match=r"Fit the module first"):
            memplan.fit(wrap(make()), torch.randn(4, 8), budget="90%")
