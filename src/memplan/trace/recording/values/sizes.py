"""Numbers that are not known, as arguments of torch's functions: which of them are sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.values.numbers import becomes_size, is_standin, range_of
from memplan.trace.recording.values.range_rules import Range, union

_OPERANDS = frozenset(
    f"__{before}{name}__"
    for before in ("", "r", "i")
    for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
) | {
    f"{name}{end}"
    for end in ("", "_")
    for name in (
        "add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "lerp", "addcmul",
        "addcdiv", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max", "clip", "fill", "masked_fill",
        "index_fill", "maximum", "minimum", "where", "isclose", "allclose", "logical_and", "logical_or", "bitwise_and",
        "bitwise_or",
    )
} | {
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")), "select", "unbind", "manual_seed", "backward",
    "cross_entropy", "nll_loss", "dropout", "threshold", "smooth_l1_loss", "huber_loss", "normal_", "uniform_", "size",
    "split", "tensor_split", "narrow", "item", "full_like", "new_tensor",
}  # fmt: skip
"""Functions that take a number as an operand, not as a size; `split` and `narrow` are answered by `values.splits`."""
_VALUES = ("tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor", "LongTensor", "IntTensor")
"""Functions that make a tensor of numbers."""

Put = Callable[[torch.Tensor, Range | None], None]
"""Told between what the elements of a tensor lie."""


class SizesByValue:
    """Sees the functions of torch that are given numbers which stand for others.

    Args:
        put: told between what the elements of a tensor lie that is made of such numbers.
    """

    def __init__(self, put: Put) -> None:
        self._put = put

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; say of the numbers among its arguments which become sizes."""
        numbers = list(_standins((args, tuple(kwargs.values()))))
        if not numbers:
            return func(*args, **kwargs)
        name = _torch.function_name(func)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _smallest_starts(args[1]), *args[2:])
        elif name in _VALUES:
            result = func(*args, **kwargs)
            self._unknown(result, union([range_of(one) for one in _leaves(args[-1])]))
            return result
        elif name not in _OPERANDS:
            if name == "arange" and len(args) > 1:  # from as low as can be
                args = (_smallest(args[0]), *args[1:])
            for number in numbers:
                becomes_size(number)
        result = func(*args, **kwargs)
        self._unknown(result, None)
        return result

    def _unknown(self, result: Any, values: Range | None) -> None:
        """What is computed of such a number is as unknown, whatever a fake tensor keeps."""
        if isinstance(result, _torch.FakeTensor) and result.constant is not None:
            result.constant = None
            self._put(result, values)


def _standins(value: Any) -> Any:
    if is_standin(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _standins(one)
    elif isinstance(value, slice):
        yield from _standins((value.start, value.stop, value.step))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]


def _smallest(number: Any) -> Any:
    """Return the smallest that a number can be; the number itself, where that is not known."""
    return number.low if is_standin(number) and number.low is not None else number


def _smallest_starts(key: Any) -> Any:
    """Return what is selected: from as low as can be, to as high; of single elements the first that it can be."""
    if isinstance(key, tuple):
        return tuple(_smallest_starts(one) for one in key)
    if not isinstance(key, slice):
        return _smallest(key)
    for number in _standins(key):
        becomes_size(number)
    return slice(_smallest(key.start), key.stop, key.step)
