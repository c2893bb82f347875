"""Resolves names of losses and optimizers to callables, for the command line and for Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from memplan.errors import InputError
from memplan.trace.naming.parsing import check_arguments, keywords, offer
from memplan.trace.naming.targets import resolve

Loss = Callable[..., Any] | str
"""``loss(output, *targets)``, or its name: ``"cross_entropy"``, ``"package.module:callable"``."""
Optimizer = Callable[[Any], Any] | str
"""A callable of the parameters, or its name: ``"adamw"``, ``"sgd:lr=0.1,momentum=0.9"``."""


def loss_of(loss: Loss, option: str = "loss") -> Callable[..., Any]:
    """Return the loss named ``cross_entropy``, ``CrossEntropyLoss`` or ``module:callable``; a callable unchanged. Of a
    class of modules, such as ``nn.CrossEntropyLoss``, it is an instance.

    Raises:
        InputError: no such loss.
        TargetError: no such ``module:callable``.
    """
    from torch import nn
    from torch.nn import functional

    function: Any
    if not isinstance(loss, str):
        function = _check_callable(loss, option, "loss(output, *targets), or the name of one, such as 'cross_entropy'")
        if not (inspect.isclass(function) and issubclass(function, nn.Module)):
            return function
    elif ":" in loss:
        function = resolve(loss).what
    else:
        function = getattr(functional, loss, None) or getattr(nn, loss, None)
        if not callable(function) or loss.startswith("_") or inspect.ismodule(function):
            losses = [name for name in dir(functional) if name.endswith(("_loss", "entropy", "_logits", "_div"))]
            raise InputError(
                f"there is no loss {loss!r} in torch.nn.functional",
                expected="the name of one, such as cross_entropy, or module:callable",
                do=offer(loss, losses),
            )
    if inspect.isclass(function):
        check_arguments(function, {}, title=loss if isinstance(loss, str) else loss.__name__, option=option)
        function = function()
    return function


def optimizer_of(optimizer: Optimizer, option: str = "optimizer") -> Callable[[Any], Any] | None:
    """Return the optimizer named ``adamw``, ``sgd:lr=0.1,momentum=0.9`` or ``module:callable``.

    ``none`` gives None; a callable is returned unchanged. ``option`` is its name in messages.

    Raises:
        InputError: no such optimizer or option; an optimizer instance instead of a callable.
        TargetError: no such ``module:callable``.
    """
    if not isinstance(optimizer, str):
        expected = "a callable of the parameters (torch.optim.AdamW), or the name of one ('adamw')"
        return _check_callable(optimizer, option, expected)
    known = _optimizers()
    name, _, options = optimizer.partition(":")
    if name.lower() not in known and ":" in optimizer:  # module:callable or module:callable:options
        before, _, last = optimizer.rpartition(":")
        name, options = (before, last) if "=" in last else (optimizer, "")
    if name.lower() == "none":
        return None
    arguments = keywords(options, option) if options else {}
    if ":" in name:
        factory = resolve(name).what
    elif name.lower() in known:
        factory = known[name.lower()]
    else:
        raise InputError(
            f"there is no optimizer {name!r} in torch.optim",
            expected="the name of one, such as adamw, or module:callable",
            do=offer(name.lower(), known),
        )
    check_arguments(factory, arguments, title=f"the optimizer {name}", option=option, first=1)
    return functools.partial(factory, **arguments)


def _check_callable(value: Any, option: str, expected: str) -> Any:
    """Return ``value``, or raise InputError if it is not callable. ``option``: its name in the message."""
    if callable(value):
        return value
    kind = type(value).__name__
    is_instance = hasattr(value, "param_groups")
    raise InputError(
        f"{option} is of type {kind}, which cannot be called",
        expected=expected,
        do=f"Pass what makes it: torch.optim.{kind}, or a lambda with its options" if is_instance else "Pass one",
    )


def _optimizers() -> dict[str, Any]:
    """Return the optimizers of torch.optim by their names in lower case."""
    import torch

    classes = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    base = torch.optim.Optimizer
    return {name: value for name, value in classes.items() if issubclass(value, base) and value is not base}
