"""Find how much memory is left, and make calls that need less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.placement import Home
from memplan.verification.measurement import cuda_peak

_SHARE = 0.9
"""Share of the free memory that counts. The rest is for what torch's allocators do not predict: libraries' caches,
other programs, fragmentation."""
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Files with a container's limit, its use, and the evictable files among that (cgroups, versions 2 and 1)."""


def available(home: Home) -> int | None:
    """Return the bytes that can be allocated without evicting anything; None where the system does not say."""
    sizes = [*_on_cpu()] if home.card is None else [cuda_peak.free(home.name)]
    return int(_SHARE * min(sizes)) if sizes else None


def _on_cpu() -> Iterator[int]:
    machine = _of_machine()
    if machine is not None:
        yield machine
    yield from _of_groups()


def _of_machine() -> int | None:
    free = _entry("/proc/meminfo", "MemAvailable:")
    if free is not None:
        return free * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the whole memory: an upper bound
    except (AttributeError, ValueError, OSError):
        return None


def _of_groups() -> Iterator[int]:
    for limit, used, about, files in _GROUPS:
        most, now = _entry(limit), _entry(used)
        if most is not None and now is not None:
            yield max(0, most - now + (_entry(about, files) or 0))


def _entry(path: str, name: str | None = None) -> int | None:
    """Read the number in a file, or the one after a name in it."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return None
    words = [line[0] if name is None else line[1] for line in lines if line and (name is None or line[0] == name)]
    return int(words[0]) if words and words[0].isdigit() else None


def smaller(call: Call) -> Iterator[tuple[int, int, Call]]:
    """Yield the call with half of the samples, a quarter, and so on, down to one: how many, of how many, and the call.

    Samples are along the first dimension of the first tensor that has dimensions; all tensors are cut whose first
    dimension is as long.
    """
    whole = next((tensor.shape[0] for tensor in call.tensors if tensor.dim()), 0)
    size = whole // 2
    while size:
        yield size, whole, Call(tuple(_cut(one, whole, size) for one in call.tensors), call.structure)
        size //= 2


def _cut(tensor: torch.Tensor, whole: int, size: int) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != whole:
        return tensor
    return tensor.detach()[:size].requires_grad_(tensor.requires_grad)
