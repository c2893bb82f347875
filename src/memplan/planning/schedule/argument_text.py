"""Write arguments of ops as Python text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.errors import RecordingError
from memplan.planning.graph.joint_graph import GraphOp, Ref

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


def argument_text(part: Any, expression: Callable[[int], str], op: GraphOp | None = None) -> str:
    """Return an argument of an op as Python text.

    Args:
        part: the argument, or an item of it.
        expression: returns the text of a value.
        op: the op that takes it, for error messages.

    Raises:
        RecordingError: it is neither a value nor plain data.
    """
    if isinstance(part, Ref):
        return expression(part.value)
    if isinstance(part, tuple):  # with a comma after the last item: "(1,)" is a tuple
        return "(" + "".join(f"{argument_text(item, expression, op)}, " for item in part).rstrip() + ")"
    if isinstance(part, list):
        return "[" + ", ".join(argument_text(item, expression, op) for item in part) + "]"
    if isinstance(part, torch.device):
        return f"device({str(part)!r})"
    if type(part) in _PLAIN:
        return repr(part)
    raise RecordingError(
        f"{'An op' if op is None else op.target} takes a {type(part).__name__}",
        expected="tensors, numbers, texts, dtypes, devices, layouts, and lists of them",
        layer=op.layer or None if op else None,
        where=op.where if op else None,
    )
