"""One rank of a script on real tensors in torch's own fake process group, and the allocator's counters on its card.

Written against torch alone: it is what recordings of a rank on a card are held against.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Ended(BaseException):
    """As many updates as were asked for."""


def peaks_of_updates(script: str, world: int, updates: int = 2) -> list[int]:
    """Run a script as rank 0 up to an update, and return `max_memory_allocated` after each, from the beginning on."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    os.environ |= {"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in variables.items()}
    initialize: Any = dist.init_process_group
    make_group: Any = vars(distributed_c10d)["_new_process_group_helper"]
    peaks: list[int] = []

    def fake(*_: Any, **__: Any) -> None:
        initialize("fake", store=FakeStore(), rank=0, world_size=world)

    def fake_group(size: Any, rank: Any, ranks: Any, _backend: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {"backend_options": None, "device_id": None}
        return make_group(size, rank, ranks, dist.Backend("fake"), *args, **kwargs)

    def updated(*_: Any) -> None:
        peaks.append(torch.cuda.max_memory_allocated())
        if len(peaks) == updates:
            raise _Ended

    for name, value in {"init_process_group": fake, "_new_process_group_helper": fake_group}.items():
        setattr(distributed_c10d, name, value)
    dist.init_process_group = fake
    torch.cuda.init()
    torch.cuda.device_count = lambda: world  # of which this rank uses the first
    register_optimizer_step_post_hook(updated)
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    with contextlib.suppress(_Ended):
        runpy.run_path(script, run_name="__main__")
    return peaks
