"""Chunks of `fully_shard`'s parameters, one view a rank, as they are read.

`fully_shard` splits each parameter into a view for each rank and reads two of them: seconds would grow with the number
of ranks. Private names: ``torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty`` (seen in torch 2.13 and
2.14).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memplan._torch.patches import patched


class RankChunks:
    """The chunks of a tensor, as `torch.chunk` splits it; empty tensors follow where there are fewer chunks than
    ranks. Each is a view that is created when it is read.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._num_chunks = num_chunks
        self._dim = dim

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, rank: int) -> torch.Tensor:
        if not 0 <= rank < self._num_chunks:
            raise IndexError(f"chunk {rank} of {self._num_chunks}")
        rows = self._tensor.size(self._dim)
        size = -(-rows // self._num_chunks)
        if rows and rank * size >= rows:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, rank * size, min(size, rows - rank * size))


@contextlib.contextmanager
def chunks_on_demand() -> Iterator[None]:
    """Let `fully_shard` create only those chunks of a parameter that it reads."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    has_chunks = "_chunk_with_empty" in vars(_fsdp_param)
    with patched(_fsdp_param, _chunk_with_empty=RankChunks) if has_chunks else contextlib.nullcontext():
        yield
