"""A batched product that is written as an equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pair:
    """Two operands as ``(..., rows, inner) @ (..., inner, columns)``, and how the result is to lie.

    Example:
        >>> pair = arranged("blxd,blyd->blxy", [query, key])
        >>> torch.equal(pair.result(pair.left @ pair.right), torch.einsum("blxd,blyd->blxy", query, key))
        True
    """

    left: torch.Tensor
    right: torch.Tensor
    order: tuple[int, ...]
    """Dimensions of the product in the order of the equation's result."""

    def result(self, product: torch.Tensor) -> torch.Tensor:
        """Return the product as the equation wants it."""
        return product.permute(self.order)

    @property
    def flipped(self) -> Pair:
        """Return the same with the operands exchanged."""
        rank = len(self.order)
        turned = {rank - 2: rank - 1, rank - 1: rank - 2}
        order = tuple(turned.get(place, place) for place in self.order)
        return Pair(self.right.transpose(-1, -2), self.left.transpose(-1, -2), order)


def arranged(equation: str, tensors: Sequence[torch.Tensor]) -> Pair | None:
    """Return the operands of an equation that is one batched product; None of any other.

    The one whose rows come first in the result is the left one.
    """
    given, _, wanted = equation.replace(" ", "").partition("->")
    operands = given.split(",")
    if len(operands) != 2 or not wanted or "." in equation:
        return None
    first, second = operands
    if any(len(set(letters)) != len(letters) for letters in (first, second, wanted)):
        return None
    lead = [letter for letter in wanted if letter in first and letter in second]
    inner = [letter for letter in first if letter in second and letter not in wanted]
    rows = [letter for letter in wanted if letter in first and letter not in second]
    columns = [letter for letter in wanted if letter in second and letter not in first]
    if not lead or len(inner) != 1 or len(rows) != 1 or len(columns) != 1:
        return None
    if {*first, *second} != {*lead, *inner, *rows, *columns}:
        return None
    left = tensors[0].permute([first.index(letter) for letter in (*lead, *rows, *inner)])
    right = tensors[1].permute([second.index(letter) for letter in (*lead, *inner, *columns)])
    product = [*lead, *rows, *columns]
    pair = Pair(left, right, tuple(product.index(letter) for letter in wanted))
    return pair if wanted.index(rows[0]) < wanted.index(columns[0]) else pair.flipped
