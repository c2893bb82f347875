"""Tensors that go to the card and come back: methods and factories that take a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memplan import _torch
from memplan.trace.fake_cuda.residence import CPU, CUDA, Card, wanted

_METHODS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")


@contextmanager
def installed(card: Card) -> Iterator[None]:
    """Let methods and factories that take a device put what they make on the card, or take it from there."""
    emulated = _Tensors(card)
    with ExitStack() as stack:
        stack.enter_context(_torch.tensors_that_tell(emulated.device, card.inside))
        methods = {name: emulated.made(getattr(torch.Tensor, name)) for name in _METHODS}
        stack.enter_context(
            _torch.patched(
                torch.Tensor,
                to=_method(emulated.to),
                cuda=_method(emulated.cuda),
                cpu=_method(emulated.cpu),
                type=_method(emulated.type),
                is_cuda=property(lambda x: not card.inside() and card.holds(x)),
                is_cpu=property(lambda x: card.inside() or not card.holds(x)),
                get_device=lambda x: 0 if card.holds(x) else -1,
                pin_memory=_method(emulated.pin_memory),
                is_pinned=lambda x, *_, **__: False,
                record_stream=_method(emulated.record_stream),
                **methods,
            )
        )
        stack.enter_context(_torch.factories_replaced(emulated.made))
        stack.enter_context(_torch.default_device_replaced(lambda device: card.going(emulated.asked(device))))
        yield


class _Tensors:
    def __init__(self, card: Card) -> None:
        self._card = card

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        """Return what ``tensor.device`` answers; None where the tensor knows best."""
        return CUDA if self._card.holds(tensor) else None

    def asked(self, device: Any) -> torch.device:
        """Return the device that the user's code names, which counts as naming it."""
        found = wanted(device)
        if found.type == "cuda" and device is not CUDA:  # a tensor's own device is no decision of the user's
            self._card.name()
        return found

    def made(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a factory that tells where what it makes lies, and makes it on the CPU."""
        card = self._card

        def make_where_asked(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if card.inside():
                return make(*args, **kwargs)
            kwargs.pop("pin_memory", None)  # refused without a GPU; pinned memory is the host's
            if device is None:
                if args and isinstance(args[0], torch.Tensor):
                    return make(*args, **kwargs)  # like its argument
                with card.going(CPU):  # by default; a default device in force says otherwise, inside
                    return make(*args, **kwargs)
            place = self.asked(device)
            if place.type not in ("cuda", "cpu"):
                return make(*args, **kwargs)
            with card.going(place):
                made = make(*args, **kwargs | {"device": CPU})
            return self._there(made, place)

        make_where_asked.__name__ = getattr(make, "__name__", "made")
        return make_where_asked

    def to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor.to`."""
        if self._card.inside():
            return _TO(tensor, *args, **kwargs)
        device, rest, kwargs = _split(args, kwargs)
        if device is None:
            return _TO(tensor, *rest, **kwargs)
        place = self.asked(device)
        if place.type not in ("cuda", "cpu"):
            return _TO(tensor, place, *rest, **kwargs)
        if not self._moves(tensor, place):
            return _TO(tensor, *rest, **kwargs) if rest or kwargs else tensor
        return self._moved(tensor, place, *rest, **kwargs)

    def cuda(self, tensor: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """`torch.Tensor.cuda`."""
        if not self._card.inside():
            self._card.name()
        return self.to(tensor, CUDA if device is None else device, **kwargs)

    def cpu(self, tensor: Any, **kwargs: Any) -> Any:
        """`torch.Tensor.cpu`: a copy, too, where CUDA is not named, as this is why a step for a card would call it."""
        if self._card.everything and not self._card.inside() and self._card.holds(tensor):
            return self._moved(tensor, CPU, **kwargs)
        return self.to(tensor, CPU, **kwargs)

    def type(self, tensor: Any, dtype: Any = None, **kwargs: Any) -> Any:
        """`torch.Tensor.type`, which can name a device, too."""
        name = dtype if isinstance(dtype, str) else f"{getattr(dtype, '__module__', '')}."
        name += "" if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        if self._card.inside() or not name.startswith("torch.cuda."):
            return _TYPE(tensor, dtype, **kwargs) if dtype is not None else _TYPE(tensor)
        return self.cuda(_TYPE(tensor, name.replace("torch.cuda.", "torch.")))

    def pin_memory(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor.pin_memory`: a copy in the host's memory."""
        if self._card.inside():
            return tensor
        self._card.name()
        with self._card.going(CPU):
            return tensor.clone()

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """`torch.Tensor.record_stream`: the storage's block waits for this stream when it is freed."""
        entry = self._card.ledger.find(tensor)
        if entry is not None:
            number = getattr(stream, "stream_id", 0)
            if number != entry.stream and number not in entry.used_on:
                entry.used_on += (number,)

    def _moves(self, tensor: Any, place: torch.device) -> bool:
        if self._card.everything:
            return False
        return (place.type == "cuda") != self._card.holds(tensor)

    def _moved(self, tensor: Any, place: torch.device, *rest: Any, **kwargs: Any) -> Any:
        layout = kwargs.pop("memory_format", None) or torch.preserve_format
        with _torch.no_modes():
            target = _TO(torch.empty((), dtype=tensor.dtype, device="meta"), *rest, **kwargs)  # reads them for us
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Moved.apply(tensor, self._card, place, target.dtype, layout)
        return _copied(tensor, self._card, place, target.dtype, layout)

    def _there(self, made: Any, place: torch.device) -> Any:
        """Return what a factory returned, on the device asked for: `torch.as_tensor` may hand its argument back."""
        if isinstance(made, torch.Tensor) and self._moves(made, place):
            return self._moved(made, place)
        return made


def _method(bound: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which a class makes a method of its instances; a bound one it would leave bound."""
    return lambda tensor, *args, **kwargs: bound(tensor, *args, **kwargs)


_TO = torch.Tensor.to
_TYPE = torch.Tensor.type


class _Moved(torch.autograd.Function):
    """A copy between host and card, whose gradient goes back the way it came."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, card: Any, place: Any, dtype: Any, layout: Any) -> Any:  # type: ignore[override]
        """Return the copy."""
        ctx.card, ctx.dtype, ctx.back = card, tensor.dtype, CUDA if card.holds(tensor) else CPU
        return _copied(tensor, card, place, dtype, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        """Return the gradient's copy."""
        return _copied(gradient, ctx.card, ctx.back, ctx.dtype, torch.preserve_format), None, None, None, None


def _copied(tensor: Any, card: Card, place: torch.device, dtype: torch.dtype, layout: Any) -> Any:
    with card.moving(place):
        return _torch.copied(tensor, dtype, layout)


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the device among the arguments of `to`, and the others without it."""
    kwargs = dict(kwargs)
    device, first = kwargs.pop("device", None), args[0] if args else kwargs.pop("other", None)
    if isinstance(first, torch.Tensor):
        return first.device, (first.dtype, *args[1:]), kwargs
    if isinstance(first, (str, torch.device)) or (isinstance(first, int) and not isinstance(first, bool)):
        return first, args[1:] if len(args) > 1 and args[1] is not None else (), kwargs
    return device, args, kwargs
