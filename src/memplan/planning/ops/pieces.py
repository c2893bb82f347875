"""Sizes of the pieces that memplan's kernels process at a time, and of packed and quantized values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memplan.trace.records import HOST

LARGEST_PIECE = 1 << 17
"""Largest piece on the CPU, in elements: a multiple of 8, whose flags are whole bytes."""
CARD_PIECE, CARD_LEAST = 1 << 24, 1 << 20
"""Largest and smallest piece on a card, in elements: a kernel on fewer elements takes as long as its launch."""

GROUP = 256
"""Quantized elements that share a scale: its 4 bytes are 1.6 % of their 256 bytes."""


def most(place: str = HOST) -> int:
    """Return the largest piece in elements, of which alone a kernel makes temporaries. ``place``: torch's device type,
    here and below."""
    return LARGEST_PIECE if place == HOST else CARD_PIECE


def elements_per_piece(elements: int, place: str = HOST) -> int:
    """Return the elements of a piece of a tensor with ``elements`` elements: a sixteenth, within the limits."""
    sixteenth = max(1, elements // 16)
    return min(LARGEST_PIECE, sixteenth) if place == HOST else min(CARD_PIECE, max(CARD_LEAST, sixteenth))


def all_rows_and_rows_per_piece(shape: Sequence[int], trailing: int, place: str = HOST) -> tuple[int, int]:
    """Return (all rows, rows of a piece) of a tensor whose last ``trailing`` dimensions are a row."""
    row_elements = prod(shape[len(shape) - trailing :])
    return prod(shape) // row_elements, max(1, elements_per_piece(prod(shape), place) // row_elements)


def channels_per_piece(shape: Sequence[int]) -> int:
    """Return the channels of a piece of a tensor of shape (N, C, ...): a piece has them of all samples."""
    return max(1, elements_per_piece(prod(shape)) * shape[1] // prod(shape))


def groups_per_piece(shape: Sequence[int], group: int) -> int:
    """Return the groups of a piece of a tensor (N, C, ...) with ``group`` groups of channels: a piece has them of a
    single sample."""
    return max(1, min(group, elements_per_piece(prod(shape)) * group // prod(shape[1:])))


def packed_bytes(elements: int) -> int:
    """Return the bytes of a tensor with a bit for each element."""
    return (elements + 7) // 8


def quantized_elements_per_piece(elements: int, place: str = HOST) -> int:
    """Return how many of a tensor's ``elements`` elements are quantized at a time: a multiple of `GROUP`."""
    return max(1, elements_per_piece(elements, place) // GROUP) * GROUP


def quantized_bytes(elements: int) -> int:
    """Return the bytes of quantized elements: a byte each, padded to a multiple of 4, and the scales of all groups."""
    return -(-elements // 4) * 4 + 4 * -(-elements // GROUP)
