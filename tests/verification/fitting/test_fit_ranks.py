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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import memplan
from memplan import _torch
from memplan.errors import BudgetError, InputError, UsageError

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


QUICK = "DDP", "FSDP of blocks", "FSDP, then fitted", "tensor parallel, then fitted"


def trained_by_two(folder: Path, ways: tuple[str, ...]) -> Path:
    """Train by two ranks, or four where two dimensions are sharded; the first two are compared."""
    world = 4 if "tensor parallel and FSDP, then fitted" in ways else 2
    spawn(trained, (ways, str(folder), world), nprocs=world)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all quick ways: two processes take most of their time to import torch."""
    return trained_by_two(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*QUICK, *slow(*(way for way in WAYS if way not in QUICK))])
def test_gradients_of_ranks_are_equal_bit_for_bit_and_the_peak_is_lower(
    way: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue("quick") if way in QUICK else trained_by_two(tmp_path, (way,))
    by_block = "of the whole" not in way and way not in ("DDP", "DDP with views")
    ranks = [json.loads((folder / f"{way}.{rank}").read_text()) for rank in range(2)]
    assert ranks[0]["plans"] == ranks[1]["plans"]
    assert bool(ranks[0]["plans"]) == way.endswith("then fitted")
    for one in ranks:
        assert one["equal"]
        assert one["kept"]
        assert one["sent"]
        assert (one["planned"], one["unplanned"]) == (4 * (3 if by_block else 1), 0)
        least = 0.97 if by_block and "then" not in way else 0.85
        assert one["peak"] < least * one["unfitted"]


@pytest.fixture
def _rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.usefixtures("_rank")
def test_a_model_that_ddp_wraps_already_is_refused_with_the_order() -> None:
    with pytest.raises(InputError, match=r"Fit the module first"):
        memplan.fit(DistributedDataParallel(make()), torch.randn(4, 8), budget="90%")


@pytest.mark.usefixtures("_rank")
def test_tensor_parallel_models_without_blocks_are_refused_by_name() -> None:
    parallel = parallelize_module(make(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(UsageError, match=r"0\.weight .*without blocks"):
        memplan.fit(parallel, torch.randn(4, 8), budget="90%")


@pytest.mark.usefixtures("_rank")
def test_a_sharded_model_that_fits_is_not_changed_and_one_that_cannot_is_as_before() -> None:
    model, x = fully_shard(make()), torch.randn(256, 8)
    fitted = memplan.fit(model, x, budget="1 GiB")
    assert not fitted.changed
    assert fitted.proof.peak == fitted.proof.reference_peak
    with pytest.raises(BudgetError) as raised:
        memplan.fit(model, x, budget=1000)
    assert memplan.fit(model, x, budget=raised.value.smallest_budget + 1000).proof.ok
    with pytest.raises(UsageError, match=r"early=True"):
        memplan.fit(model, x, budget="90%", early=True, optimizer="sgd")


def test_shards_without_a_process_group_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    model = fully_shard(make())
    dist.destroy_process_group()
    with pytest.raises(UsageError, match=r"no process group"):
        memplan.fit(model, torch.randn(4, 8), budget="90%")


@pytest.mark.usefixtures("_rank")
def test_another_plan_on_another_rank_is_refused_with_both_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "gathered", lambda value: [value, "of-rank-1" if isinstance(value, str) else value])
    with pytest.raises(UsageError, match=r"Rank 0 .*plan [0-9a-f]{12}, and rank 1 by plan of-rank-1"):
        memplan.fit(fully_shard(make()), torch.randn(256, 8), budget="90%")
