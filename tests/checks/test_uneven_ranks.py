"""Ranks that hold more than the others: bytes as real tensors have them on both ranks, and no alarm on even ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from environment import slow
from models.pipelined_steps import step_of as pipelined
from models.sharded_steps import WAYS, step_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from truth.rank_peak import measured_peak_of_rank

import memplan

ID = "uneven-ranks"

# torch's own, in a real run, too
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning"),
]


def full_state_on(rank: int) -> Callable[[], Callable[[], None]]:
    """A rank keeps the whole weights that it gathered for a checkpoint."""

    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer, whole = torch.optim.AdamW(model.parameters()), dict[str, Tensor]()

        def step() -> None:
            model(torch.ones(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in model.state_dict().items():
                gathered = value.full_tensor()
                if dist.get_rank() == rank:
                    whole[name] = gathered

        return step

    return build


def rows_of(rows: int) -> Callable[[], Callable[[], None]]:
    """A classifier with so many rows, sharded."""

    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        model = nn.Linear(1 << 16, rows)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(2, 1 << 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.parametrize("odd", [0, *slow(3)])
def test_a_rank_that_keeps_whole_weights(odd: int) -> None:
    build = full_state_on(odd)
    (finding,) = [found for found in memplan.check(build, world=4) if found.id == ID]
    peaks = [measured_peak_of_rank(build, 4, rank) for rank in (odd, (odd + 1) % 4)]
    assert (finding.severity, finding.bytes) == ("warning", pytest.approx(peaks[0] - peaks[1], rel=1e-3))
    assert finding.message.startswith(f"rank {odd} holds ")
    assert finding.where is not None
    assert "test_uneven_ranks.py" in finding.where
    assert finding.details["kind"] == "holds"


def test_a_weight_that_the_ranks_do_not_divide_is_a_note() -> None:
    """5 rows on 4 ranks are 2, 2, 1 and none; 8 are 2 each."""
    build = rows_of(5)
    (finding,) = [found for found in memplan.check(build, world=4) if found.id == ID]
    peaks = [measured_peak_of_rank(build, 4, rank) for rank in range(4)]
    assert finding.details["peaks"] == {str(rank): pytest.approx(peak, rel=1e-3) for rank, peak in enumerate(peaks)}
    assert (finding.severity, finding.bytes) == ("info", pytest.approx(max(peaks) - min(peaks), rel=1e-3))
    assert ID not in {found.id for found in memplan.check(rows_of(8), world=4)}


def saved_on_a_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tensors as they are saved from the first card."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"weight": torch.ones(1024, 1024), "bias": torch.ones(1024)}, folder / "model.pt")
    return folder / "model.pt"


def loading(path: Path, place: Any = None) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank() % 8)
        net = nn.Linear(1024, 1024).cuda()
        net.load_state_dict(torch.load(path, map_location=place))
        model = DistributedDataParallel(net)

        def step() -> None:
            model(torch.ones(64, 1024, device="cuda")).sum().backward()

        return step

    return build


@pytest.mark.parametrize("rank", [0, 3])
def test_a_load_onto_the_first_card(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_on_a_card(tmp_path, monkeypatch)
    (finding,) = [f for f in memplan.check(loading(path), device="h100", world=8, rank=rank) if f.id == ID]
    size = 4 * (1024 * 1024 + 1024)
    assert (finding.severity, finding.bytes) == ("warning", 7 * size)
    assert (finding.details["kind"], finding.details["bytes_per_rank"]) == ("elsewhere", size)
    assert finding.where is not None
    assert finding.where.rpartition(":")[0].endswith("test_uneven_ranks.py")
    assert "map_location='cpu'" in finding.advice[0]
    trace = memplan.record(loading(path), device="h100", world=8, rank=3)
    assert any("torch.load PUTS 4.0 MiB ON cuda:0" in assumption.text for assumption in trace.assumptions)


@pytest.mark.parametrize("place", ["cpu", "cuda", lambda storage, _: storage.cuda(dist.get_rank())])
def test_a_load_with_a_place_is_none(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_on_a_card(tmp_path, monkeypatch)
    assert ID not in {f.id for f in memplan.check(loading(path, place), device="h100", world=8, rank=1)}


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(WAYS))
def test_ranks_that_share_evenly_have_no_finding(way: str) -> None:
    assert ID not in {finding.id for finding in memplan.check(step_of(way), world=4)}


def test_stages_of_a_pipeline_are_not_compared() -> None:
    assert ID not in {finding.id for finding in memplan.check(pipelined("1f1b", 4), world=4)}
