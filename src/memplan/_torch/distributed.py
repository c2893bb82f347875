"""Process groups of torch.distributed without other processes.

Everything here was seen in torch 2.11 and 2.13 (``torch.distributed.distributed_c10d._world``), but for `one_rank_of`,
seen in 2.13:
``torch.nn.parallel.distributed._verify_param_shape_across_processes`` and ``_sync_module_states``,
``torch.distributed.tensor._sharding_prop.detect_fake_mode``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from memplan._torch.patches import here_alone, patched


@contextlib.contextmanager
def own_process_groups(*, fake: bool) -> Iterator[None]:
    """End a default process group that was initialized in this context.

    ``fake``: initialize a group without other processes, whose collective operations do nothing, so that tensors need
    no values. Rank and world size are those that the caller asks for.
    """
    if not dist.is_available():
        yield
        return
    begun = dist.is_initialized()

    def initialize_fake(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
        store: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        kwargs.pop("device_id", None)
        _initialize_fake(max(rank, 0), max(world_size, 1), **kwargs)

    try:
        with patched(dist, **({"init_process_group": initialize_fake} if fake else {})):
            yield
    finally:
        if dist.is_initialized() and not begun:
            dist.destroy_process_group()


def has_process_group() -> bool:
    """Return whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def number_of_groups() -> int:
    """Return how many sets of at least two ranks have a process group in which this rank is."""
    from torch.distributed.distributed_c10d import _world

    members = {tuple(dist.get_process_group_ranks(group)) for group in list(_world.pg_map)}
    return sum(len(ranks) > 1 and dist.get_rank() in ranks for ranks in members)


_initialize = dist.init_process_group if dist.is_available() else None


def _initialize_fake(rank: int, world: int, **kwargs: Any) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert _initialize is not None, "torch.distributed is available"
    _initialize("fake", store=FakeStore(), rank=rank, world_size=world, **kwargs)


@contextlib.contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """Be a rank of ``world`` in this context, without the others: the default process group is a fake one, collective
    operations do nothing, and torchrun's variables say which rank it is. Groups that are made inside are destroyed, and
    the environment is put back."""
    variables = {
        "RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 29500,
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        _initialize_fake(rank, world)
        with contextlib.ExitStack() as stack:
            for name in _INITIALIZERS:
                module = sys.modules.get(name)
                if module is not None:
                    stack.enter_context(patched(module, init_process_group=lambda *_, **__: None))
            stack.enter_context(_data_parallel_alone())
            stack.enter_context(_shapes_propagated_unseen())
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_INITIALIZERS = "torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh"
"""Modules with the name ``init_process_group``: the default group is there already."""


@contextlib.contextmanager
def _data_parallel_alone() -> Iterator[None]:
    """Let `DistributedDataParallel` begin without the other ranks, and take its buckets as reduced at once: the work of
    the fake group has no results."""
    from torch._C._distributed_c10d import Reducer
    from torch.nn.parallel import distributed

    begin = distributed.DistributedDataParallel.__init__

    def begin_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.register_comm_hook(None, _reduced)

    def nothing(*_: Any, **__: Any) -> None: ...

    with (
        patched(distributed, _verify_param_shape_across_processes=nothing, _sync_module_states=nothing),
        patched(distributed.DistributedDataParallel, __init__=begin_alone),
        # which orders the buckets anew after the first backward pass, as many bytes, and reads numbers from tensors
        patched(Reducer, _rebuild_buckets=lambda _: False),
    ):
        yield


def _shapes_propagated_unseen() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `DTensor` finds the global shapes of results under a fake mode of its own: it takes one
    that is active, and a recording would count its tensors."""
    from torch.distributed.tensor import _sharding_prop as propagation

    detect: Any = vars(propagation)["detect_fake_mode"]
    return patched(propagation, detect_fake_mode=here_alone(lambda *_: None, detect))


def _reduced(_state, bucket):  # pyright: ignore  # torch reads annotations, and takes these words alone
    dist.all_reduce(bucket.buffer())
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
