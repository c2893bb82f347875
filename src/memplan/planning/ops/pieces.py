"""Sizes of the pieces that memplan's own kernels work in, and of the forms that they make."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

PIECE = 1 << 17
"""Elements that the engine takes at once, at most, where it goes through an operand piece by piece."""

GROUP = 256
"""Elements that share a scale: 4 bytes of that are 1.6 % of their 256."""


def piece(elements: int) -> int:
    """Elements a piece of a tensor with so many."""
    return max(1, min(PIECE, elements // 16))


def rows(shape: Sequence[int], trailing: int) -> tuple[int, int]:
    """(rows in all, rows a piece) of a tensor whose last ``trailing`` dimensions are normalized over."""
    size = prod(shape[len(shape) - trailing :])
    return prod(shape) // size, max(1, piece(prod(shape)) // size)


def channels(shape: Sequence[int]) -> int:
    """Channels a piece: of all samples."""
    return max(1, piece(prod(shape)) * shape[1] // prod(shape))


def groups(shape: Sequence[int], group: int) -> int:
    """Groups a piece: of one sample."""
    return max(1, min(group, piece(prod(shape)) * group // prod(shape[1:])))


def packed(elements: int) -> int:
    """Bytes of one bit for each element."""
    return (elements + 7) // 8


def quantized_piece(elements: int) -> int:
    """Elements of so many that are brought into eight bits at once: whole groups."""
    return max(1, min(PIECE, elements // 16) // GROUP) * GROUP


def quantized_bytes(elements: int) -> int:
    """Of so many elements in eight bits: these, from the next multiple of 4 on the scales of all groups."""
    return -(-elements // 4) * 4 + 4 * -(-elements // GROUP)
