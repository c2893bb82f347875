"""torch's dispatcher: Python kernels registered within a context, calls at a chosen dispatch key, thread-local keys.

Everything here was seen in torch 2.11, 2.13 and 2.15; ``init_gpu_context`` of ``torch._subclasses.fake_tensor`` in
2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from memplan._patched import patched
from memplan._torch.eager import no_modes

Kernel = Callable[..., Any]
Dtypes = tuple[torch.dtype | None, ...]

AUTOGRAD_CPU = "AutogradCPU"
ATTENTION_ORDER = [1, 2, 0, 3, 4]
"""torch's order at the start: flash, memory-efficient, math, cuDNN, a backend's own."""
_FORMULA = DispatchKey.Autograd
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


@contextlib.contextmanager
def overridden(kernels: Mapping[str, Kernel], key: str) -> Iterator[None]:
    """Register Python kernels for ops at a dispatch key within this context; calls from C++ reach them, too.

    Args:
        kernels: name of an op with its overload ("dropout", "softmax.int"; "torchvision::nms" for one of another
            library) -> kernel. Arguments that equal their defaults are not passed to it.
        key: name of the key; ``AUTOGRAD_CPU`` for all that runs on the CPU outside of inference mode.
    """
    libraries = dict[str, torch.library.Library]()
    try:
        for name, kernel in kernels.items():
            space, _, op_name = name.rpartition("::")
            if space not in libraries:
                libraries[space] = torch.library.Library(space or "aten", "IMPL")
            libraries[space].impl(op_name, kernel, key)
        yield
    finally:
        for library in libraries.values():
            library._destroy()


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op by its decomposition into other ops, ignoring kernels registered for it."""
    return op._op_dk(_COMPOSITE, *args, **kwargs)


def whole(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op by its autograd kernel, as a single op with a derivative formula, also where the CPU decomposes it."""
    return op._op_dk(_FORMULA, *args, **kwargs)


@contextlib.contextmanager
def attention_order(order: tuple[int, ...]) -> Iterator[None]:
    """Set the order in which `scaled_dot_product_attention` tries its kernels, unless the user has set an order.

    ``order``: values of `torch.nn.attention.SDPBackend`; the others follow.
    """
    before = torch._C._get_sdp_priority_order()
    if before == ATTENTION_ORDER:
        torch._C._set_sdp_priority_order([*order, *(n for n in before if n not in order)])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def tried_in_order() -> list[int]:
    """Return the values of `torch.nn.attention.SDPBackend` in the order in which attention tries them."""
    return torch._C._get_sdp_priority_order()


_UNUSED: Any = getattr(DispatchKey, "AutocastPrivateUse1")  # noqa: B009  # torch's stub leaves it out
_UNUSED_SET = torch._C.DispatchKeySet(_UNUSED)


@contextlib.contextmanager
def autocast_like_cuda(kernels: Mapping[str, Kernel]) -> Iterator[Callable[[bool], None]]:
    """Register Python kernels for autocast as on CUDA, at a dispatch key that torch itself does not use.

    Yields a function that enables or disables the kernels for the running thread. At the end they are unregistered.
    """
    everything_else = torch.library.Library("_", "IMPL", _UNUSED.name)
    try:
        everything_else.fallback(torch.library.fallthrough_kernel)
        with overridden(kernels, _UNUSED.name):
            try:
                yield _autocast_on
            finally:
                _autocast_on(on=False)
    finally:
        everything_else._destroy()


def _autocast_on(on: bool) -> None:
    """Enable or disable the kernels of `autocast_like_cuda` for the running thread."""
    torch._C._dispatch_tls_set_dispatch_key_included(_UNUSED, on)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_UNUSED, not on)


def below_autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ops skip the kernels of `autocast_like_cuda`."""
    return torch._C._ExcludeDispatchKeyGuard(_UNUSED_SET)


@contextlib.contextmanager
def above_autocast() -> Iterator[None]:
    """Apply the kernels of `autocast_like_cuda`, where enabled, inside a dispatch mode as well: there torch skips all
    autocast."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(_UNUSED)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_UNUSED, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_UNUSED, before)


def autocast_ops() -> list[str]:
    """Return the names of the ops ("aten::softmax.int") for which this build of torch has a kernel for autocast on
    CUDA."""
    return torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")


def op_of(name: str) -> Any:
    """Return the op with this name ("aten::softmax.int", "torchvision::nms"); None where no library defines it (kernels
    can be registered before the op is)."""
    space, _, own = name.partition("::")
    base, _, overload = own.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base, None), overload or "default", None)


class OpsHandled(TorchDispatchMode):
    """A mode in which every op goes through a function, which runs the op and returns the result."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """``handle(op, args, kwargs)``."""
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})


class _CastProbe(TorchDispatchMode):
    """Records the dtypes of an op's arguments and results when autocast's kernel calls the op.

    The op runs on fake CPU tensors, since fake implementations return CPU tensors while a step is recorded; results
    are returned as tensors on a card.
    """

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.arguments, self.results = op, list[Dtypes](), list[Dtypes]()
        """The op, and the dtypes of its arguments and of its results in each call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the dtypes of the op's arguments and results, and run it on CPU tensors."""
        if func is not self.op:  # a cast by autocast's kernel
            return func(*args, **(kwargs or {}))
        positional, named = _without_data((args, kwargs or {}), "cpu")
        result = func(*positional, **named)
        self.arguments.append(_dtypes((positional, named)))
        self.results.append(_dtypes(result))
        return _without_data(result, "cuda:0")


def _without_data(values: Any, device: str) -> Any:
    """Return values with each tensor replaced by an empty one on ``device`` (a fake one under a fake mode)."""
    empty = torch.ops.aten.empty_strided.default  # torch.empty_strided is patched while a step is recorded

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return empty(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=torch.device(device))

    return tree_map(like, values)


def _dtypes(values: Any) -> Dtypes:
    return tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(values))


def cast_on_cuda(op: Any, args: Any, kwargs: Any) -> tuple[Dtypes, Dtypes, Dtypes]:
    """Run an op's kernel for autocast on CUDA on fake tensors, to see what it casts.

    Returns:
        Three tuples of dtypes (None for leaves that are no tensors): of the leaves of ``(args, kwargs)`` that the op
        gets, of the leaves of the op's result, and of the leaves of the result that autocast's kernel returns.

    Raises:
        Exception: any that the kernel raises; RuntimeError if the kernel does not call the op exactly once.
    """
    probe = _CastProbe(op)
    lengths = ShapeEnv()  # of results whose length depends on values, as torchvision::nms has
    # torch 2.11 initializes the card of the first fake tensor on one, where `torch.cuda.is_available()` says yes
    uninitialized = patched(fake_tensor, init_gpu_context=lambda device: None)
    with no_modes(), torch.no_grad(), uninitialized, FakeTensorMode(shape_env=lengths), probe:
        positional, named = _without_data((args, kwargs), "cuda:0")
        result = with_cuda_autocast(op, *positional, **named)
    if len(probe.arguments) != 1:
        raise RuntimeError(f"{op} was called {len(probe.arguments)} times")
    return probe.arguments[0], probe.results[0], _dtypes(result)


def with_cuda_autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op by torch's own kernel for autocast on CUDA."""
    return op._op_dk(DispatchKey.AutocastCUDA, *args, **kwargs)


def has_cpu_kernel(name: str) -> bool:
    """Return whether an op ("torchao::da8w4_linear_cpu") exists and has a kernel for the CPU."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, DispatchKey.CPU)
    except RuntimeError:  # no such op
        return False
