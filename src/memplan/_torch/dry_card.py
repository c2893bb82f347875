"""Of a card whose kernels do nothing: torch's own memory history, and the values that the host can know. Seen in torch
2.11 and 2.15."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

_MOST_EVENTS = 10_000_000
_MOST = 65536
_MAKERS = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace})
_FOREACH_ADD = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_ADDS = frozenset({torch.Tensor.add_, torch.Tensor.__iadd__})


class HistoryEvent(NamedTuple):
    """One thing that the caching allocator did. Bytes as requested for blocks, as mapped for segments."""

    action: str
    address: int
    bytes: int
    stream: int
    pool: tuple[int, ...]


def record_history(*, stacks: bool) -> None:
    """Begin the history of all that the caching allocator does; ``stacks``: with the Python stack of each event."""
    context = "all" if stacks else None
    torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=_MOST_EVENTS)


def end_history() -> None:
    """End the history that `record_history` began."""
    torch.cuda.memory._record_memory_history(None)


def history() -> list[HistoryEvent]:
    """Return what was recorded, in order."""
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    rows = snapshot["device_traces"][torch.cuda.current_device()]
    return [
        HistoryEvent(
            row["action"], row.get("addr", 0), row["size"], row.get("stream", 0), tuple(row.get("pool_id", (0, 0)))
        )
        for row in rows
    ]


def dump_history(path: str | os.PathLike[str]) -> None:
    """Write torch's own snapshot, a pickle, as `torch.cuda.memory._dump_snapshot` does."""
    torch.cuda.memory._dump_snapshot(os.fspath(path))


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


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory on the card: those that are traced or transformed have none."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cuda and tensor.layout is torch.strided
    wrapped: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  # no stub
    traced = torch._is_functional_tensor(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return plain and not traced and not wrapped.is_functorch_wrapped_tensor(tensor)


def _write(tensor: torch.Tensor, value: Callable[[], torch.Tensor]) -> None:
    """Write into a small tensor on the card."""
    fits = _is_real(tensor) and 0 < tensor.numel() <= _MOST and tensor.is_contiguous()
    if not fits or torch.cuda.is_current_stream_capturing():
        return
    with torch._C.DisableTorchFunction():
        there = value().contiguous()
        if there.dtype == tensor.dtype and there.shape == tensor.shape:
            ctypes.memmove(tensor.data_ptr(), there.data_ptr(), there.numel() * there.element_size())


def _count(tensor: torch.Tensor, number: float) -> None:
    """Add to a counter on the card."""
    if tensor.dim() == 0 and _is_real(tensor):
        with torch._C.DisableTorchFunction():
            there = torch.empty((), dtype=tensor.dtype, device="cpu")
            ctypes.memmove(there.data_ptr(), tensor.data_ptr(), there.element_size())
        _write(tensor, lambda: there + number)
