"""Process groups of torch.distributed without other processes.

Everything here was seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from memplan._torch.patches import patched


@contextlib.contextmanager
def own_process_groups(*, fake: bool) -> Iterator[None]:
    """End a default process group that was initialized in this context.

    ``fake``: initialize a group without other processes, whose collective operations do nothing, so that tensors need
    no values. Rank and world size are those that the caller asks for.
    """
    if not dist.is_available():
        yield
        return
    begun, initialize = dist.is_initialized(), dist.init_process_group

    def initialize_fake(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
        store: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        kwargs.pop("device_id", None)
        initialize("fake", store=FakeStore(), rank=max(rank, 0), world_size=max(world_size, 1), **kwargs)

    try:
        with patched(dist, **({"init_process_group": initialize_fake} if fake else {})):
            yield
    finally:
        if dist.is_initialized() and not begun:
            dist.destroy_process_group()
