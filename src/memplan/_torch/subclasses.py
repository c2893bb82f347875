"""Subclasses of `torch.Tensor`: converted to plain tensors and back, also for fake tensors.

Seen in torch 2.11 and 2.13: a fake tensor refuses `as_subclass`, as its Python object exists already; its class can be
set instead. ``torch._C.DisableTorchFunctionSubclass``; ``torch.Tensor._make_subclass``.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from memplan._torch.patches import patched

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor})
_KIND = "_memplan_kind"
_OWN = frozenset(("fake_mode", "fake_device", "constant", "real_tensor", "nonzero_memo", "item_memo", "unique_memo"))


@functools.cache
def wraps_tensors(kind: type) -> bool:
    """Return whether a class is a wrapper subclass, whose tensors contain others and dispatch ops themselves:
    `DTensor`, quantized tensors."""
    return is_traceable_wrapper_subclass_type(kind)


def kind_of(tensor: torch.Tensor) -> type | None:
    """Return the subclass of a tensor, if it does not define `__torch_dispatch__`; None for other tensors."""
    kind = type(tensor)
    if kind in _PLAIN:
        return None
    if issubclass(kind, FakeTensor):
        return getattr(kind, _KIND, None)
    default: Any = torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
    own_dispatch = getattr(kind, "__torch_dispatch__", None) is not default
    return None if own_dispatch or isinstance(tensor, nn.Parameter) else kind


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor that shares memory with a tensor of a subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(tensor, FakeTensor):
            return torch.ops.aten.alias.default(tensor)
        return tensor.as_subclass(torch.Tensor)


def as_subclass(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    """Return a tensor as an instance of a subclass, like `torch.Tensor.as_subclass`, but for fake tensors too."""
    if not isinstance(tensor, FakeTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(kind)
    return _of_kind(plain(tensor), kind)


def _of_kind(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    """Set the class of a fake tensor, and return it."""
    if kind is not torch.Tensor and kind is not FakeTensor:
        tensor.__class__ = kind if issubclass(kind, FakeTensor) else _fake(kind)
    return tensor


def with_attributes(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy the Python attributes of tensor ``like`` to ``tensor``, and return ``tensor``."""
    for name, value in vars(like).items():
        if name not in _OWN:
            setattr(tensor, name, value)
    return tensor


def computes_by_itself(kind: type) -> bool:
    """Return whether a subclass overrides `__torch_function__`, so that its results can be anything."""
    own: Any = kind.__torch_function__  # pyright: ignore[reportAttributeAccessIssue]  # of a tensor's class
    return getattr(own, "__func__", own) is not torch.Tensor.__torch_function__.__func__  # pyright: ignore[reportFunctionMemberAccess]


class _FakeOfSubclass(FakeTensor):
    """Has the default `__torch_function__` of subclasses, which `FakeTensor` itself disables."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # pyright: ignore[reportFunctionMemberAccess]


@contextlib.contextmanager
def subclasses_hidden(types: Any, *arguments: Any) -> Iterator[None]:
    """Set the class of an op's fake arguments of a user's subclass to `FakeTensor` while the op runs: fake kernels are
    Python code, and would call methods that the subclass overrides.

    Args:
        types: the classes of the tensors, as passed to `__torch_dispatch__`.
        arguments: the op's arguments.
    """
    if not any(issubclass(kind, _FakeOfSubclass) for kind in types):
        yield
        return
    subclassed = [(tensor, type(tensor)) for tensor in tree_leaves(arguments) if isinstance(tensor, _FakeOfSubclass)]
    try:
        for tensor, _ in subclassed:
            tensor.__class__ = FakeTensor  # pyright: ignore[reportAttributeAccessIssue]  # of the same layout
        yield
    finally:
        for tensor, kind in subclassed:
            tensor.__class__ = kind


@functools.lru_cache(256)
def _fake(kind: type) -> type:
    """Return a class of fake tensors with the methods of subclass ``kind``. `kind_of` returns ``kind`` for its
    instances."""
    content = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, _KIND: kind}
    return types.new_class(kind.__name__, (kind, _FakeOfSubclass), {}, lambda space: space.update(content))


@contextlib.contextmanager
def fakes_as_subclasses() -> Iterator[None]:
    """Make `Tensor.as_subclass` and the constructors of subclasses, those of parameters too, accept fake tensors."""
    make: Callable[..., Any] = torch.Tensor._make_subclass
    make_parameter: Callable[..., Any] = nn.Parameter.__new__

    def make_subclass(cls: Any, data: torch.Tensor, require_grad: bool = False, **kwargs: Any) -> Any:
        """Replace `torch.Tensor._make_subclass`, which accepts no fake tensors."""
        if not isinstance(data, FakeTensor):
            return make(cls, data, require_grad, **kwargs)
        # detached, since a view would keep its base's memory
        tensor = _of_kind(data.detach(), cls).requires_grad_(require_grad)
        if issubclass(cls, nn.Parameter):
            tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]  # as torch marks other classes
        return tensor

    def make_subclass_of_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        """Replace `nn.Parameter.__new__`: a fake parameter becomes an instance of its subclass."""
        parameter = make_parameter(cls, data, requires_grad)
        is_plain = cls is nn.Parameter or not isinstance(parameter, FakeTensor)
        return parameter if is_plain else make_subclass(cls, parameter, requires_grad)

    with (
        patched(FakeTensor, as_subclass=as_subclass),
        patched(torch.Tensor, _make_subclass=staticmethod(make_subclass)),
        patched(nn.Parameter, __new__=staticmethod(make_subclass_of_parameter)),
    ):
        yield


class OpNames(TorchDispatchMode):
    """Records the names of the ops that run, with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        """(name of the op, shape of its result; None if that is no tensor)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with subclasses_hidden(types, args, kwargs):
            result = func(*args, **(kwargs or {}))
        if func not in _SILENT:
            self.seen.append((str(func), tuple(result.shape) if isinstance(result, torch.Tensor) else None))
        return result


_SILENT = frozenset({torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.prim.device.default})


def fake_like(tensors: Any) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    """Return (fake mode, the tensors as fake tensors of it). The mode is that of tensors that are fake already, else a
    new mode."""
    mode = next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    return mode, [tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor) for tensor in tensors]
