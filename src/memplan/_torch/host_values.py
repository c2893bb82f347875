"""Values that the host can know of tensors on a card whose kernels do nothing. Seen in torch 2.11 and 2.15."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MOST = 65536
_MAKERS = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace})
_FOREACH_ADD = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_ADDS = frozenset({torch.Tensor.add_, torch.Tensor.__iadd__})


class HostValues(TorchFunctionMode):
    """Writes the elements of small constants into the memory of the card, where the host reads them back.

    They are those of `torch.arange` and its like, what `zero_` and `fill_` write, and counters that a number is added
    to, as optimizers have them. What is allocated stays the same: the kernels are launched first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _MAKERS:
            if isinstance(result, torch.Tensor) and kwargs.get("out") is None:
                _write(result, lambda: func(*args, **{**kwargs, "device": "cpu", "pin_memory": False}))
        elif func in _ADDS and _is_number(args[1:]) and not kwargs:
            _count(args[0], args[1])
        elif func is _FOREACH_ADD and _is_number(args[1:]) and not kwargs:
            for tensor in args[0]:
                _count(tensor, args[1])
        elif func is torch.Tensor.zero_:
            _write(args[0], lambda: torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"))
        elif func is torch.Tensor.fill_ and _is_number(args[1:]):
            _write(args[0], lambda: torch.full(args[0].shape, args[1], dtype=args[0].dtype, device="cpu"))
        return result


def _is_number(rest: Any) -> bool:
    return len(rest) == 1 and isinstance(rest[0], (int, float))


def _write(tensor: torch.Tensor, value: Callable[[], torch.Tensor]) -> None:
    """Write into a small tensor on the card."""
    fits = tensor.is_cuda and 0 < tensor.numel() <= _MOST and tensor.layout is torch.strided and tensor.is_contiguous()
    if not fits or torch.cuda.is_current_stream_capturing():
        return
    with torch._C.DisableTorchFunction():
        there = value().contiguous()
        if there.dtype == tensor.dtype and there.shape == tensor.shape:
            ctypes.memmove(tensor.data_ptr(), there.data_ptr(), there.numel() * there.element_size())


def _count(tensor: torch.Tensor, number: float) -> None:
    """Add to a counter on the card."""
    if tensor.dim() == 0 and tensor.is_cuda:
        with torch._C.DisableTorchFunction():
            there = torch.empty((), dtype=tensor.dtype, device="cpu")
            ctypes.memmove(there.data_ptr(), tensor.data_ptr(), there.element_size())
        _write(tensor, lambda: there + number)
