"""Access to autograd's engine and to modules that a planned step needs.

Seen in torch 2.11, 2.13 and 2.15: ``torch._C._DisableAutocast``, ``torch._C._will_engine_execute_node``,
``torch._C._autograd._get_current_graph_task_keep_graph``, ``torch._C._functorch.peek_interpreter_stack``,
``Tensor._version``, ``Tensor._post_accumulate_grad_hooks``, ``torch._C._current_graph_task_id``, and of ``nn.Module``
``_compiled_call_impl`` (what ``__call__`` calls instead of ``_call_impl``, and what copies and pickles leave out),
``_call_impl``, ``_modules``, ``_parameters``, ``_buffers`` and the hooks. What else `nn.Module` sets is looked up.
Seen in 2.13: ``torch.autograd._engine_run_backward``, which `backward` and `grad` call.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from memplan._torch.patches import only_in_this_thread, patched

GraphFlag = Literal["", "retain_graph", "create_graph"]
"""The flag by which a backward pass keeps its graph; "" where it frees it."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_ABOUT_HOOKS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_is_full_backward_hook",
)
"""Attributes about the hooks: the first three are dicts by the hooks' ids."""
_CALL = "_compiled_call_impl"
BOOKKEEPING = frozenset({*vars(nn.Module()), _CALL})
"""Names in a module's ``__dict__`` that torch itself sets."""


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context in which autocast casts nothing."""
    return torch._C._DisableAutocast()


def keeps_graph() -> bool:
    """Return whether the running backward pass keeps the graph (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def backward_watched(begins: Callable[[GraphFlag], Callable[[], None]]) -> Iterator[None]:
    """Call ``begins(flag)`` before each backward pass of this thread, and the function that it returns afterwards."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]

    def run_watched(outputs: Any, gradients: Any, keep: bool, create: bool, *args: Any, **kwargs: Any) -> Any:
        """Replace the function that `backward` and `grad` call to run the engine."""
        ends = begins("create_graph" if create else "retain_graph" if keep else "")
        try:
            return run(outputs, gradients, keep, create, *args, **kwargs)
        finally:
            ends()

    with patched(torch.autograd, _engine_run_backward=only_in_this_thread(run_watched, run)):
        yield


def will_run(node: Any) -> bool:
    """Return whether a node of the autograd graph is still to run in the present backward pass."""
    return torch._C._will_engine_execute_node(node)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor's memory was changed in place."""
    return tensor._version


gradient_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""Hooks that run once a parameter's gradient was added to ``.grad``; None or empty where there are none."""


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks run once the parameter's gradient was added to ``.grad``."""
    return bool(parameter._post_accumulate_grad_hooks)  # pyright: ignore[reportAttributeAccessIssue]  # no stub


def backward_pass() -> int:
    """Return a number that identifies the running backward pass; -1 outside of any."""
    return torch._C._current_graph_task_id()


def is_transformed() -> bool:
    """Return whether a transform of torch.func (vmap, grad) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


# -- modules


def submodule(module: nn.Module, name: str) -> nn.Module:
    """Return the direct submodule of a module with this name."""
    child = module._modules[name]
    assert child is not None
    return child


def own_tensor(module: nn.Module, name: str, kind: str) -> torch.Tensor:
    """Return the direct parameter or buffer (``kind``) of a module with this name."""
    tensor = (module._parameters if kind == "parameter" else module._buffers)[name]
    assert tensor is not None
    return tensor


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's direct submodules itself, not a copy."""
    return module._modules


def own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of a module's direct parameters and buffers themselves, not copies."""
    return module._parameters, module._buffers


def own_tensor_tables(own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of parameters and buffers in ``own``, a module's ``__dict__``."""
    return own["_parameters"], own["_buffers"]


_DICTS, _TABLES = operator.itemgetter("_parameters", "_buffers", "_modules"), operator.itemgetter(*_HOOKS)


def own_dicts(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the dicts of a module's attributes, parameters, buffers and submodules themselves, not copies."""
    return vars(module), *_DICTS(vars(module))


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dicts of the hooks registered on a module themselves, not copies."""
    return _TABLES(vars(module))


def own_hooks(module: nn.Module) -> tuple[int, ...]:
    """Return the ids of the hooks registered on a module."""
    return tuple([key for name in _HOOKS for key in getattr(module, name)])


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks registered on a module."""
    return [hook for name in _HOOKS for hook in getattr(module, name).values()]


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks registered on a module."""
    for name in (*_HOOKS, *_ABOUT_HOOKS[:3]):
        getattr(module, name).clear()


# -- calls


@contextmanager
def without_call(module: nn.Module) -> Iterator[None]:
    """Remove the call that `set_call` installed within this context, so that copies of the module's attributes lack
    it."""
    own = vars(module)
    call = own.pop(_CALL, None)
    try:
        yield
    finally:
        if call is not None:
            own[_CALL] = call


def set_call(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Make ``module(...)`` run ``call``. Returns a function that restores the former call, unless another was set
    since."""
    own = module.__dict__
    before = own.get(_CALL)
    was_set = _CALL in own

    def restore() -> None:
        if own.get(_CALL) is not call:
            return
        if was_set:
            own[_CALL] = before
        else:
            del own[_CALL]

    own[_CALL] = call
    return restore


def call_of_module(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that ``module(...)`` runs since `set_call` or `Module.compile`, or None."""
    return getattr(module, _CALL)


def original_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call as torch defines it: hooks and ``forward()``, whatever `set_call` installed."""
    return module._call_impl


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks: its own, or hooks on all modules."""
    return any(getattr(module, name) for name in _HOOKS) or any(
        getattr(nn.modules.module, f"_global{name}") for name in _HOOKS
    )


def call_with_hooks(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``forward`` instead of ``module.forward``, with the module's hooks around it.

    The hooks are copied to another module with that ``forward``, and still get the original module as an argument.
    """
    twin = _Twin(forward, module)
    own = twin.__dict__
    for name in _HOOKS:
        own[name] = OrderedDict((key, _bound_hook(hook, module)) for key, hook in getattr(module, name).items())
    for name in _ABOUT_HOOKS:
        own[name] = getattr(module, name)
    return twin(*args, **kwargs)


def _bound_hook(hook: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return a hook that passes ``module`` to ``hook`` instead of the module on which it is called."""

    def call_hook(_: Any, *args: Any) -> Any:
        return hook(module, *args)

    return call_hook


class _Twin(nn.Module):
    """Runs another ``forward`` with the hooks of the module ``of``."""

    def __init__(self, forward: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(forward=forward, of=module)


def hooked_module(module: nn.Module) -> nn.Module:
    """Return the user's module for a module that a global hook receives, which may be a `_Twin`."""
    return vars(module)["of"] if isinstance(module, _Twin) else module
