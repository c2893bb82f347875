"""How much values select, where what it is put together with has a known shape: the step runs only if they fit."""

from __future__ import annotations

import traceback
from typing import Any

import torch


def selected_beside(error: BaseException | None, taken: int) -> int | None:
    """Return how many elements must have been selected, given the error of an op that met too many.

    Args:
        error: of an op whose operands cannot be broadcast.
        taken: how many were taken to be selected.

    Returns:
        The size that another operand has in the dimension of that size; None where there is none, or several.
    """
    operands = _operands(error)
    found: set[int] = set()
    for one in operands:
        for other in operands:
            pairs = zip(reversed(one), reversed(other), strict=False)
            found |= {two for first, two in pairs if first == taken and 1 < two < taken}
    return found.pop() if len(found) == 1 else None


def _operands(error: BaseException | None) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that the op was given which raised."""
    frames = [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    given: list[Any] = [frame.f_locals.get("args") for frame in frames if frame.f_code.co_name == "__torch_dispatch__"]
    args = given[-1] if given else None
    return [tuple(one.shape) for one in args or () if isinstance(one, torch.Tensor)]
