"""Training steps of one rank on a card, in a fake process group of torch's own where no rank is recorded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import Block, Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

LENGTH = 512


def replicated() -> Any:
    model = DistributedDataParallel(Transformer().cuda())
    model.register_comm_hook(None, _reduced)  # work in torch's fake group has no results
    return model


def _reduced(_state, bucket):  # pyright: ignore  # torch reads annotations, and takes these words alone
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def flat(strategy: str, *, own: bool = False) -> Any:
    return FullyShardedDataParallel(
        Transformer(), auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cuda", 0), use_orig_params=own,
    )  # fmt: skip


def sharded() -> Any:
    model = Transformer().cuda()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    return model


def sharded_from_the_host() -> Any:
    """Without a mesh: `fully_shard` takes that of all cards, and moves the weights to its own."""
    model = Transformer()
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


@contextlib.contextmanager
def in_context(rotation: str, backend: str, tensors: list[torch.Tensor]) -> Iterator[None]:
    """Shard sequences, and rotate keys and values between ranks."""
    from torch.distributed.tensor.experimental import _attention as attention

    attention.set_rotate_method(rotation)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    dims = [1] * len(tensors)
    with (
        sdpa_kernel([getattr(SDPBackend, backend)]),
        context_parallel(mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=set(tensors)),
    ):
        yield


WAYS: dict[str, Callable[[], Any]] = {
    "ddp": replicated,
    "fsdp": sharded,
    "fsdp from the host": sharded_from_the_host,
    "fsdp1": lambda: flat("FULL_SHARD"),
    "fsdp1 kept, own parameters": lambda: flat("SHARD_GRAD_OP", own=True),
    "context": lambda: Transformer().cuda().bfloat16(),
}


def step_of(way: str, world: int, rotation: str = "", backend: str = "") -> Callable[[], None]:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("nccl")
    elif not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    model = WAYS[way]()
    update = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens, labels = torch.zeros(2, 4, LENGTH, dtype=torch.int64, device="cuda")
        with in_context(rotation, backend, [tokens, labels]) if way == "context" else contextlib.nullcontext():
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        update.step()
        update.zero_grad()

    return step
