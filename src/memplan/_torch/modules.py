"""Copy and restore a module's own state and hooks; fake parameters of lazy layers for a recording.

Seen in torch 2.11, 2.13 and 2.15: ``nn.Module._parameters``, ``._buffers`` and ``._modules`` in the module's own
``__dict__``, as plain dicts. Seen in torch 2.11 and 2.13: `UninitializedTensorMixin` of ``torch/nn/parameter.py``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from memplan._torch.eager import no_modes
from memplan._torch.patches import patched

_TENSORS = ("_parameters", "_buffers")
_FIXED = (*_TENSORS, "_modules")


class NoFakeTensor:
    """Replaces `torch._subclasses.FakeTensor` for the user's code while it is recorded.

    Libraries check for that class to take another path when they are traced (transformers builds masks that a real run
    skips); the recording needs the path of a real run. No tensor is an instance of this class.
    """


@dataclass(frozen=True, slots=True)
class OwnState:
    """Contents of one module: parameters and buffers by name, and every other attribute, submodules aside."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]
    hooks: dict[str, dict[int, Any]]
    """Hooks by table. The tables stay where they are: handles that remove hooks refer to them."""


def pre_hooks(module: nn.Module) -> list[Any]:
    """Return a module's own forward pre-hooks. Seen in torch 2.11 and 2.13: ``_forward_pre_hooks``."""
    return list(module._forward_pre_hooks.values())


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Seen in torch 2.11, 2.13 and 2.15, each a dict by the number of a hook; ``_is_full_backward_hook`` is a flag."""


def count_hooks(module: nn.Module) -> int:
    """Return the number of hooks registered on a module that run around its forward or backward pass."""
    return sum(len(getattr(module, name)) for name in _HOOKS if not name.endswith(("_with_kwargs", "_always_called")))


def copy_hooks(old: nn.Module, new: nn.Module) -> None:
    """Register a module's forward and backward hooks on another module that replaces it."""
    for name in _HOOKS:
        getattr(new, name).update(getattr(old, name))
    new._is_full_backward_hook = old._is_full_backward_hook


def own_state(module: nn.Module) -> OwnState:
    """Copy a module's parameters, buffers, attributes and hooks, to restore them by `set_own_state`."""
    own = vars(module)
    attributes = {name: value for name, value in own.items() if name not in _FIXED}
    hooks = {name: dict(own[name]) for name in _HOOKS}
    return OwnState(dict(own["_parameters"]), dict(own["_buffers"]), attributes, hooks)


def set_own_state(module: nn.Module, state: OwnState) -> None:
    """Restore the contents of a module. Dicts are changed in place, and existing names keep their order."""
    own = vars(module)
    for name, new in zip(_TENSORS, (state.parameters, state.buffers), strict=True):
        _update_dict(own[name], new)
    _update_dict(own, state.attributes, _FIXED)
    for name, hooks in state.hooks.items():
        if dict(own[name]) != hooks:
            own[name].clear()
            own[name].update(hooks)


def _update_dict(old: dict[str, Any], new: dict[str, Any], fixed: tuple[str, ...] = ()) -> None:
    """Give dict ``old`` the items of ``new``, except that names in ``fixed`` are never removed."""
    old.update(new)
    for name in old.keys() - new.keys() - set(fixed):
        del old[name]


def has_shape(tensor: Any) -> bool:
    """Return whether a tensor has a shape; a lazy layer's parameter has none before the first call."""
    return not is_lazy(tensor)


class _Fake:
    """Base of fake parameters and buffers of lazy layers, which have no shape until `materialize`."""

    requested_device: Any = None
    """Device that the layer was constructed on or moved to, if any."""
    kind: Any = None
    """Requested dtype, if any."""

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """Become a fake tensor of this shape, as `UninitializedTensorMixin.materialize` does with real ones."""
        is_parameter = isinstance(self, UninitializedParameter)
        self.data = torch.empty(shape, device=device or self.requested_device, dtype=dtype or self.kind)
        self.__class__ = FakeTensor
        if is_parameter:
            self._is_param = True

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Note device and dtype for `materialize`."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                self.kind = value
            elif isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
                self.requested_device = value
        return self

    def cuda(self: Any, device: Any = None, **kwargs: Any) -> Any:
        return self.to("cuda" if device is None else device)

    def cpu(self: Any, **kwargs: Any) -> Any:
        return self.to("cpu")

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return a new parameter of the same kind: there is no data to copy."""
        copy = memo[id(self)] = type(self)(self.requires_grad, self.requested_device, self.kind)
        return copy


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a method that converts a parameter to a dtype, such as `half`."""
    return lambda self: self.to(dtype)


for _name in ("half", "float", "double", "bfloat16"):
    setattr(_Fake, _name, _to(getattr(torch, _name)))


_FakeParameter: Any = type("_FakeParameter", (_Fake, UninitializedParameter, FakeTensor), {})
_FakeBuffer: Any = type("_FakeBuffer", (_Fake, UninitializedBuffer, FakeTensor), {})
"""Classes of fake parameters and buffers of lazy layers (buffers: the running statistics of a lazy batch norm)."""


def _copy_lazy(self: Any, memo: dict[int, Any]) -> Any:
    """Copy a lazy layer's real parameter. torch reads its `.data`, which fake tensors of torch 2.11 refuse."""
    if id(self) not in memo:
        memo[id(self)] = type(self)(self.requires_grad, self.device, self.dtype)
    return memo[id(self)]


@contextlib.contextmanager
def lazy_layers_with_fake_parameters(
    mode: FakeTensorMode, inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> Iterator[None]:
    """Construct lazy layers in this thread with fake parameters and buffers: torch's `UninitializedParameter` cannot be
    fake.

    ``mode``: of the fake tensors. ``inside``: returns a context in which ``tensor.device`` is the real device.
    """

    here = threading.get_ident()

    def fake_constructor(kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``__new__`` that constructs a tensor of the fake class ``kind`` in this thread."""

        def new(
            cls: Any, requires_grad: bool = kind is _FakeParameter, device: Any = None, dtype: Any = None, **kwargs: Any
        ) -> Any:
            if threading.get_ident() != here:
                return original(cls, requires_grad, device=device, dtype=dtype, **kwargs)
            dtype = dtype or torch.get_default_dtype()
            with no_modes(), inside():
                empty = torch.empty(0, device="meta", dtype=dtype)
                tensor: Any = FakeTensor.__new__(kind, mode, empty, torch.device("cpu"))
            tensor.requires_grad, tensor.requested_device, tensor.kind = requires_grad, device, dtype
            if kind is _FakeBuffer:
                tensor.persistent, tensor._is_buffer = kwargs.get("persistent", True), True
            return tensor

        return new

    new_parameter = fake_constructor(_FakeParameter, UninitializedParameter.__new__)
    new_buffer = fake_constructor(_FakeBuffer, UninitializedBuffer.__new__)
    with (
        patched(UninitializedParameter, __new__=new_parameter, __deepcopy__=_copy_lazy),
        patched(UninitializedBuffer, __new__=new_buffer),
    ):
        yield


@contextlib.contextmanager
def modules_converted_as_real() -> Iterator[None]:
    """Make `Module.to`, `half` and the like set ``.data`` of fake parameters, as of real parameters.

    For a fake parameter torch swaps tensors instead, which fails where there are weak references to them, such as ours.
    Setting ``.data`` of a fake tensor also replaces its known values: torch would keep the values of the old dtype.
    """
    apply, dispatch = nn.Module._apply, FakeTensorMode.dispatch
    plain: Any = torch.Tensor.data

    def set_data(self: Any, data: torch.Tensor) -> None:
        """Replace the setter of ``FakeTensor.data``: known values are replaced, too."""
        plain.__set__(self, data)
        self.constant = getattr(data, "constant", None)

    def apply_as_real(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Replace `Module._apply`: within it no parameter counts as fake."""
        before, fake_tensor.FakeTensor = fake_tensor.FakeTensor, NoFakeTensor
        try:
            return apply(self, *args, **kwargs)
        finally:
            fake_tensor.FakeTensor = before

    def dispatch_fake(self: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        """Run an op with the real `FakeTensor` class, also under torch's own fake modes, as in `DTensor`'s shape
        propagation."""
        if fake_tensor.FakeTensor is FakeTensor:
            return dispatch(self, *args, **kwargs)
        with patched(fake_tensor, FakeTensor=FakeTensor):
            return dispatch(self, *args, **kwargs)

    data = property(lambda self: plain.__get__(self, type(self)), set_data)
    with (
        patched(nn.Module, _apply=apply_as_real),
        patched(FakeTensor, data=data),
        patched(FakeTensorMode, dispatch=dispatch_fake),
    ):
        yield


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)
