"""What processes share, for a script that shares it with none: semaphores and shared memory without ``/dev/shm``."""

from __future__ import annotations

import _multiprocessing
import _posixshmem
import ctypes
import mmap
import multiprocessing.heap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from memplan import _torch

_SIZE = 64
"""Bytes, of which a semaphore of libc takes 16 or 32."""


class _Semaphore(_multiprocessing.SemLock):
    """A semaphore without a name, since named semaphores are files below ``/dev/shm``."""

    _memory: ClassVar[list[mmap.mmap]] = []
    """Of all of them, for good."""

    def __new__(cls, kind: int, value: int, maxvalue: int, *_: Any) -> Any:
        """Create a semaphore in anonymous memory, with the arguments of `multiprocessing`'s."""
        memory = mmap.mmap(-1, _SIZE)
        cls._memory.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        between_processes = 1
        if ctypes.CDLL(None, use_errno=True).sem_init(ctypes.c_void_p(address), between_processes, value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return cls._rebuild(address, kind, maxvalue, None)


@contextmanager
def private_shared_memory(folder: str) -> Iterator[None]:
    """Within this context semaphores are private memory, and shared memory is files of a new folder."""
    os.mkdir(folder)

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        return os.open(folder + path, flags, mode)

    with ExitStack() as stack:
        for owner, new in (
            (_multiprocessing, {"SemLock": _Semaphore}),
            (_posixshmem, {"shm_open": opened, "shm_unlink": lambda path: os.unlink(folder + path)}),
            (multiprocessing.heap.Arena, {"_dir_candidates": [folder]}),
            (torch.UntypedStorage, {"share_memory_": lambda storage: storage}),
        ):
            stack.enter_context(_torch.patched(owner, **new))
        yield
