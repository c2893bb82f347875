"""Numbers that are not known, as arguments of torch's functions: which of them are sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.values.numbers import becomes_size, is_standin, range_of
from memplan.trace.recording.values.range_rules import Range, union

_SIZED = frozenset({
    "zeros", "ones", "empty", "rand", "randn", "arange", "range", "eye", "randperm", "new_zeros", "new_ones",
    "new_empty", "new", "empty_strided", "new_empty_strided", "empty_permuted", "as_strided", "as_strided_", "set_",
    "tril_indices", "triu_indices", "sparse_coo_tensor", "Tensor", "FloatTensor", "DoubleTensor", "HalfTensor",
    "BFloat16Tensor", "LongTensor", "IntTensor", "hann_window", "hamming_window", "bartlett_window", "blackman_window",
    "kaiser_window", "fftfreq", "rfftfreq", "fft_fftfreq", "fft_rfftfreq", "view", "reshape", "expand", "repeat",
    "tile", "resize", "resize_", "unflatten", "broadcast_to", "repeat_interleave", "topk", "multinomial", "histc",
    "bincount", "one_hot", "vander", "combinations", "diag", "diagflat", "diag_embed", "diagonal", "chunk",
    "unsafe_chunk", "unsafe_split", "split_with_sizes", "hsplit", "vsplit", "dsplit", "unfold", "unfold_copy", "fold",
    "im2col", "col2im", "interpolate", "upsample", "pixel_shuffle", "pixel_unshuffle", "affine_grid", "stft", "istft",
    "slice_scatter", "slice_copy", "svd_lowrank", "pca_lowrank", "pad_sequence",
    *(f"conv{form}{dim}d" for form in ("", "_transpose") for dim in (1, 2, 3)),
    *(f"{kind}_{name}{dim}d" for kind, name in (
        ("max", "pool"), ("avg", "pool"), ("lp", "pool"), ("adaptive_max", "pool"), ("adaptive_avg", "pool"),
        ("fractional_max", "pool"), ("max", "unpool")) for dim in (1, 2, 3)),
    *(f"{prefix}{form}fft{dim}" for prefix in ("", "fft_") for form in ("", "i", "r", "ir", "h", "ih")
      for dim in ("", "2", "n")),
})  # fmt: skip
"""Functions of which every number is a size, or decides one."""
_PARTLY: dict[str, tuple[int, str]] = {
    "full": (0, "size"), "new_full": (1, "size"), "pad": (1, "pad"), "constant_pad_nd": (1, "pad"),
    "linspace": (2, "steps"), "logspace": (2, "steps"), "normal": (2, "size"), "randint": (-1, "size"),
}  # fmt: skip
"""Functions that take a size and other numbers: where the size is, and its name."""
_VALUES = ("tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor")
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
        if name in _VALUES:
            result = func(*args, **kwargs)
            given = args[1 if name == "new_tensor" else 0 :]
            data = given[0] if given else next((kwargs[one] for one in ("data", "obj", "s") if one in kwargs), None)
            self._unknown(result, union([range_of(one) for one in _leaves(data)]))
            return result
        for number in _sizes(name, args, kwargs):
            becomes_size(number)
        if name == "arange" and len(args) > 1:  # from as low as can be
            args = (_smallest(args[0]), *args[1:])
        result = func(*args, **kwargs)
        self._unknown(result, None)
        return result

    def _unknown(self, result: Any, values: Range | None) -> None:
        """What is computed of such a number is as unknown, whatever a fake tensor keeps."""
        if isinstance(result, _torch.FakeTensor) and result.constant is not None:
            result.constant = None
            self._put(result, values)


def _sizes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the unknown numbers among a function's arguments that are sizes."""
    if name in _SIZED:
        return list(_standins((args, tuple(kwargs.values()))))
    if name not in _PARTLY:
        return []
    at, keyword = _PARTLY[name]
    return list(_standins((args[at:][:1], kwargs.get(keyword))))


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
