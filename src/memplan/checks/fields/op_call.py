"""A call of an op with the fields of what it reads, and what many ops do to a dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.checks.fields.spans import Span
from memplan.checks.fields.tensor_fields import Dim, Factor, Fields, charged, mapped, resolved, size_of
from memplan.trace.records import Form


@dataclass(frozen=True, slots=True)
class Call:
    """An op with the fields of what it reads."""

    name: str
    form: Form
    reads: tuple[tuple[str, Fields], ...]
    makers: Mapping[int, Call] = field(default_factory=dict)
    """Storage -> the call that made it, for those of this step's forward pass."""

    @property
    def main(self) -> Fields:
        """Fields of the first tensor that it reads."""
        return self.reads[0][1] if self.reads else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its first result."""
        return self.form.writes[0].shape

    def dims(self, name: str, rank: int) -> list[int]:
        """Return the dimensions given by an option, from the front."""
        value = self.form.option(name, ())
        values = (value,) if isinstance(value, int) else value
        return [int(number) % rank for number in values]


Rule = Callable[[Call], Fields | list[Fields]]
"""From a call to the fields of its first result, or of all of them."""


def spatial(call: Call, change: Callable[[int, Span], Span | None], spread: Callable[[int], float]) -> Fields:
    """Follow an op that slides along the last dimensions, as many as its kernel has; ``change`` takes which."""
    shape, dims = call.shape, call.main
    count = len(call.form.option("kernel_size", ())) or len(call.form.option("output_size", ()))
    weight = call.form.read("weight")
    count = len(weight.shape) - 2 if weight is not None else count
    first = len(dims) - count
    found: list[Dim] = [
        (Factor(shape[place]),) if place == first - 1 else dim for place, dim in enumerate(dims[:first])
    ]
    for number in range(count):
        dim = dims[first + number]
        axis = resolved(dim)
        moved = mapped(axis, lambda span, n=number: change(n, span), windowed=True, spread=spread(number))
        size = shape[first + number]
        found.append((Factor(size, charged(axis, size_of(dim), moved, size, call.form.op)),))
    return tuple(found)


def at(values: Any, number: int, default: int = 1) -> int:
    """Return one of the values of an option that may be given once for all dimensions, or not at all."""
    if not isinstance(values, (tuple, list)):
        return default if values is None else int(values)
    given: list[int] = [int(value) for value in values]
    return given[min(number, len(given) - 1)] if given else default


def shifted(dim: Dim, size: int, offset: int, step: int, op: int) -> Dim:
    """Return a dimension after a crop (offset > 0), a pad (offset < 0), a slice with a step, or a flip (step -1)."""
    axis = resolved(dim)
    moved = mapped(axis, lambda span: span.moved(offset, step))
    return (Factor(size, charged(axis, size_of(dim), moved, size, op)),)
