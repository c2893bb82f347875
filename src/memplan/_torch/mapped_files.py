"""Files mapped into memory as tensors, during a recording.

Seen in torch 2.11 and 2.13: ``torch.UntypedStorage.from_file``, which safetensors calls, and `torch.asarray` of a slice
of such a storage, which fails under a fake mode. The allocator counts the mapped bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memplan._torch.patches import patched


class _MappedFile:
    """Replaces the storage of a mapped file: bytes of the recording, in which slices share memory."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content

    def __getitem__(self, index: slice) -> _MappedFile:
        return _MappedFile(self.content[index])

    def __len__(self) -> int:
        return len(self.content)

    def nbytes(self) -> int:
        return len(self.content)

    def untyped(self) -> _MappedFile:
        return self


@contextlib.contextmanager
def files_mapped_without_data() -> Iterator[None]:
    """Within this context and under a dispatch mode, mapping a file allocates a new tensor of its size, without
    data."""
    map_file: Callable[..., Any] = torch.UntypedStorage.from_file
    as_array: Callable[..., Any] = torch.asarray

    def map_without_data(filename: str, shared: bool = False, nbytes: int = 0) -> Any:
        if _get_current_dispatch_mode() is None:  # outside of the recording
            return map_file(filename, shared, nbytes)
        return _MappedFile(torch.empty(nbytes, dtype=torch.uint8))

    def as_array_of_mapped(obj: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return obj.content if isinstance(obj, _MappedFile) else as_array(obj, *args, **kwargs)

    with (
        patched(torch.UntypedStorage, from_file=staticmethod(map_without_data)),
        patched(torch, asarray=as_array_of_mapped),
    ):
        yield
