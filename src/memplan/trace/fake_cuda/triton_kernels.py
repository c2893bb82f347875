"""Launches of Triton's kernels during a recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from memplan import _torch


@contextmanager
def installed() -> Iterator[None]:
    """Within this context a launch of a Triton kernel is a no-op: kernels write into existing tensors, and allocate
    none. Nothing is compiled or tuned, both of which need a GPU."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

    with ExitStack() as stack:
        for kernel in (Autotuner, JITFunction):
            stack.enter_context(_torch.patched(kernel, run=_launch))
        yield


def _launch(*_: Any, **__: Any) -> None:
    pass
