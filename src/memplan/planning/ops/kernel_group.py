"""Groups of calls in whose place an op of `memplan.kernels` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memplan import kernels
from memplan._json import Json


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads: an argument of one of the group's calls."""

    name: str
    """Argument of the kernel."""
    call: int
    """Number of the call of a torch function in the trace."""
    leaf: int
    """Its position among the tensors in the arguments of that call."""


@dataclass(frozen=True)
class Group:
    """Calls of torch functions that a kernel of `memplan.kernels` replaces: their last result is the kernel's."""

    kernel: str
    """Name of the function in `memplan.kernels`."""
    calls: tuple[int, ...]
    """Numbers of the calls in the trace, ascending; the kernel runs in place of the last."""
    function: str
    """Name of the torch function of the last call."""
    operands: tuple[Operand, ...]
    options: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Further arguments of the kernel; a dtype by its name."""
    reshapes: tuple[int, ...] = ()
    """Calls among them that pick or reshape rows of a linear layer's result: they apply to the layer's input."""

    @property
    def last(self) -> int:
        """Number of the call in whose place the kernel runs."""
        return self.calls[-1]

    @property
    def draws(self) -> bool:
        """Whether the kernel draws random numbers, those of the last call."""
        return self.function == "dropout"

    def run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Run the kernel. ``tensors``: by `Operand.name`."""
        function: Any = getattr(kernels, self.kernel)
        options = dict(self.options)
        if "dtype" in options:
            options["dtype"] = getattr(torch, options["dtype"])
        return function(**tensors, **options)
