"""Functions of torch as Python calls them, before C++ unpacks the numbers among their arguments.

Seen in torch 2.11, 2.13 and 2.15: `torch.set_default_device` puts a mode below all others in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

Called = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function of torch with arguments that it may change."""


class FunctionCalls(TorchFunctionMode):
    """Shows each call of a function of torch, from the moment that it is `begun` to that when it is `ended`."""

    def __init__(self, called: Called) -> None:
        super().__init__()
        self._called = called
        self._begun = False

    def begin(self) -> None:
        """Put the mode below all that are entered: whoever entered those leaves them in order."""
        if not self._begun:
            self._begun = True
            entered = _all()
            for mode in (self, *entered):
                _push_mode(mode)

    def end(self) -> None:
        """Take the mode away, wherever it is."""
        if self._begun:
            self._begun = False
            for mode in _all():
                if mode is not self:
                    _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._called(func, args, kwargs or {})


def _all() -> list[Any]:
    """Pop all modes; outermost first."""
    popped = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    return popped[::-1]


def function_name(func: Any) -> str:
    """Return a function's or a method's name, of a property's getter too."""
    return getattr(func, "__name__", "")
