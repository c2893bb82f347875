"""Keys of kernel calls: the op, with shape, strides and dtype of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from memplan import _torch
from memplan._display import Printed
from memplan.planning.graph.op_schema import overload
from memplan.planning.graph.tensor_like import spanned_elements


@dataclass(frozen=True, slots=True)
class Operand(Printed):
    """Shape, strides and dtype of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{list(self.stride)}"

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def zeros(self, place: str) -> Tensor:
        """Return zeros with this shape, strides and dtype on a device; as indices they are valid for any tensor."""
        flat = torch.zeros(spanned_elements(self.shape, self.stride), dtype=self.dtype, device=place)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A call of an op, without the data of its tensors."""

    name: str
    args: tuple[Any, ...]
    """Arguments, with Operand in place of tensors at any depth."""
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelCall:
        """Describe a call by its arguments.

        Args:
            name: of the op, as ``aten.convolution.default``; an ``out`` overload counts as ``default``.
            args, kwargs: arguments; of tensors only shape, strides and dtype count.
        """
        arguments = tuple(args), {key: value for key, value in kwargs.items() if key != "out"}

        def operand(leaf: Any) -> Any:
            return Operand(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) if isinstance(leaf, Tensor) else leaf

        return cls(name.replace(".out", ".default"), *_torch.tree_map(operand, arguments))

    @property
    def key(self) -> str:
        """Key that distinguishes calls of different cost: ``aten.mm.default(torch.float32[8, 8][8, 1], ...)``."""
        arguments = [_argument_text(value) for value in self.args]
        arguments += [f"{name}={_argument_text(value)}" for name, value in self.kwargs.items()]
        return f"{self.name}({', '.join(arguments)})"

    @property
    def bytes(self) -> int:
        """Bytes of its positional tensor arguments."""
        return sum(arg.bytes for arg in self.args if isinstance(arg, Operand))

    def on_zeros(self, place: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) for the call, with tensors of zeros on a device."""
        arguments = self.args, dict(self.kwargs)
        return _torch.tree_map(lambda leaf: leaf.zeros(place) if isinstance(leaf, Operand) else leaf, arguments)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the op and return its results."""
        return overload(self.name)(*args, **kwargs)


def _argument_text(argument: Any) -> str:
    """Return the text of an argument in a key; a tensor is an `Operand`."""
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(map(_argument_text, argument))}]"
    return str(argument) if isinstance(argument, Operand) else repr(argument)
