"""The type of a formula for the temporaries of a CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.kinds import Temporary

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any, Arch], tuple[int | Temporary, ...]]
"""(args, kwargs, result, arch) -> allocations within the kernel: a `Temporary`, or bytes alone."""


def nonzero(*sizes: int) -> tuple[int, ...]:
    """The allocations of these bytes: a size of 0 is none."""
    return tuple(size for size in sizes if size)
