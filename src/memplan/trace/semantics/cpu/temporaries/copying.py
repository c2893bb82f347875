"""Temporaries of copies on the CPU: Copy.cpp."""

from __future__ import annotations

from typing import Any

from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import transposing


def clone(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Copy.cpp, copy_impl: the block buffer that a transposed matrix goes through."""
    return transposing(args[0]) if result.is_contiguous() and result.dtype is args[0].dtype else 0


def copy(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Copy.cpp, copy_impl: as `clone` if the sizes are equal."""
    target, source = args[0], args[1]
    return clone((source,), kwargs, target) if source.shape == target.shape else 0


FORMULAS: dict[str, Formula] = {
    "aten.clone.default": clone,
    "aten._to_copy.default": clone,
    "aten.copy_.default": copy,
}
