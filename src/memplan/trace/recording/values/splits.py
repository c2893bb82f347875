"""Tensors that are split by sizes that are values: by what is known of them, else evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memplan import _torch

Tell = Callable[[str], None]
"""Told what was assumed."""


@contextmanager
def splits_by_value(is_standin: Callable[[Any], bool], tell: Tell) -> Iterator[None]:
    """Answer `split` and `tensor_split` of fake tensors, where values that a recording does not know say the sizes.

    Args:
        is_standin: whether a number stands for a value that is not known.
        tell: told what was assumed.
    """
    fake = _torch.FakeTensor
    split, tensor_split, function = fake.split, fake.tensor_split, torch.tensor_split

    def split_by(tensor: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, (list, tuple)) and any(map(is_standin, sizes)):
            tell(_SPLIT.format(parts=len(sizes)))
            sizes = even(tensor.shape[dim], len(sizes))
        return split(tensor, sizes, dim)

    def split_at(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_places(tensor, args, kwargs, tell)
        return tensor_split(tensor, *args, **kwargs)

    def split_of(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.pop("input")
        return split_at(tensor, *args[1:], **kwargs) if isinstance(tensor, fake) else function(*args, **kwargs)

    with (
        _torch.patched(fake, split=split_by, tensor_split=split_at),
        _torch.patched(torch, tensor_split=_torch.here_alone(split_of, function)),
    ):
        yield


_SPLIT = "a tensor IS SPLIT BY VALUES: its {parts} parts are taken to be equally large"


def even(whole: int, parts: int) -> list[int]:
    """Return sizes that differ by 1 at most, the larger ones first."""
    each, more = divmod(whole, parts)
    return [each + (part < more) for part in range(parts)]


def _with_places(
    tensor: Any, args: Sequence[Any], kwargs: dict[str, Any], tell: Tell
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
        sizes = even(tensor.shape[dim], parts)
        places = [sum(sizes[:part]) for part in range(1, parts)]
    if name is not None:
        return tuple(args), {"indices": places, "dim": dim}
    return (places, *args[1:]), kwargs
