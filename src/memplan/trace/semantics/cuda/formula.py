"""The type of a formula for the temporaries of a CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.kinds import Arguments, Keywords, Temporary

AllocationBytes = tuple[int, ...]
"""Bytes of each allocation within a kernel, as requested from the caching allocator."""
Allocations = tuple[int | Temporary, ...]
"""Allocations within a kernel: a `Temporary`, or bytes alone."""
Formula = Callable[[Arguments, Keywords, Any, Arch], Allocations]
"""(args, kwargs, result, arch) -> allocations within the kernel."""


def nonzero(*sizes: int) -> AllocationBytes:
    """Return the sizes without zeros: kernels make no allocation of 0 bytes."""
    return tuple(size for size in sizes if size)
