"""A call of an op with the fields of its operands, and field rules that many ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.checks.fields.spans import Span
from memplan.checks.fields.tensor_fields import Dim, Factor, Fields, mapped, resolved, size_of, with_border_losses
from memplan.trace.records import Form


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op, with the fields of its operands."""

    name: str
    form: Form
    reads: tuple[tuple[str, Fields], ...]
    makers: Mapping[int, Call] = field(default_factory=dict)
    """Storage -> the call of this step's forward pass that produced it."""

    @property
    def main(self) -> Fields:
        """Fields of the first operand."""
        return self.reads[0][1] if self.reads else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.form.writes[0].shape

    def dims(self, name: str, rank: int) -> list[int]:
        """Return the dimensions in an option, a number or a list of them, as numbers from 0."""
        value = self.form.option(name, ())
        values = (value,) if isinstance(value, int) else value
        return [int(number) % rank for number in values]


Rule = Callable[[Call], Fields | list[Fields]]
"""From a call to the fields of its first result, or of all of its results."""


def fields_after_kernel(
    call: Call, change: Callable[[int, Span], Span | None], spread: Callable[[int], float]
) -> Fields:
    """Return the receptive fields after an op whose kernel slides along the last dimensions, as a convolution's does.

    Args:
        call: the op.
        change: from the number of a spatial dimension and a span of the operand to the span of the result.
        spread: from the number of a spatial dimension to the variance of the taps, in positions of the operand.
    """
    shape, dims = call.shape, call.main
    weight = call.form.read("weight")
    if weight is not None:
        count = len(weight.shape) - 2
    else:
        count = len(call.form.option("kernel_size", ())) or len(call.form.option("output_size", ()))
    first = len(dims) - count
    result: list[Dim] = [(Factor(shape[n]),) if n == first - 1 else dim for n, dim in enumerate(dims[:first])]
    for number in range(count):
        dim = dims[first + number]
        axis = resolved(dim)
        moved = mapped(axis, lambda span, n=number: change(n, span), windowed=True, spread=spread(number))
        size = shape[first + number]
        result.append((Factor(size, with_border_losses(axis, size_of(dim), moved, size, call.form.op)),))
    return tuple(result)


def option_at(values: Any, number: int, default: int = 1) -> int:
    """Return an option's value for spatial dimension ``number``; a single value holds for all dimensions."""
    if not isinstance(values, (tuple, list)):
        return default if values is None else int(values)
    numbers: list[int] = [int(value) for value in values]
    return numbers[min(number, len(numbers) - 1)] if numbers else default


def shifted(dim: Dim, size: int, offset: int, step: int, op: int) -> Dim:
    """Return a dimension after a crop (offset > 0), a pad (offset < 0), a slice with a step, or a flip (step -1).

    ``size`` is the new size, ``op`` the index of the op.
    """
    axis = resolved(dim)
    moved = mapped(axis, lambda span: span.moved(offset, step))
    return (Factor(size, with_border_losses(axis, size_of(dim), moved, size, op)),)
