"""Measure how much memory is available, and cut a call's inputs to need less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.placement import Home
from memplan.verification.measurement import cuda_peak

_SHARE = 0.9
"""Share of the free memory that counts as available. The remainder is for libraries' caches, other programs and
fragmentation."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Files with a container's memory limit, usage and statistics, and the entry of the latter with the bytes of evictable
page cache (cgroups, versions 2 and 1)."""


def available(home: Home) -> int | None:
    """Return the bytes that can be allocated without evicting anything; None where the system does not say."""
    sizes = [*_host_bounds()] if home.card is None else [cuda_peak.free_bytes(home.name)]
    return int(_SHARE * min(sizes)) if sizes else None


def _host_bounds() -> Iterator[int]:
    """Yield upper bounds on the bytes that the CPU can allocate: the machine's, and each limit of the container."""
    free = _read_number("/proc/meminfo", "MemAvailable:")
    if free is not None:
        yield free * 1024  # "kB" in /proc/meminfo are KiB
    else:
        with suppress(AttributeError, ValueError, OSError):
            yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the whole memory
    for limit_file, usage_file, statistics, entry in _CGROUPS:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            yield max(0, limit - usage + (_read_number(statistics, entry) or 0))


def _read_number(path: str, name: str | None = None) -> int | None:
    """Return the first number in a file, or the number after ``name`` at the beginning of a line. None if the file
    cannot be read, or has no number there (a limit can be ``max``)."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return None
    if name is None:
        words = [line[0] for line in lines if line]
    else:
        words = [line[1] for line in lines if line and line[0] == name]
    return int(words[0]) if words and words[0].isdigit() else None


def smaller_calls(call: Call) -> Iterator[tuple[int, int, Call]]:
    """Yield (samples, all samples, call) for half of the call's samples, a quarter, and so on, down to one sample.

    The number of samples is the length of the first dimension of the first tensor that has dimensions. All tensors
    whose first dimension is as long are cut.
    """
    total = next((tensor.shape[0] for tensor in call.tensors if tensor.dim()), 0)
    samples = total // 2
    while samples:
        tensors = list[Tensor]()
        for tensor in call.tensors:
            has_samples = tensor.dim() > 0 and tensor.shape[0] == total
            cut = tensor.detach()[:samples].requires_grad_(tensor.requires_grad) if has_samples else tensor
            tensors.append(cut)
        yield samples, total, Call(tuple(tensors), call.structure)
        samples //= 2
