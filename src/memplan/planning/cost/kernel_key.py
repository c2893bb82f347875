"""Keys of kernel calls: the op, and shape, strides and dtype of each tensor."""

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


@dataclass(frozen=True, slots=True)
class Operand(Printed):
    """Shape, strides and dtype of an operand, which decide its cost."""

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
        """Return zeros of this shape and layout; as indices, they are valid for any tensor."""
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.zeros(reach if prod(self.shape) else 0, dtype=self.dtype, device=place)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class KernelCall:
    """An op with the operands of one call."""

    name: str
    args: tuple[Any, ...]
    """With Operand in place of tensors, at any depth."""
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelCall:
        """Describe a call by its arguments.

        Args:
            name: of the op, as ``aten.convolution.default``; ``aten.mm.out`` counts as its default.
            args, kwargs: of tensors, shapes, strides and dtypes alone count.
        """
        given = tuple(args), {key: one for key, one in kwargs.items() if key != "out"}
        return cls(name.replace(".out", ".default"), *_torch.tree_map(_operand, given))

    @property
    def key(self) -> str:
        """Key that distinguishes calls of different cost."""
        given = [*map(_text, self.args), *(f"{name}={_text(one)}" for name, one in self.kwargs.items())]
        return f"{self.name}({', '.join(given)})"

    @property
    def bytes(self) -> int:
        """Bytes of its operands."""
        return sum(one.bytes for one in self.args if isinstance(one, Operand))

    def on_zeros(self, place: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for the call: zeros on a device."""
        given = self.args, dict(self.kwargs)
        return _torch.tree_map(lambda one: one.zeros(place) if isinstance(one, Operand) else one, given)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the op and return its results."""
        return overload(self.name)(*args, **kwargs)


def _operand(part: Any) -> Any:
    return Operand(tuple(part.shape), tuple(part.stride()), part.dtype) if isinstance(part, Tensor) else part


def _text(part: Any) -> str:
    if isinstance(part, (tuple, list)):
        return f"[{', '.join(map(_text, part))}]"
    return str(part) if isinstance(part, Operand) else repr(part)
