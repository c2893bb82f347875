"""Tensor methods and factories with a device argument, for tensors on the emulated card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import ALLOCATOR_BLOCK
from memplan.trace.fake_cuda.residence import CPU, CUDA, Card, card_of_rank, device_of_argument
from memplan.trace.recording.session import running_recording

_METHODS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")


@contextmanager
def installed(card: Card) -> Iterator[None]:
    """Within this context tensor methods and factories emulate ``card``: ``device="cuda"``, ``.cuda()`` and ``.to()``
    record a tensor as on the card, and ``.is_cuda`` and ``.get_device()`` return the recorded device.

    Code that runs inside of an op gets the real device, the CPU.
    """
    emulated = _Tensors(card)
    with ExitStack() as stack:
        stack.enter_context(_torch.tensor_devices_reported(emulated.device, card.inside))
        methods = {name: emulated.emulated_factory(getattr(torch.Tensor, name)) for name in _METHODS}
        stack.enter_context(
            _torch.patched(
                torch.Tensor,
                to=_method(emulated.to),
                cuda=_method(emulated.cuda),
                cpu=_method(emulated.cpu),
                type=_method(emulated.type),
                is_cuda=property(lambda x: not card.inside() and card.holds(x)),
                is_cpu=property(lambda x: card.inside() or not card.holds(x)),
                get_device=lambda x: card_of_rank().index if card.holds(x) else -1,
                pin_memory=_method(emulated.pin_memory),
                is_pinned=lambda x, *_, **__: _is_pinned(x),
                record_stream=_method(emulated.record_stream),
                **methods,
            )
        )
        stack.enter_context(_torch.patched(_torch.FakeTensor, data_ptr=_method(emulated.data_ptr)))
        stack.enter_context(_torch.factories_replaced(emulated.emulated_factory))
        stack.enter_context(
            _torch.default_device_replaced(lambda device: card.placing(emulated.device_from_user(device)))
        )
        yield


class _Tensors:
    """The emulated methods and factories. A tensor on the card is a fake CPU tensor that the `Card` lists as there."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the emulated ``tensor.device``, or None to use the real device."""
        return card_of_rank() if not self._card.within_compiled and self._card.holds(tensor) else None

    def device_from_user(self, device: Any) -> torch.device:
        """Return the `torch.device` of a ``device`` argument that the user's code passes.

        Records that the step names CUDA, unless the argument is the ``.device`` of a tensor.
        """
        target = device_of_argument(device)
        if target.type == "cuda" and device is not card_of_rank():  # that very object is a tensor's own device
            self._card.note_cuda_named()
        return target

    def emulated_factory(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that creates a tensor (``make``: `torch.zeros`), so that ``device="cuda"`` creates it on the
        CPU and notes that it is on the card."""
        card = self._card

        def make_on_device(*args: Any, **kwargs: Any) -> Any:
            """Call the factory for a CPU tensor, and record the tensor's device."""
            device = kwargs.get("device")
            if card.inside():  # torch's own call within an op
                return make(*args, **kwargs)
            pins = kwargs.pop("pin_memory", None)  # refused without a GPU
            if device is None:
                if args and isinstance(args[0], torch.Tensor):  # as `zeros_like`: on the argument's device
                    return make(*args, **kwargs)
                with card.placing(CPU):  # a default device, if set, is applied within
                    return _pinned(make(*args, **kwargs)) if pins else make(*args, **kwargs)
            target = self.device_from_user(device)
            if target.type not in ("cuda", "cpu"):  # "meta"
                return make(*args, **kwargs)
            with card.placing(target):
                value = make(*args, **kwargs | {"device": CPU})
            # `torch.as_tensor` may return its argument, which may be on the other device
            if isinstance(value, torch.Tensor) and self._moves(value, target):
                return self._move(value, target)
            return _pinned(value) if pins and target.type == "cpu" else value

        make_on_device.__name__ = getattr(make, "__name__", "made")
        return make_on_device

    def to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Emulate `torch.Tensor.to`: copy between host and card if the tensor is on the other device."""
        if self._card.inside():
            return _TO(tensor, *args, **kwargs)
        device, others, kwargs = _split_device(args, kwargs)
        if device is None:
            return _TO(tensor, *others, **kwargs)
        target = self.device_from_user(device)
        if target.type not in ("cuda", "cpu"):  # "meta"
            return _TO(tensor, target, *others, **kwargs)
        if not self._moves(tensor, target):
            return _TO(tensor, *others, **kwargs) if others or kwargs else tensor
        return self._move(tensor, target, *others, **kwargs)

    def cuda(self, tensor: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """Emulate `torch.Tensor.cuda`."""
        if not self._card.inside():
            self._card.note_cuda_named()
        return self.to(tensor, card_of_rank() if device is None else device, **kwargs)

    def cpu(self, tensor: Any, **kwargs: Any) -> Any:
        """Emulate `torch.Tensor.cpu`. Copies even if the step never names CUDA."""
        if self._card.everything and not self._card.inside() and self._card.holds(tensor):
            return self._move(tensor, CPU, **kwargs)
        return self.to(tensor, CPU, **kwargs)

    def type(self, tensor: Any, dtype: Any = None, **kwargs: Any) -> Any:
        """Emulate `torch.Tensor.type`, whose argument can name a device, too ("torch.cuda.FloatTensor")."""
        name = dtype
        if not isinstance(dtype, str):  # a class, such as torch.cuda.FloatTensor
            name = f"{getattr(dtype, '__module__', '')}.{getattr(dtype, '__name__', '')}"
        if self._card.inside() or not name.startswith("torch.cuda."):
            return _TYPE(tensor, dtype, **kwargs) if dtype is not None else _TYPE(tensor)
        return self.cuda(_TYPE(tensor, name.replace("torch.cuda.", "torch.")))

    def pin_memory(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Emulate `torch.Tensor.pin_memory` by a copy in the host's memory."""
        if self._card.inside():
            return tensor
        self._card.note_cuda_named()
        with self._card.placing(CPU):
            return _pinned(tensor.clone())

    def data_ptr(self, tensor: torch.Tensor) -> int:
        """Emulate `torch.Tensor.data_ptr` by a number that is no address: equal for equal storages and offsets, which
        graphed callables compare, and aligned as a block of the card."""
        entry = self._card.ledger.find(tensor)
        start = ALLOCATOR_BLOCK * (1 + entry.id) if entry is not None else 0
        return start + int(tensor.storage_offset()) * tensor.element_size()

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Emulate `torch.Tensor.record_stream`: note a stream for which the free of the block has to wait."""
        entry = self._card.ledger.find(tensor)
        if entry is not None:
            number = getattr(stream, "stream_id", 0)
            if number != entry.stream and number not in entry.used_on:
                entry.used_on += (number,)

    def _moves(self, tensor: Any, target: torch.device) -> bool:
        """Return whether a tensor has to be copied to be on ``target``, the CPU or the card."""
        if self._card.everything:  # the step names no device: all its tensors stay on the card
            return False
        return (target.type == "cuda") != self._card.holds(tensor)

    def _move(self, tensor: Any, target: torch.device, *others: Any, **kwargs: Any) -> Any:
        """Copy a tensor to the other device; the further arguments are those of `torch.Tensor.to`."""
        layout = kwargs.pop("memory_format", None) or torch.preserve_format
        with _torch.no_modes():
            empty = torch.empty((), dtype=tensor.dtype, device="meta")
            dtype = _TO(empty, *others, **kwargs).dtype  # torch parses the arguments
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _DeviceCopy.apply(tensor, self._card, target, dtype, layout)
        return _copy_to(tensor, self._card, target, dtype, layout)


def _pinned(tensor: Any) -> Any:
    """Return a new tensor, noted as in pinned memory of the host."""
    running = running_recording()
    if running is not None and running.loading is not None:
        running.loading.mark(tensor, "pinned")
    return tensor


def _is_pinned(tensor: Any) -> bool:
    """Return whether the recording has noted a tensor as in pinned memory."""
    running = running_recording()
    return running is not None and running.loading is not None and running.loading.is_pinned(tensor)


def _method(bound: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method in a function, which a class turns into a method of its instances."""
    return lambda tensor, *args, **kwargs: bound(tensor, *args, **kwargs)


_TO = torch.Tensor.to
_TYPE = torch.Tensor.type


class _DeviceCopy(torch.autograd.Function):
    """A differentiable copy between host and card."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: Any, card: Any, target: Any, dtype: Any, layout: Any
    ) -> Any:
        """Copy a tensor to the device ``target``, with this dtype and memory format."""
        ctx.card, ctx.dtype, ctx.source = card, tensor.dtype, CUDA if card.holds(tensor) else CPU
        return _copy_to(tensor, card, target, dtype, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return _copy_to(gradient, ctx.card, ctx.source, ctx.dtype, torch.preserve_format), None, None, None, None


def _copy_to(tensor: Any, card: Card, target: torch.device, dtype: torch.dtype, layout: Any) -> Any:
    """Copy a tensor to ``target`` below autograd."""
    with card.placing_only(target):
        return _torch.copied(tensor, dtype, layout)


def _split_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the device (or None) that the arguments of `torch.Tensor.to` name, the other positional arguments, and the
    other keyword arguments."""
    kwargs = dict(kwargs)
    device, first = kwargs.pop("device", None), args[0] if args else kwargs.pop("other", None)
    if isinstance(first, torch.Tensor):  # x.to(other): to the other's device and dtype
        return first.device, (first.dtype, *args[1:]), kwargs
    if isinstance(first, (str, torch.device)) or (isinstance(first, int) and not isinstance(first, bool)):
        has_dtype = len(args) > 1 and args[1] is not None  # x.to(device, None) keeps the dtype
        return first, args[1:] if has_dtype else (), kwargs
    return device, args, kwargs
