"""One rank of several: its bytes are those of real tensors in the same fake process group."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from environment import slow
from models.sharded_steps import VOCABULARY, WIDTH, Block, Transformer, step_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, _random, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from truth.fresh_process import run_fresh
from truth.rank_peak import measured_peak_of_rank

import memplan
from memplan import _torch
from memplan.errors import StepError, UsageError
from memplan.simulation.simulate import simulate

# torch's own, in a real run, too
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("way", "world"),
    [
        ("two dimensions", 4), ("ddp, states sharded", 4),
        *slow(
            ("fsdp bf16", 4), ("fsdp1 kept, own parameters", 2),
            ("ddp", 2), ("fsdp from meta", 2), ("fsdp1", 4), ("tensor loss", 2),
            ("fsdp", 2), ("tensor", 2),
            ("fsdp", 4), ("fsdp kept", 2), ("fsdp bf16", 2), ("fsdp checkpointed", 2), ("hsdp", 4), ("tensor", 4),
            ("ddp views", 2), ("ddp static", 4), ("fsdp compiled", 2),
            ("fsdp1 kept", 2), ("fsdp1 copied", 2), ("fsdp1 bf16", 4), ("fsdp1 bf16, own parameters", 2),
            ("fsdp1 from meta", 2), ("tensor loss", 4), ("ddp, states sharded", 2), ("fsdp on the host", 2),
            ("fsdp, twice", 2), ("fsdp bf16, twice", 2), ("fsdp1, twice", 2), ("fsdp1 bf16, twice", 4),
            ("two dimensions, twice", 4), ("two dimensions bf16, twice", 4),
        ),
    ],
)  # fmt: skip
def test_a_rank_is_what_it_is_with_real_tensors(way: str, world: int) -> None:
    predicted = simulate(memplan.record(step_of(way), world=world)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(step_of(way), world), rel=1e-3)


def test_environment_and_groups_are_as_before() -> None:
    before = dict(os.environ)

    def build() -> Callable[[], None]:
        assert (os.environ["WORLD_SIZE"], os.environ["RANK"], dist.get_rank(), dist.get_world_size()) == (
            "8",
            "3",
            3,
            8,
        )
        return lambda: None

    memplan.record(build, world=8, rank=3)
    set_by_torch = {"TORCHINDUCTOR_CACHE_DIR"}  # as Inductor is imported
    assert dict(os.environ).keys() - before.keys() <= set_by_torch
    assert {name: os.environ.get(name) for name in before} == before
    assert not dist.is_initialized()


def test_a_mesh_larger_than_the_world_is_told_with_its_line() -> None:
    def build() -> Callable[[], None]:
        init_device_mesh("cpu", (4,))
        return lambda: None

    with pytest.raises(StepError, match=r"test_record_ranks\.py:\d+"):
        memplan.record(build, world=2)
    assert not dist.is_initialized()


def test_a_process_group_that_is_there_is_refused() -> None:
    with _torch.one_rank_of(2, 0), pytest.raises(UsageError, match=r"default process group"):
        memplan.record(lambda: lambda: None, world=2)


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1), (None, 1)])
def test_ranks_that_there_are_not_are_refused(world: int | None, rank: int) -> None:
    with pytest.raises(UsageError, match=r"rank"):
        memplan.record(lambda: lambda: None, world=world, rank=rank)


@functools.cache
def recorded(way: str, world: int, steps: int = 1) -> memplan.Trace:
    return memplan.record(step_of(way), world=world, steps=steps)


def _by_cause(way: str, world: int, steps: int = 1) -> dict[str, int]:
    """Most bytes of each cause at any time."""
    return dict(memplan.explain(recorded(way, world, steps)).by_cause_most)


PARAMETERS = sum(p.numel() * p.element_size() for p in Transformer().parameters())
BLOCK = sum(p.numel() * p.element_size() for p in Block().parameters())


def test_weights_that_are_gathered_are_no_shards() -> None:
    kept, freed = (_by_cause(way, 2) for way in ("fsdp kept", "fsdp"))
    assert (kept["weight"], kept["gathered_weight"]) == (PARAMETERS // 2, PARAMETERS)
    whole = PARAMETERS - 2 * BLOCK  # the root's, and those of a block at a time
    assert freed["gathered_weight"] == whole
    assert _by_cause("fsdp bf16", 2)["gathered_weight"] == whole // 2


def test_the_gradient_of_a_whole_embedding_is_a_gradient() -> None:
    """Sharded by its vocabulary, an embedding gets a gradient of the whole table, which is reduced to a shard."""
    trace = recorded("two dimensions bf16, twice", 4)
    whole = [s for s in trace.storages if s.shape == (VOCABULARY, WIDTH) and trace.ops[s.op or 0].phase == "backward"]
    assert {s.dtype for s in whole} == {"bfloat16", "float32"}
    assert {s.cause for s in whole} == {"parameter_gradient"}


def test_tensor_parallel_layers_save_what_their_gradients_read() -> None:
    trace = recorded("tensor", 2)
    saving = {row.name: row for row in memplan.explain(trace).layers if row.kind == "Linear" and row.saved_bytes}
    assert all("weight_gradient" in row.needed_for for row in saving.values())
    assert "blocks.0.mlp.down" in saving
    assert not [finding for finding in memplan.check(trace) if finding.id == "kept-for-nothing"]


def test_gradients_are_sent_in_buckets_unless_they_are_views_of_them() -> None:
    """Torch's documentation of `DistributedDataParallel`: views save as much memory as all gradients take."""
    copied, views = (_by_cause(way, 2, steps=2) for way in ("ddp", "ddp views"))
    assert (copied["communication"], copied["parameter_gradient"]) == (PARAMETERS, PARAMETERS)
    assert (views["communication"], views["parameter_gradient"]) == (0, PARAMETERS)
    assert copied["gathered_weight"] == 0


@pytest.mark.parametrize("views", [False, True])
def test_buckets_of_gradients_lie_on_the_card(views: bool) -> None:
    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(Transformer().cuda(), gradient_as_bucket_view=views)
        tokens = torch.zeros(2, 64, dtype=torch.int64, device="cuda")
        return lambda: model(tokens).sum().backward()

    card = memplan.explain(build, device="h100", world=2).by_cause_most
    assert card["communication"] + card["parameter_gradient"] == (1 if views else 2) * PARAMETERS


def test_activations_that_are_gathered_are_sent_and_are_no_weights() -> None:
    tensors = _by_cause("tensor", 2)
    assert tensors["gathered_weight"] == 0
    assert tensors["communication"] > 0


@pytest.mark.parametrize(("mesh", "groups"), [((2,), "one"), ((2, 2), "up to 3"), ((1,), "")])
def test_the_memory_of_communicators_is_noted(mesh: tuple[int, ...], groups: str) -> None:
    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        init_device_mesh("cuda", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
        weight = torch.ones(8, device="cuda", requires_grad=True)
        return lambda: weight.sum().backward()

    note = memplan.record(build, device="h100", world=math.prod(mesh)).notes[-1]
    assert note.startswith("rank 0 of")
    assert groups in note
    assert ("NCCL" in note) == bool(groups)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 renames the calls
@pytest.mark.parametrize("in_lists", [True, False])
def test_copies_of_gloo_are_noted(in_lists: bool) -> None:
    """All that four ranks gather, and all that is reduced: 16 KiB each, as counted on real ranks."""

    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        shard, whole, parts = torch.ones(1024), torch.ones(4096), [torch.ones(1024) for _ in range(4)]

        def step() -> None:
            if in_lists:
                dist.all_gather(parts, shard)
                dist.reduce_scatter(shard, parts)
            else:
                dist.all_gather_into_tensor(whole, shard)
                dist.reduce_scatter_tensor(shard, whole)

        return step

    assert memplan.record(build, world=4).notes[-1].endswith("gloo's own copies can add up to 32.0 KiB to the peak")


def test_flat_parameters_lie_on_the_card_of_an_index_or_on_the_host() -> None:
    def build(offload: bool) -> Callable[[], None]:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        model = FullyShardedDataParallel(
            Transformer(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.cuda.current_device(),
            sync_module_states=True, cpu_offload=CPUOffload(offload),
        )  # fmt: skip
        update, tokens = torch.optim.AdamW(model.parameters()), torch.zeros(2, 64, dtype=torch.int64, device="cuda")

        def step() -> None:
            model(tokens).sum().backward()
            model.clip_grad_norm_(1.0)
            update.step()
            update.zero_grad()

        return step

    card, host = (
        memplan.explain(functools.partial(build, offload), device="h100", world=2, rank=1).by_cause_most
        for offload in (False, True)
    )
    assert (card["weight"], card["optimizer_state"]) == (PARAMETERS // 2, PARAMETERS)
    # the root's, those of a block, and those of the block before, which are gathered ahead
    assert card["gathered_weight"] == host["gathered_weight"] == PARAMETERS - BLOCK
    assert host.get("weight", 0) == host.get("optimizer_state", 0) == 0


@pytest.mark.slow
def test_the_largest_batch_of_a_rank_and_its_limit() -> None:
    """A rank that shards its weights has room for more samples than one that copies them."""

    def build(batch: int, sharded: bool) -> Callable[[], None]:
        dist.init_process_group("nccl")
        model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2))).cuda()
        if sharded:
            for module in (*model, model):
                fully_shard(module, mesh=init_device_mesh("cuda", (8,)))
        else:
            model = DistributedDataParallel(model)
        update, data = torch.optim.AdamW(model.parameters()), torch.zeros(batch, 1024, device="cuda")

        def step() -> None:
            model(data).sum().backward()
            update.step()
            update.zero_grad()

        return step

    options: dict[str, Any] = {"budget": "1200 MiB", "device": "h100", "world": 8}
    copied, shared = (
        memplan.largest(functools.partial(build, sharded=sharded), "batch", **options) for sharded in (False, True)
    )
    assert shared > copied > 0
    peak = simulate(memplan.record(lambda: build(copied, False), device="h100", world=8)).peak_allocated
    memplan.assert_peak(lambda: build(copied, False), at_most=peak, device="h100", world=8)
    with pytest.raises(AssertionError):
        memplan.assert_peak(lambda: build(copied, False), at_most=peak - 1, device="h100", world=8)


def test_a_rank_leaves_factories_as_they_were() -> None:
    """In a process of its own, as torch looks them up once."""
    code = (
        "import memplan, torch\n"
        "from models.sharded_steps import step_of\n"
        "memplan.record(step_of('fsdp'), world=2)\n"
        "memplan.record(lambda: lambda: torch.tensor([0.0] * 7, device='cuda'), device='h100')\n"
    )
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr


def test_layers_move_to_the_index_of_a_card_and_synchronize_their_statistics() -> None:
    """As torch's tutorials of DDP have it: ``.to(local_rank)``."""

    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        local = int(os.environ["LOCAL_RANK"])
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).to(local)
        model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[local])
        images = torch.zeros(8, 3, 32, 32).to(local)
        return lambda: model(images).sum().backward()

    trace = memplan.record(build, device="h100", world=4, rank=2)
    size = 8 * 16 * 32 * 32 * 4
    saved = [storage for storage in trace.counted if storage.cause == "saved" and storage.bytes == size]
    assert len(saved) == 2 * len(trace.steps)  # the norm's input and the activation's result
    assert {storage.device for storage in trace.storages if storage.cause == "weight"} == {"cuda:0"}


def test_meshes_of_the_same_ranks_have_their_own_groups_in_each_recording() -> None:
    """Equal meshes, whose groups have other names: in the second recording those of the first are gone."""

    def build(*sizes: int) -> Callable[[], Any]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards", "tensor")[-len(sizes) :])["tensor"]
        weight: Any = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])
        return lambda: (weight @ weight).full_tensor()

    for sizes in ((4, 2), (2, 2, 2)):
        memplan.record(functools.partial(build, *sizes), world=8)


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_random_numbers_of_a_recording_for_a_card_leave_later_ones_on_the_cpu() -> None:
    """Torch makes one tracker of random numbers, for the device of the first mesh that draws some."""

    def build(device: str) -> Callable[[], Any]:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        mesh = init_device_mesh(device, (4,))
        weight: Any = distribute_tensor(torch.empty(64, 64, device=device), mesh, [Shard(0)])
        nn.init.normal_(weight)
        return lambda: weight.square()

    before = _random._rng_tracker
    for name, device in (("h100", "cuda"), ("cpu", "cpu")):
        memplan.record(functools.partial(build, device), device=name, world=4)
        assert _random._rng_tracker is before
