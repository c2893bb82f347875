"""Infers the number of elements that values select from the shapes with which the selection has to broadcast."""

from __future__ import annotations

import itertools
import traceback
from typing import Any

import torch


def count_from_shape_error(error: BaseException | None, assumed: int) -> int | None:
    """Infer the number of selected elements from the error of an op whose operands cannot be broadcast.

    Returns:
        The smaller size of another operand in the dimension of size ``assumed``; None if there is none, or several.
    """
    frames = [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # the op that raised is in the innermost frame of a dispatch mode
    dispatched = [frame.f_locals.get("args") for frame in frames if frame.f_code.co_name == "__torch_dispatch__"]
    arguments: Any = dispatched[-1] if dispatched else None
    shapes = [tuple(argument.shape) for argument in arguments or () if isinstance(argument, torch.Tensor)]
    sizes: set[int] = set()
    for shape, other in itertools.permutations(shapes, 2):
        pairs = zip(reversed(shape), reversed(other), strict=False)
        sizes |= {second for first, second in pairs if first == assumed and 1 < second < assumed}
    return sizes.pop() if len(sizes) == 1 else None
