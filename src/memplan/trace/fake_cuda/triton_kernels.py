"""Launches of Triton's kernels during a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from memplan import _torch

Launched = Callable[[str, Sequence[torch.Tensor]], None]
"""Gets the name of a launched kernel, and the tensors among its arguments."""


@contextmanager
def installed(launched: Launched) -> Iterator[None]:
    """Within this context launches of Triton kernels are reported, and do nothing else: kernels write into existing
    tensors, and allocate none. Nothing is compiled or tuned, both of which need a GPU."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Replace `JITFunction.run`, which launches a kernel: report its name and tensors."""
        values = [getattr(leaf, "base", leaf) for leaf in _torch.tree_leaves((args, kwargs))]  # of a TensorDescriptor
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        while hasattr(kernel, "fn"):  # an autotuner contains a kernel, and that its function
            kernel = kernel.fn
        launched(f"triton.{kernel.__name__}", tensors)

    with ExitStack() as stack:
        for kind in (Autotuner, JITFunction):
            stack.enter_context(_torch.patched(kind, run=run))
        yield
