"""What an op takes on a CUDA card besides what a fake tensor of the CPU shows: the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from memplan.devices import Device
from memplan.trace.semantics import cublas, cuda_kernels
from memplan.trace.semantics.arch import Arch
from memplan.trace.semantics.extra import Arguments, Extra, Keywords, Semantics


def semantics(device: Device, stream: Callable[[], int]) -> Semantics:
    """The semantics of one recording for a card: which workspaces are there already is its state.

    ``stream()`` tells the number of the current stream.
    """
    return Semantics(_Kernels(device, stream).extras, {}, {})


class _Kernels:
    def __init__(self, device: Device, stream: Callable[[], int]) -> None:
        self._arch = Arch(device.architecture, device.multiprocessors)
        self._stream = stream
        self._environment = dict(os.environ)
        self._held: set[tuple[str, bool, int]] = set()

    def extras(self, name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool) -> list[Extra]:
        """The storages that an op's kernel takes for itself."""
        found: list[Extra] = []
        if name in cublas.USES:
            found += self._products(name, args, kwargs, result, in_backward)
        formula = cuda_kernels.FORMULAS.get(name)
        if formula is not None:
            found += [Extra(size) for size in formula(args, kwargs, result, self._arch) if size]
        return found

    def _products(
        self, name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
    ) -> Iterator[Extra]:
        """Workspaces of cuBLAS: a handle for each thread, and the backward pass has one of its own."""
        library = cublas.library(name, args, kwargs, result)
        if library is None:
            return
        capability, environment = self._arch.capability, self._environment
        sizes = {"cublas": cublas.workspace_bytes(capability, environment)}
        if library == "cublaslt" and not cublas.shared_with_lt(environment):
            sizes["cublaslt"] = cublas.lt_workspace_bytes(capability, environment)
        held = cublas.kept(environment)
        for owner, size in sizes.items():
            key = owner, in_backward, self._stream()
            if size and (not held or key not in self._held):
                self._held.add(key)
                yield Extra(size, held=held, workspace=True)
