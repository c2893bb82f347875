"""Sizes of the pieces that memplan's own kernels work in, and of the forms that they make."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memplan.trace.records import HOST

PIECE = 1 << 17
"""Elements that the engine takes at once in host memory, at most, where it goes through an operand piece by piece."""
CARD_PIECE, CARD_LEAST = 1 << 24, 1 << 20
"""The same on a card, and how many it takes at least: a kernel on few elements takes as long as its launch."""

GROUP = 256
"""Elements that share a scale: 4 bytes of that are 1.6 % of their 256."""


def most(place: str = HOST) -> int:
    """Return how many elements are taken at once at most. ``place``: a device in torch's words."""
    return PIECE if place == HOST else CARD_PIECE


def piece(elements: int, place: str = HOST) -> int:
    """Return the elements of one piece, of a tensor with so many."""
    wanted = max(1, elements // 16)
    return min(PIECE, wanted) if place == HOST else min(CARD_PIECE, max(CARD_LEAST, wanted))


def rows(shape: Sequence[int], trailing: int, place: str = HOST) -> tuple[int, int]:
    """Return (rows in all, rows a piece) of a tensor whose last ``trailing`` dimensions are normalized over."""
    size = prod(shape[len(shape) - trailing :])
    return prod(shape) // size, max(1, piece(prod(shape), place) // size)


def channels(shape: Sequence[int]) -> int:
    """Return the channels of one piece, which holds all samples."""
    return max(1, piece(prod(shape)) * shape[1] // prod(shape))


def groups(shape: Sequence[int], group: int) -> int:
    """Return the groups of one piece, which holds one sample."""
    return max(1, min(group, piece(prod(shape)) * group // prod(shape[1:])))


def packed(elements: int) -> int:
    """Bytes of one bit for each element."""
    return (elements + 7) // 8


def quantized_piece(elements: int, place: str = HOST) -> int:
    """Return how many of so many elements are quantized at once: whole groups."""
    return max(1, piece(elements, place) // GROUP) * GROUP


def quantized_bytes(elements: int) -> int:
    """Bytes of so many quantized elements: these and, from the next multiple of 4 on, the scales of all groups."""
    return -(-elements // 4) * 4 + 4 * -(-elements // GROUP)
