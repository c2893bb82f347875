"""Descriptions of tensors (shape, dtype, range of values) that become inputs when a step is built."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan._json import MOST_BYTES
from memplan.errors import InputError
from memplan.trace.naming.parsing import offer

_DTYPE_NAMES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
_DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES}
_SHORT = {
    "fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "fp16": "float16",
    "half": "float16", "bf16": "bfloat16", "long": "int64", "int": "int32",
}  # fmt: skip
_TEXT = re.compile(r"(?P<shape>\d{1,18}(?:x\d{1,18})*|scalar)(?::(?P<dtype>\w+))?(?:<(?P<high>\d{1,18}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Spec:
    """Description of a tensor: shape, dtype and, for integers, the range of values ``low <= value < high``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float | None = None
    high: float | None = None
    seed: int = 0

    def make(self) -> torch.Tensor:
        """Return the tensor, drawn from a new generator with `seed`; a fake tensor under a fake mode.

        Floats without a range are from a normal distribution. A missing end of a range is 0 or, for floats, 1 (for
        integers 2).
        """
        generator = torch.Generator().manual_seed(self.seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = torch.randn(self.shape, generator=generator)
            if self.low is not None or self.high is not None:
                low, high = self.low or 0.0, 1.0 if self.high is None else self.high
                values.uniform_(low, high, generator=generator)
            return values if self.dtype == torch.float32 else values.to(self.dtype)
        low, high = int(self.low or 0), 2 if self.high is None else int(self.high)
        return torch.randint(low, high, self.shape, generator=generator, dtype=self.dtype)


def spec(
    text: str,
    dtype: str | torch.dtype | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
    seed: int = 0,
) -> Spec:
    """Describe a tensor: ``"8x3x224x224"``, ``"8x1024:int64<50257"``, ``"scalar"``.

    Args:
        text: sizes joined by "x", then optionally ":" and a dtype, then optionally "<" and the end of an integer range.
        dtype: the dtype, if it is not in the text; float32 by default.
        low, high: values are drawn from low <= value < high: by default integers from 0 to 1, floats from a normal
            distribution.
        seed: seed of the generator from which a real step draws the values.

    Raises:
        InputError: the text does not describe a tensor.

    Example:
        >>> memplan.spec("8x1024", dtype="int64", high=50257).shape
        (8, 1024)
    """
    match = _TEXT.fullmatch(str(text).strip())
    if match is None:
        sizes = re.findall(r"\d+", str(text))
        joined = re.fullmatch(r"[\[(]?\s*\d+(\s*[,*× ]\s*\d+)*\s*,?\s*[\])]?", str(text).strip()) is not None
        raise InputError(
            f"input {text!r} does not describe a tensor",
            expected="sizes joined by x, then :dtype and <end if needed, as in 8x3x224x224 or 8x1024:int64<50257",
            do=f"Write {'x'.join(sizes)}" if joined else "Write it so",
        )
    sizes = match["shape"]
    shape = () if sizes == "scalar" else tuple(int(size) for size in sizes.split("x"))
    resolved = dtype_of(match["dtype"] or dtype or "float32")
    if match["high"] is not None:
        high = int(match["high"])
    _check_range(text, resolved, low, high)
    if math.prod(size or 1 for size in shape) * resolved.itemsize > MOST_BYTES:
        raise InputError(f"input {text!r} has more bytes than can be counted", expected="a tensor", do="Give its sizes")
    return Spec(shape, resolved, low, high, seed)


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype with a name such as "bfloat16" or "bf16"; a dtype unchanged. Raises InputError: no such
    dtype."""
    if isinstance(name, torch.dtype):
        return name
    dtype = _DTYPES.get(_SHORT.get(name, name))
    if dtype is None:
        raise InputError(f"dtype {name!r}", expected=f"one of {', '.join(_DTYPES)}", do=offer(str(name), _DTYPES))
    return dtype


def _check_range(text: str, dtype: torch.dtype, low: float | None, high: float | None) -> None:
    """Raise InputError for an empty range of values; ``text`` names the input."""
    bottom, top = low or 0, high
    if top is None:
        top = 1 if dtype.is_floating_point or dtype.is_complex else 2
    if top <= bottom:
        raise InputError(
            f"input {text!r} draws values from {bottom} up to, not including, {top}",
            expected="an end above the beginning",
            do="Raise the end, or leave it out",
        )


def as_spec(value: Any, *, shapes: bool = True) -> Any:
    """Return a text or a tuple of sizes as a Spec; everything else unchanged.

    ``shapes``: whether tuples of sizes are shapes. As keyword arguments they are values: models take sizes themselves.
    """
    if shapes and is_shape(value):
        return Spec(tuple(value))
    return spec(value) if isinstance(value, str) else value


def is_shape(value: Any) -> bool:
    """Return whether a value is a shape: a non-empty tuple of non-negative integers."""
    return isinstance(value, tuple) and bool(value) and all(type(size) is int and size >= 0 for size in value)


def realize(value: Any) -> Any:
    """Return the value with each Spec made into a tensor and each tensor copied by `like`."""
    return map_leaves(value, lambda leaf: leaf.make() if isinstance(leaf, Spec) else like(leaf))


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the value with ``function`` applied to its specs and tensors; unlike torch's pytrees it knows `Spec`."""
    if isinstance(value, (Spec, torch.Tensor)):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map_leaves(item, function) for item in value)
    return value


def like(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a copy with the same shape, strides and dtype on ``device``; a fake tensor under a fake mode.

    A sparse tensor is cloned, with its indices.
    """
    from memplan import _torch

    if _torch.is_sparse(tensor):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not isinstance(new, _torch.FakeTensor) and tensor.device.type != "meta":
        with torch.no_grad():
            new.copy_(tensor)
    return new.requires_grad_(tensor.requires_grad)


def with_batch(value: Any, old: int, new: int) -> Any:
    """Return the value with leading dimension ``new`` for specs and tensors that have ``old``.

    Tensors become meta tensors; sparse tensors, whose new indices would be unknown, are unchanged.
    """

    def resized(leaf: Any) -> Any:
        """Return a spec or tensor with the new leading dimension, if it has the old."""
        if leaf.shape[:1] != (old,):
            return leaf
        shape = (new, *leaf.shape[1:])
        if isinstance(leaf, Spec):
            return replace(leaf, shape=shape)
        if leaf.layout != torch.strided:
            return leaf
        empty = torch.empty_strided(shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return empty.requires_grad_(leaf.requires_grad)

    return map_leaves(value, resized)


def batch_of(*values: Any) -> int | None:
    """Return the leading dimension of the first tensor or spec that has one."""
    for value in values:
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            batch = batch_of(*value)
            if batch is not None:
                return batch
        elif isinstance(value, (Spec, torch.Tensor)) and len(value.shape) > 0:
            return int(value.shape[0])
    return None
