"""Tensors that are split by sizes that are values: by what is known of them, else as unevenly as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.values.intervals import Range
from memplan.trace.recording.values.numbers import becomes_size, is_standin, range_of

RangeOf = Callable[[torch.Tensor], Range | None]
Tell = Callable[[str], None]
"""Told what was assumed."""
OtherWay = Callable[[tuple[str, str]], bool]
"""Returns whether a value is taken the other way of two, given what either is called."""


@contextmanager
def splits_by_value(tell: Tell, range_of_tensor: RangeOf, other_way: OtherWay) -> Iterator[None]:
    """Answer `split`, `tensor_split` and `narrow` of fake tensors, where values that are not known say the sizes.

    Args:
        tell: told what was assumed.
        range_of_tensor: between what the elements of a tensor lie; None where nothing is known.
        other_way: returns whether the last parts are taken to be large, as a backward pass may meet them, and not the
            first.
    """
    fake = _torch.FakeTensor
    split, tensor_split, function, narrow = fake.split, fake.tensor_split, torch.tensor_split, fake.narrow

    def narrow_by(tensor: Any, dim: int, start: Any, length: Any) -> Any:
        first, most = _range_of(start, range_of_tensor), _range_of(length, range_of_tensor)
        if first is not None and most is not None and (first[0] != first[1] or most[0] != most[1]):
            tell(_PART)
            start = int(first[0])
            length = min(int(most[1]), tensor.shape[dim] - start)
        return narrow(tensor, dim, start, length)

    def split_by(tensor: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, (list, tuple)) and any(map(is_standin, sizes)):
            tell(_SPLIT.format(parts=len(sizes)))
            sizes = _uneven(tensor.shape[dim], [range_of(one) for one in sizes], other_way)
        elif is_standin(sizes):
            becomes_size(sizes)
        return split(tensor, sizes, dim)

    def split_at(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_places(tensor, args, kwargs, tell, other_way)
        return tensor_split(tensor, *args, **kwargs)

    def split_of(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.pop("input")
        return split_at(tensor, *args[1:], **kwargs) if isinstance(tensor, fake) else function(*args, **kwargs)

    with (
        _torch.patched(fake, split=split_by, tensor_split=split_at, narrow=narrow_by),
        _torch.patched(torch, tensor_split=_torch.here_alone(split_of, function)),
    ):
        yield


_PART = "a part of a tensor BEGINS OR ENDS BY VALUES: it is taken to begin as soon and to be as long as can be"
_SPLIT = "a tensor IS SPLIT BY VALUES: of its {parts} parts, the first or the last are taken as large as can be"


def _range_of(value: Any, range_of_tensor: RangeOf) -> Range | None:
    """Return between what a number lies, a plain one or a tensor."""
    if isinstance(value, torch.Tensor):
        return range_of_tensor(value) if isinstance(value, _torch.FakeTensor) else None
    return range_of(value)


_ENDS = ("with the first parts the largest and none empty", "with the last parts the largest")


def _uneven(whole: int, ranges: Sequence[Range | None], other_way: OtherWay) -> list[int]:
    return uneven(whole, ranges[::-1], fewest=0)[::-1] if other_way(_ENDS) else uneven(whole, ranges)


def uneven(whole: int, ranges: Sequence[Range | None], fewest: int = 1) -> list[int]:
    """Return sizes of parts: one after the other as large as it can be.

    What grows faster than a part's size takes most so.

    Args:
        whole: of all parts together.
        ranges: of each part, None where nothing is known.
        fewest: elements that each part has at least, where it can: code may pass over empty ones.
    """
    least = [fewest if one is None else max(int(one[0]), min(fewest, int(one[1]))) for one in ranges]
    most = [whole if one is None else int(one[1]) for one in ranges]
    if sum(least) > whole:  # what is known does not fit
        least = [int(part < whole) for part in range(len(ranges))]
    left = whole - sum(least)
    sizes = list[int]()
    for low, high in zip(least, most, strict=True):
        more = max(0, min(high - low, left))
        sizes.append(low + more)
        left -= more
    sizes[0] += left  # where what is known does not add up to the whole
    return sizes


def _with_places(
    tensor: Any, args: Sequence[Any], kwargs: dict[str, Any], tell: Tell, other_way: OtherWay
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `tensor_split` with numbers for a tensor, which it reads in C++."""
    name = next((one for one in kwargs if isinstance(kwargs[one], torch.Tensor)), None)
    given = kwargs[name] if name is not None else args[0] if args else None
    if not isinstance(given, _torch.FakeTensor):
        return tuple(args), kwargs
    dim = kwargs.get("dim", args[1] if name is None and len(args) > 1 else 0)
    places: Any
    if given.constant is not None:
        places = given.constant.tolist()
    else:
        parts = given.numel() + 1
        tell(_SPLIT.format(parts=parts))
        sizes = _uneven(tensor.shape[dim], [None] * parts, other_way)
        places = [sum(sizes[:part]) for part in range(1, parts)]
    if name is not None:
        return tuple(args), {"indices": places, "dim": dim}
    return (places, *args[1:]), kwargs
