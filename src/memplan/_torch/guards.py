"""Ask cheaply whether anything has changed that a captured step depends on.

Seen in torch 2.11 and 2.13: ``torch._C._dynamo.guards.dict_version`` (a number that every change of a dict changes; on
Python 3.12 and newer torch watches the dict for it) and ``TensorGuards`` (types, dtypes, devices, sizes, strides and
``requires_grad`` of many tensors at once, under the present autocast), the tables of global module hooks in
``torch.nn.modules.module``, ``torch.overrides._get_current_function_mode_stack``,
``torch.utils._python_dispatch._get_current_dispatch_mode_stack``, ``torch.utils._device.DeviceContext``,
``torch._C._autograd._top_saved_tensors_default_hooks``, the getters in ``torch._C`` of the flags below, and
``torch._subclasses.functional_tensor.FunctionalTensorMode``, by whose dispatch an op that AOTAutograd traces enters
Python.

Seen in torch 2.13: ``RootGuardManager.tuple_getitem_manager`` and ``.add_dict_version_guard``, by which `torch.compile`
has guards as a tree that one call checks. Where these are others, Python asks for one version after the other.
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

from memplan._torch.patches import here_alone, patched

dict_version: Callable[[dict[Any, Any]], int] = _guards.dict_version
"""Number that every change of a dict changes."""


class _Probe:
    pass


def _is_seen() -> bool:
    probe: Any = _Probe()
    probe.a = 0
    own, seen = vars(probe), set[int]()
    for _ in range(32):  # more often than Python waits before it specializes the line
        probe.a = object()
        seen.add(dict_version(own))
    return len(seen) == 32


VERSIONS_SEE_ATTRIBUTES = _is_seen()
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
    """Return torch's global flags on which it depends what is traced, and the default device."""
    return (*[flag() for flag in _FLAGS], default_device())


def default_device() -> str | None:
    """Return the device on which tensors are made by default, where one was set."""
    if not torch._C._len_torch_function_stack():
        return None
    contexts = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return str(contexts[-1]) if contexts else None


def surroundings() -> str | None:
    """Return what a planned call would not go through, in words: hooks and modes that see each layer or op as it runs.
    None where there is nothing of that kind. Of torch's own, dispatch modes and hooks on saved tensors do not count:
    they observe, or keep what is saved elsewhere; nor do memplan's."""
    if any(_GLOBAL_HOOKS):
        for hook in (hook for table in _GLOBAL_HOOKS for hook in table.values()):
            if not _is_of(hook, "memplan."):
                return f"a hook for all modules is registered, {_called(hook)}"
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
        return f"hooks on saved tensors are active, {_called(hooks[0])}"
    return None


def _is_ours(mode: Any) -> bool:
    return any(kind.__module__.startswith("memplan.") for kind in type(mode).__mro__)


def _is_of(hook: Any, *packages: str) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(packages)


def _called(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


class TensorGuards:
    """Sees whether tensors still have the type, dtype, device, sizes, strides and ``requires_grad`` that they had.

    Which tensors they are is not compared. Where autocast or a mode is another one than when it was made, the answer is
    no. Tensors are not kept alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check: Callable[..., bool] | None = None
        if tensors:
            sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
            make: Any = _guards.TensorGuards  # its stub has the wrong type for the sizes
            self._check = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether as many tensors are as those were."""
        return self._check is None or self._check(*tensors)


_WORTH = 256
"""Number of answers by Python before a tree of guards is built: that takes as long as the tree saves in as many (9 us
for a dict, then 9 ns instead of 43 ns in each answer), so that dicts which change now and then cost less than twice."""


class DictGuards:
    """Sees whether dicts have changed since it was made, or since they were last accepted."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self.dicts = tuple(dicts)
        self.accept(self.now())

    def now(self) -> list[int]:
        """Return their present versions."""
        return list(map(dict_version, self.dicts))

    def accept(self, versions: list[int]) -> None:
        """Take these versions as unchanged."""
        self.versions, self._held = versions, 0
        self._check: Callable[[tuple[Any, ...]], bool] | None = None

    def hold(self) -> bool:
        """Return whether all are as they were."""
        check = self._check
        if check is not None:
            return check(self.dicts)
        if self.now() != self.versions:
            return False
        self._held += 1
        if self._held == _WORTH:
            check = _tree(self.dicts)
            self._check = check if self.now() == self.versions else None  # another thread may have changed them
        return True


def _tree(dicts: tuple[dict[Any, Any], ...]) -> Callable[[tuple[Any, ...]], bool] | None:
    """Return what sees in one call whether dicts have the versions that they have now; None where this torch has other
    guards."""
    try:
        from torch._dynamo.guards import GuardManagerType  # takes a second, where no model was planned yet

        root: Any = _guards.RootGuardManager()
        for at, own in enumerate(dicts):
            item = root.tuple_getitem_manager(at, "", None, GuardManagerType.GUARD_MANAGER)
            item.add_dict_version_guard(own, [""], None)
    except (AttributeError, ImportError, TypeError):
        return None
    return root.check


@contextmanager
def around_dispatch(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call these around what torch does in Python for each op that this thread traces."""
    dispatch: Callable[..., Any] = FunctionalTensorMode.__torch_dispatch__

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return dispatch(*args, **kwargs)
        finally:
            after()

    with patched(FunctionalTensorMode, __torch_dispatch__=here_alone(dispatched, dispatch)):
        yield
