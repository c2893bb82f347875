"""Cheap guards: whether flags, modes, hooks, tensors' metadata or dicts that a captured step depends on have changed.

Seen in torch 2.11 and 2.13: ``torch._C._dynamo.guards.dict_version`` (a number that every change of a dict changes; on
Python 3.12 and newer torch watches the dict for it) and ``TensorGuards`` (types, dtypes, devices, sizes, strides and
``requires_grad`` of many tensors at once, under the present autocast), the tables of global module hooks in
``torch.nn.modules.module``, ``torch.overrides._get_current_function_mode_stack``,
``torch.utils._python_dispatch._get_current_dispatch_mode_stack``, ``torch.utils._device.DeviceContext``,
``torch._C._autograd._top_saved_tensors_default_hooks``, the getters in ``torch._C`` of the flags below, and
``torch._subclasses.functional_tensor.FunctionalTensorMode``, by whose dispatch an op that AOTAutograd traces enters
Python.

Seen in torch 2.13: ``RootGuardManager.tuple_getitem_manager`` and ``.add_dict_version_guard``, by which `torch.compile`
checks a tree of guards in one call. In other versions Python compares the versions of the dicts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo import guards as _guards  # pyright: ignore[reportAttributeAccessIssue]  # no stub
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan._torch.patches import only_in_this_thread, patched

dict_version: Callable[[dict[Any, Any]], int] = _guards.dict_version
"""Number that every change of a dict changes."""


class _Probe:
    pass


def _versions_see_attributes() -> bool:
    """Try whether each of 32 assignments of an attribute gives the object's ``__dict__`` a new version."""
    probe: Any = _Probe()
    probe.a = 0
    own, seen = vars(probe), set[int]()
    for _ in range(32):  # more often than Python waits before it specializes the line
        probe.a = object()
        seen.add(dict_version(own))
    return len(seen) == 32


VERSIONS_SEE_ATTRIBUTES = _versions_see_attributes()
"""Whether setting an attribute changes the version of the object's ``__dict__``: not in Python 3.13, where it is
written beside the dict."""

_GLOBAL_HOOKS = tuple(
    getattr(_module, f"_global{name}")
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
)
_FLAGS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.is_inference_mode_enabled,
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_deterministic_fill_uninitialized_memory,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_mkldnn_enabled,
    torch._C._get_float32_matmul_precision,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)


def flags() -> tuple[Any, ...]:
    """Return the global flags of torch that can change a traced graph, and the default device."""
    return (*[flag() for flag in _FLAGS], default_device())


def default_device() -> str | None:
    """Return the default device for new tensors, or None if none was set."""
    if not torch._C._len_torch_function_stack():
        return None
    contexts = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return str(contexts[-1]) if contexts else None


def surroundings() -> str | None:
    """Describe an active hook or mode that sees each layer or op of an unplanned call, and that a planned call would
    bypass; None if there is none.

    memplan's own hooks and modes do not count, nor torch's dispatch modes and hooks on saved tensors: these observe, or
    store saved tensors elsewhere.
    """
    if any(_GLOBAL_HOOKS):
        for hook in (hook for table in _GLOBAL_HOOKS for hook in table.values()):
            if not _is_of(hook, "memplan."):
                return f"a hook for all modules is registered, {_function_name(hook)}"
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():  # memplan's own runs switch the latter off
        return "anomaly detection is on"
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext) and not _is_ours(mode):
                return f"the TorchFunctionMode {type(mode).__name__} is active"
    if torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if not _is_ours(mode) and not type(mode).__module__.startswith("torch."):
                return f"the TorchDispatchMode {type(mode).__name__} is active"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    if hooks is not None and not _is_of(hooks[0], "memplan.", "torch."):
        return f"hooks on saved tensors are active, {_function_name(hooks[0])}"
    return None


def _is_ours(mode: Any) -> bool:
    """Return whether a mode is an instance of a class of memplan, or of a subclass of it."""
    return any(kind.__module__.startswith("memplan.") for kind in type(mode).__mro__)


def _is_of(hook: Any, *packages: str) -> bool:
    """Return whether a hook is defined in one of these packages, each with a dot at the end: "torch."."""
    return str(getattr(hook, "__module__", "")).startswith(packages)


def _function_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


class TensorGuards:
    """Checks whether tensors have the types, dtypes, devices, sizes, strides and ``requires_grad`` of earlier ones.

    Identity is not compared. Under another autocast or mode than at construction, the check fails. Tensors are not kept
    alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check: Callable[..., bool] | None = None
        if tensors:
            sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
            make: Any = _guards.TensorGuards  # its stub has the wrong type for the sizes
            self._check = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether each of these tensors has the properties of the tensor at the same position in the
        constructor."""
        return self._check is None or self._check(*tensors)


_CHECKS_BEFORE_TREE = 256
"""Successful checks in Python before a tree of guards is built. Building takes 9 us a dict, and saves 34 of 43 ns in
each check: as much in this number of checks, so that dicts which change now and then cost at most twice the time."""


class DictGuards:
    """Checks whether dicts have changed since construction, or since their last accepted versions."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self.dicts = tuple(dicts)
        self.accept(self.now())

    def now(self) -> list[int]:
        """Return the present versions of the dicts."""
        return list(map(dict_version, self.dicts))

    def accept(self, versions: list[int]) -> None:
        """Compare with these versions from now on."""
        self.versions, self._held = versions, 0
        self._check: Callable[[tuple[Any, ...]], bool] | None = None

    def hold(self) -> bool:
        """Return whether no dict has changed. After `_CHECKS_BEFORE_TREE` successes the check runs in C++."""
        check = self._check
        if check is not None:
            return check(self.dicts)
        if self.now() != self.versions:
            return False
        self._held += 1
        if self._held == _CHECKS_BEFORE_TREE:
            check = _guard_tree(self.dicts)
            self._check = check if self.now() == self.versions else None  # another thread may have changed them
        return True


def _guard_tree(dicts: tuple[dict[Any, Any], ...]) -> Callable[[tuple[Any, ...]], bool] | None:
    """Return a C++ function that checks in one call whether dicts have the versions that they have now; None if this
    torch has no such guards."""
    try:
        from torch._dynamo.guards import GuardManagerType  # takes a second if Dynamo was not imported before

        root: Any = _guards.RootGuardManager()
        for at, own in enumerate(dicts):
            item = root.tuple_getitem_manager(at, "", None, GuardManagerType.GUARD_MANAGER)
            item.add_dict_version_guard(own, [""], None)
    except (AttributeError, ImportError, TypeError):
        return None
    return root.check


@contextmanager
def around_dispatch(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call ``before()`` and ``after()`` around the dispatch of each op that AOTAutograd traces in this thread."""
    dispatch: Callable[..., Any] = FunctionalTensorMode.__torch_dispatch__

    def dispatch_between(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return dispatch(*args, **kwargs)
        finally:
            after()

    with patched(FunctionalTensorMode, __torch_dispatch__=only_in_this_thread(dispatch_between, dispatch)):
        yield
