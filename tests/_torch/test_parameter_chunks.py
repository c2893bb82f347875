from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from memplan._torch.distributed import one_rank_of
from memplan._torch.parameter_chunks import RankChunks

fsdp = pytest.importorskip("torch.distributed.fsdp")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 12), st.data())
def test_chunks_are_those_of_torch(shape: list[int], ranks: int, data: st.DataObject) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    expected = _chunk_with_empty(tensor, ranks, dim)
    chunks = RankChunks(tensor, ranks, dim)
    assert len(chunks) == len(expected)
    for rank, other in enumerate(expected):
        chunk = chunks[rank]
        assert torch.equal(chunk, other)
        assert chunk.stride() == other.stride()
        assert not other.numel() or chunk.data_ptr() == other.data_ptr()  # views, no copies


class _Ops(TorchDispatchMode):
    """Counts the ops that are called, and the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.results = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.results[str(func)] += len(result) if isinstance(result, list | tuple) else 1
        return result


def test_ops_of_sharding_do_not_grow_with_the_ranks() -> None:
    def results(world: int) -> Counter[str]:
        with one_rank_of(world, 0), _Ops() as ops:
            fsdp.fully_shard(nn.Linear(1024, 1024), mesh=init_device_mesh("cpu", (world,)))
        return ops.results

    assert results(8) == results(256)
