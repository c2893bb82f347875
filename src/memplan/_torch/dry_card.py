"""torch's memory history of a card; and values of small constants on an emulated card, whose kernels do nothing. Seen
in torch 2.11 and 2.15."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

_MAX_EVENTS = 10_000_000
_MAX_ELEMENTS = 65536
_FACTORIES = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace})
_FOREACH_ADD = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_IN_PLACE_ADDS = frozenset({torch.Tensor.add_, torch.Tensor.__iadd__})


class HistoryEvent(NamedTuple):
    """An event of the caching allocator. ``bytes`` are those requested for a block, or those of a segment."""

    action: str
    address: int
    bytes: int
    stream: int
    pool: tuple[int, ...]


def record_history(*, stacks: bool) -> None:
    """Start recording the caching allocator's history; with ``stacks``, including the Python stack of each event."""
    context = "all" if stacks else None
    torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=_MAX_EVENTS)


def end_history() -> None:
    """Stop recording the allocator's history and discard it."""
    torch.cuda.memory._record_memory_history(None)


def memory_snapshot() -> dict[str, Any]:
    """Return torch's snapshot of its caching allocator: the history so far, and the segments with their blocks."""
    return dict(torch.cuda.memory._snapshot())


def history() -> list[HistoryEvent]:
    """Return the recorded events of the current card, in order."""
    rows = memory_snapshot()["device_traces"][torch.cuda.current_device()]
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
    """Writes the values of small constants into the memory of an emulated card, whose kernels do nothing, so that the
    host reads the right values back.

    Covers results of `torch.arange` and other factories, `zero_` and `fill_`, and scalar counters, such as an
    optimizer's step. Allocations stay the same: each function runs unchanged first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and write the values that its kernel would write where the host knows them."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _FACTORIES:
            if isinstance(result, torch.Tensor) and kwargs.get("out") is None:
                _write(result, lambda: func(*args, **{**kwargs, "device": "cpu", "pin_memory": False}))
        elif func in _IN_PLACE_ADDS and _is_number(args[1:]) and not kwargs:
            _add_to_counter(args[0], args[1])
        elif func is _FOREACH_ADD and _is_number(args[1:]) and not kwargs:
            for tensor in args[0]:
                _add_to_counter(tensor, args[1])
        elif func is torch.Tensor.zero_:
            _write(args[0], lambda: torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"))
        elif func is torch.Tensor.fill_ and _is_number(args[1:]):
            _write(args[0], lambda: torch.full(args[0].shape, args[1], dtype=args[0].dtype, device="cpu"))
        return result


def _is_number(arguments: Any) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], (int, float))


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory on the card; wrappers of tracing and of torch.func have none."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cuda and tensor.layout is torch.strided
    wrapped: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  # no stub
    traced = torch._is_functional_tensor(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return plain and not traced and not wrapped.is_functorch_wrapped_tensor(tensor)


def _write(tensor: torch.Tensor, value: Callable[[], torch.Tensor]) -> None:
    """Write a value into a small tensor on the card; no-op for other tensors, and where dtype or shape differ."""
    fits = _is_real(tensor) and 0 < tensor.numel() <= _MAX_ELEMENTS and tensor.is_contiguous()
    if not fits or torch.cuda.is_current_stream_capturing():
        return
    with torch._C.DisableTorchFunction():
        host = value().contiguous()
        if host.dtype == tensor.dtype and host.shape == tensor.shape:
            ctypes.memmove(tensor.data_ptr(), host.data_ptr(), host.numel() * host.element_size())


def _add_to_counter(tensor: torch.Tensor, number: float) -> None:
    """Add a number to a scalar tensor on the emulated card, such as an optimizer's step, which the emulated kernel does
    not; no-op for other tensors."""
    if tensor.dim() == 0 and _is_real(tensor):
        with torch._C.DisableTorchFunction():
            host = torch.empty((), dtype=tensor.dtype, device="cpu")
            ctypes.memmove(host.data_ptr(), tensor.data_ptr(), host.element_size())
        _write(tensor, lambda: host + number)
