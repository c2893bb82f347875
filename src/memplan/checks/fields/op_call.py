"""A call of an op with the fields of its operands, and field rules that many ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.checks.fields.tensor_fields import Dim, Fields, after_op
from memplan.trace.records import Form


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op, with the fields of its operands."""

    name: str
    form: Form
    """The recorded arguments and results."""
    reads: tuple[tuple[str, Fields], ...]
    """Names of the arguments that are tensors, and their fields."""
    makers: Mapping[int, Call] = field(default_factory=dict)
    """Storage -> the call of this step's forward pass that produced it."""

    @property
    def operand(self) -> Fields:
        """Fields of the first operand; () without operands."""
        return self.reads[0][1] if self.reads else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.form.writes[0].shape

    def dims(self, name: str, rank: int) -> list[int]:
        """Return the dimensions in an argument such as ``dim=-1`` or ``dims=(0, -1)``, as numbers from 0. ``rank`` is
        the number of dimensions of the operand; [] without such an argument."""
        value = self.form.option(name, ())
        values = (value,) if isinstance(value, int) else value
        return [int(number) % rank for number in values]


Rule = Callable[[Call], Fields | list[Fields]]
"""From a call to the fields of its first result, or of all of its results."""


def option_at(values: Any, number: int, default: int = 1) -> int:
    """Return an argument's value for spatial dimension ``number``. ``values`` is a number for all dimensions, or a
    list, of which the last is repeated; None or [] is the default."""
    if not isinstance(values, (tuple, list)):
        return default if values is None else int(values)
    numbers: list[int] = [int(value) for value in values]
    return numbers[min(number, len(numbers) - 1)] if numbers else default


def shifted(dim: Dim, size: int, op: int, *, offset: int = 0, step: int = 1) -> Dim:
    """Return a dimension after an op whose result has at position ``o`` the operand's position ``offset + step * o``.

    That is a crop (offset > 0), a pad (offset < 0), a slice with a step, or a flip (step -1). ``size`` is the new size,
    ``op`` the index of the op.
    """
    return after_op(dim, size, op, lambda span: span.moved(offset, step))
