"""Patches of torch's look-ups of a CUDA device, in Python and in C++, while a step for a card is recorded.

Everything here was seen in torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.jit._builtins as torchscript
import torch.utils._device as default_device
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor

from memplan._patched import patched_throughout
from memplan._torch.patches import patched

_LIKE = ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
_NAMESPACES = (torch, torch.fft, torch.nested)
default_device._device_constructors()  # torch caches the result of the first call: its own functions, not patches


@contextlib.contextmanager
def tensor_devices_reported(
    device: Callable[[torch.Tensor], torch.device | None], inside: Callable[[], bool]
) -> Iterator[None]:
    """Make ``tensor.device`` return the card that a tensor is recorded on.

    Args:
        device: returns that card; None: the tensor's own device is returned.
        inside: returns whether an op is being dispatched, in which tensors have their own devices.
    """
    plain, fake = torch.Tensor.device, FakeTensor.device

    def reporting_property(own: Any) -> property:
        """Return the property ``device`` of a class of tensors, whose original is ``own``."""

        def get(tensor: torch.Tensor) -> torch.device:
            reported = None if inside() else device(tensor)
            return own.__get__(tensor) if reported is None else reported

        return property(get)

    group: Callable[..., dict[Any, Any]] = torch._C._group_tensors_by_device_and_dtype

    def group_and_report(lists: Any, *args: Any, **kwargs: Any) -> Any:
        """Group lists of tensors by (device, dtype), with the device that the first tensor of a group reports."""
        reported: dict[Any, Any] = {}
        for (own_device, dtype), grouped in group(lists, *args, **kwargs).items():
            (first_list, *_), _indices = grouped
            reported[first_list[0].device if first_list else own_device, dtype] = grouped
        return reported

    wrapper = torch.Tensor._make_wrapper_subclass

    def wrapper_on_the_host(*args: Any, **kwargs: Any) -> Any:
        """Construct a wrapper subclass on the CPU, where its inner tensors are."""
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device(kwargs["device"])
        return wrapper(*map(on_the_host, args), **{name: on_the_host(value) for name, value in kwargs.items()})

    def on_the_host(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    move = torch.nn.Module.to

    def move_to_index(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Move a module; an integer is the index of a CUDA device."""
        named = {name: device_of_index(value) for name, value in kwargs.items()}
        return move(module, *map(device_of_index, args), **named)

    def device_of_index(value: Any) -> Any:
        return torch.device("cuda", value) if isinstance(value, int) and not isinstance(value, bool) else value

    with (
        patched(torch.nn.Module, to=move_to_index),
        patched_throughout(torch.Tensor, _make_wrapper_subclass=staticmethod(wrapper_on_the_host)),
        patched_throughout(torch.Tensor, device=reporting_property(plain)),
        patched_throughout(FakeTensor, device=reporting_property(fake)),
        patched_throughout(torch._C, _group_tensors_by_device_and_dtype=group_and_report),
    ):
        yield


def copied(tensor: torch.Tensor, dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    """Copy a tensor by `_to_copy`, the op that a move between devices dispatches below autograd."""
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype, memory_format=layout)


@contextlib.contextmanager
def factories_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace each of torch's functions that create a tensor on a device (`torch.zeros`) by ``wrap(function)``."""
    functions = {id(f) for f in default_device._device_constructors()}
    functions |= {id(getattr(torch, f"{name}_like")) for name in _LIKE} | {id(torch.normal)}
    builtins = torchscript._get_builtin_table()
    with contextlib.ExitStack() as stack:
        for home in _NAMESPACES:
            factories = {name: value for name, value in vars(home).items() if id(value) in functions}
            replaced = {name: wrap(value) for name, value in factories.items()}
            stack.enter_context(patched(home, **replaced))
            for name, value in factories.items():  # TorchScript knows torch's functions by their id()
                if id(value) in builtins:
                    builtins[id(replaced[name])] = builtins[id(value)]
                    stack.callback(builtins.pop, id(replaced[name]), None)
        yield


@contextlib.contextmanager
def default_device_replaced(
    placing: Callable[[torch.device], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Make ``with torch.device("cuda")`` and `torch.set_default_device` create tensors on the CPU, within the context
    ``placing(device)``, which marks them as on the card."""
    real = default_device.DeviceContext.__torch_function__

    def on_card(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the dispatch of ``with torch.device(...)``: call a factory function without adding the device."""
        kwargs = kwargs or {}
        if self.device.type != "cuda" or function not in default_device._device_constructors():
            return real(self, function, types, args, kwargs)
        if kwargs.get("device") is not None:
            return function(*args, **kwargs)
        with placing(self.device):
            return function(*args, **kwargs)

    with patched(default_device.DeviceContext, __torch_function__=on_card):
        yield


def checkpoints_for_cuda() -> contextlib.AbstractContextManager[None]:
    """Make `torch.utils.checkpoint` restore CUDA's autocast even if no argument is on the card."""
    return patched(torch.utils.checkpoint.DefaultDeviceType, _default_device_type="cuda")


def histories_replaced(refusal: Callable[[str], Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which starting the caching allocator's history is a no-op, and reading it raises."""
    return patched(
        torch.cuda.memory,
        _record_memory_history=lambda *_, **__: None,
        _snapshot=refusal("_snapshot"),
        _dump_snapshot=refusal("_dump_snapshot"),
    )


def raw_streams_of_cuda() -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``torch._C`` has ``_cuda_getCurrentRawStream``, which libraries import, in builds
    without CUDA, too."""
    # torch.cuda.graph calls _host_emptyCache
    return patched(torch._C, _cuda_getCurrentRawStream=lambda device: 0, _host_emptyCache=lambda: None)


def accelerator_is_cuda() -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``torch._C`` reports CUDA as the accelerator, which `fully_shard` reads for its default
    mesh."""
    return patched(torch._C, _get_accelerator=lambda check=None: torch.device("cuda"))


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces; the next matrix product allocates them again."""
    torch._C._cuda_clearCublasWorkspaces()
