"""From the name of a loss or an optimizer to what it names: the same in the command and in Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from memplan.errors import InputError
from memplan.trace.naming.parsing import check_arguments, keywords, offer
from memplan.trace.naming.targets import resolve

Loss = Callable[..., Any] | str
"""``loss(output, *targets)``, or the name of one: ``"cross_entropy"``, ``"package.module:callable"``."""
Optimizer = Callable[[Any], Any] | str
"""Takes the parameters, or is the name of what does: ``"adamw"``, ``"sgd:lr=0.1,momentum=0.9"``."""


def loss_of(given: Loss, option: str = "loss") -> Callable[..., Any]:
    """Return the loss of ``cross_entropy``, ``CrossEntropyLoss`` or ``module:callable``; a callable unchanged.

    ``option`` is what messages call it.

    Raises:
        InputError: no such loss.
        TargetError: no such ``module:callable``.
    """
    from torch import nn
    from torch.nn import functional

    if not isinstance(given, str):
        return _called(given, option, "loss(output, *targets), or the name of one, such as 'cross_entropy'")
    if ":" in given:
        found: Any = resolve(given).what
    else:
        found = getattr(functional, given, None) or getattr(nn, given, None)
        if not callable(found) or given.startswith("_") or inspect.ismodule(found):
            losses = [other for other in dir(functional) if other.endswith(("_loss", "entropy", "_logits", "_div"))]
            raise InputError(
                f"there is no loss {given!r} in torch.nn.functional",
                expected="the name of one, such as cross_entropy, or module:callable",
                do=offer(given, losses),
            )
    if inspect.isclass(found):
        check_arguments(found, {}, title=given, option=option)
        found = found()
    return found


def optimizer_of(given: Optimizer, option: str = "optimizer") -> Callable[[Any], Any] | None:
    """Return the optimizer of ``adamw``, ``sgd:lr=0.1,momentum=0.9`` or ``module:callable``; None for ``none``; a
    callable unchanged.

    ``option`` is what messages call it.

    Raises:
        InputError: no such optimizer, or none with such options; one that is made already.
        TargetError: no such ``module:callable``.
    """
    if not isinstance(given, str):
        return _called(given, option, "a callable of the parameters (torch.optim.AdamW), or the name of one ('adamw')")
    known = _optimizers()
    name, _, options = given.partition(":")
    if name.lower() not in known and ":" in given:  # module:callable, with options behind another colon
        name, _, options = given.rpartition(":") if "=" in given.rpartition(":")[2] else (given, "", "")
    if name.lower() == "none":
        return None
    arguments = keywords(options, option) if options else {}
    if ":" in name:
        found = resolve(name).what
    elif name.lower() in known:
        found = known[name.lower()]
    else:
        raise InputError(
            f"there is no optimizer {name!r} in torch.optim",
            expected="the name of one, such as adamw, or module:callable",
            do=offer(name.lower(), known),
        )
    check_arguments(found, arguments, title=f"the optimizer {name}", option=option, first=1)
    return functools.partial(found, **arguments)


def _called(given: Any, option: str, expected: str) -> Any:
    """Return what was given, if it can be called."""
    if callable(given):
        return given
    kind = type(given).__name__
    made = hasattr(given, "param_groups")
    raise InputError(
        f"{option} is of type {kind}, which cannot be called",
        expected=expected,
        do=f"Pass what makes it: torch.optim.{kind}, or a lambda with its options" if made else "Pass one",
    )


def _optimizers() -> dict[str, Any]:
    import torch

    classes = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    base = torch.optim.Optimizer
    return {name: value for name, value in classes.items() if issubclass(value, base) and value is not base}
