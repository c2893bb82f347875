"""An einsum equation as a batched matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pair:
    """Operands as ``(..., rows, inner) @ (..., inner, columns)``, and the order of the result's dimensions.

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
        """Return ``left @ right`` with its dimensions in the equation's order."""
        return product.permute(self.order)

    @property
    def flipped(self) -> Pair:
        """The same product with the operands swapped: ``b.mT @ a.mT``, whose rows and columns are swapped as well."""
        rank = len(self.order)
        swapped = {rank - 2: rank - 1, rank - 1: rank - 2}
        order = tuple(swapped.get(dim, dim) for dim in self.order)
        return Pair(self.right.transpose(-1, -2), self.left.transpose(-1, -2), order)


def arranged(equation: str, tensors: Sequence[torch.Tensor]) -> Pair | None:
    """Return the operands of an einsum as those of a batched matrix product; None if it is no such product. The left
    operand is the one whose rows come first in the result."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2 or not output or "." in equation:
        return None
    first, second = operands
    if any(len(set(letters)) != len(letters) for letters in (first, second, output)):
        return None  # a repeated letter is a diagonal
    lead = [letter for letter in output if letter in first and letter in second]
    inner = [letter for letter in first if letter in second and letter not in output]
    rows = [letter for letter in output if letter in first and letter not in second]
    columns = [letter for letter in output if letter in second and letter not in first]
    if not lead or len(inner) != 1 or len(rows) != 1 or len(columns) != 1:
        return None
    if {*first, *second} != {*lead, *inner, *rows, *columns}:
        return None  # a letter of one operand that is not in the output is summed before the product
    left = tensors[0].permute([first.index(letter) for letter in (*lead, *rows, *inner)])
    right = tensors[1].permute([second.index(letter) for letter in (*lead, *inner, *columns)])
    product = [*lead, *rows, *columns]
    pair = Pair(left, right, tuple(product.index(letter) for letter in output))
    return pair if output.index(rows[0]) < output.index(columns[0]) else pair.flipped
