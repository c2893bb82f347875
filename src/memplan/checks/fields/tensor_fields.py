"""The fields of a tensor, dimension by dimension, and how views and sums combine them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from memplan.checks.fields.spans import IDENTITY, Span


@dataclass(frozen=True, slots=True)
class Loss:
    """What an op took from the border on the way: positions of the input before the first and after the last output.

    Negative where it gives some back (a pad). The chain through ``parent`` adds up to what the whole way lost.
    """

    op: int
    before: Fraction
    after: Fraction
    parent: Loss | None


@dataclass(frozen=True, slots=True)
class Field:
    """What the positions of one dimension see of one dimension of an input.

    ``spans`` are the paths that lead there: one for each stride, since those of equal stride are joined. ``variance``
    is that of the positions seen, were all weights equal. ``extent`` is the size of the input's dimension.
    """

    source: int
    extent: int
    spans: tuple[Span, ...] = (IDENTITY,)
    windowed: bool = False
    """Whether a kernel slid along it: it is a spatial dimension."""
    variance: float = 0.0
    losses: Loss | None = None

    def centre(self, position: int) -> Fraction:
        """Return the centre of the field of a position, by the lines through lows and highs."""
        low = min(span.first_low + span.stride * position for span in self.spans)
        high = max(span.first_high + span.stride * position for span in self.spans)
        return (low + high) / 2

    def stride(self, size: int) -> Fraction:
        """Return the positions of the input from one output to the next."""
        if len(self.spans) == 1 or size < 2:
            return self.spans[0].stride
        return (self.centre(size - 1) - self.centre(0)) / (size - 1)

    @property
    def width(self) -> int:
        """Return the size of the receptive field."""
        return max(span.size for span in self.spans)

    def lost(self, size: int) -> tuple[Fraction, Fraction]:
        """Return the positions of the input before the first of ``size`` outputs, and after the last: negative where
        there are outputs beyond the input's border."""
        stride = self.stride(size)
        first, last = (0, size - 1) if stride >= 0 else (size - 1, 0)  # the other way round after a flip
        margin = (abs(stride) - 1) / 2
        return self.centre(first) - margin, self.extent - 1 - self.centre(last) - margin


Axis = tuple[Field, ...]
"""A field for each input that a dimension can be traced to, in their order; empty where there is none."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A dimension, or a part of one that a view has put together of several."""

    size: int
    axis: Axis = ()
    half: tuple[Factor, bool] | None = None
    """Where a view has split a dimension: what it was, and whether this is the outer part."""


Dim = tuple[Factor, ...]
Fields = tuple[Dim, ...]
"""The dimensions of a tensor."""


def unknown(shape: Sequence[int]) -> Fields:
    """Return the fields of a tensor that nothing is known about."""
    return tuple((Factor(size),) for size in shape)


def size_of(dim: Dim) -> int:
    """Return the number of positions of a dimension."""
    return math.prod(factor.size for factor in dim)


def resolved(dim: Dim) -> Axis:
    """Return the axis of a dimension as a whole.

    Of one put together from a traced part and smaller steps inside of it (a pixel shuffle), each step sees what the
    traced position saw.
    """
    parts = [factor for factor in dim if factor.size > 1]
    if len(parts) == 1:
        return parts[0].axis
    if not parts or not parts[0].axis or any(factor.axis for factor in parts[1:]):
        return dim[0].axis if len(dim) == 1 else ()
    repeat = math.prod(factor.size for factor in parts[1:])
    return mapped(parts[0].axis, lambda span: span.through(repeat, 1, lambda _: [0]))


def mapped(axis: Axis, change: Callable[[Span], Span | None], *, windowed: bool = False, spread: float = 0.0) -> Axis:
    """Return the axis after an op that changes each span alike; a field whose span is no longer followed is left out.

    ``spread`` is the variance of the op's own taps, in positions of the tensor that it reads.
    """
    found: list[Field] = []
    for field in axis:
        spans = [change(span) for span in field.spans]
        known = tuple(span for span in spans if span is not None)
        if len(known) == len(spans):
            variance = field.variance + spread * float(field.spans[0].stride) ** 2
            found.append(replace(field, spans=known, windowed=field.windowed or windowed, variance=variance))
    return tuple(found)


def charged(before: Axis, size_before: int, after: Axis, size_after: int, op: int) -> Axis:
    """Return the axis after an op, with what the op lost of the border written down."""
    earlier = {field.source: field for field in before}
    found: list[Field] = []
    for field in after:
        old = earlier[field.source].lost(size_before)
        new = field.lost(size_after)
        found.append(_charge(field, op, new[0] - old[0], new[1] - old[1]))
    return tuple(found)


def _charge(field: Field, op: int, before: Fraction, after: Fraction) -> Field:
    return replace(field, losses=Loss(op, before, after, field.losses)) if before or after else field


def union(parts: Iterable[Fields], shape: Sequence[int], op: int) -> Fields:
    """Return the fields of a result whose positions see what the operands' positions see; smaller operands are
    broadcast."""
    operands = list(parts)
    return tuple(_united(_aligned(operands, place, len(shape), size), size, op) for place, size in enumerate(shape))


def _aligned(operands: list[Fields], place: int, rank: int, size: int) -> list[Dim]:
    """Return the operands' dimensions that meet at a place of the result, without those that are broadcast there."""
    found = [fields[place - rank + len(fields)] for fields in operands if place - rank + len(fields) >= 0]
    return [dim for dim in found if size_of(dim) == size]


def _united(dims: list[Dim], size: int, op: int) -> Dim:
    known = [dim for dim in dims if any(factor.axis for factor in dim)]
    if not known:
        return dims[0] if dims else (Factor(size),)
    if len(known) == 1 or all(dim == known[0] for dim in known[1:]):
        return known[0]
    sizes = {tuple(factor.size for factor in dim if factor.size > 1) for dim in known}
    if len(sizes) > 1:  # put together from other parts: as a whole, then
        return (Factor(size, _joined([resolved(dim) for dim in known], size, op)),)
    columns = zip(*([factor for factor in dim if factor.size > 1] or list(dim[:1]) for dim in known), strict=True)
    return tuple(Factor(c[0].size, _joined([factor.axis for factor in c], c[0].size, op)) for c in columns)


def _joined(axes: list[Axis], size: int, op: int) -> Axis:
    sources = sorted({field.source for axis in axes for field in axis})
    return tuple(_meet([f for axis in axes for f in axis if f.source == source], size, op) for source in sources)


def _meet(fields: list[Field], size: int, op: int) -> Field:
    """Join the fields of several paths: a position sees what any of them sees; losses are those of the widest."""
    main = max(fields, key=lambda field: field.width)
    spans: dict[Fraction, Span] = {}
    for span in (span for field in fields for span in field.spans):
        known = spans.get(span.stride)
        joined = span if known is None else known.joined(span)
        spans[span.stride] = joined if joined is not None else span
    centres = [float(field.centre(0)) for field in fields]
    mean = sum(centres) / len(centres)
    variance = sum(f.variance + (c - mean) ** 2 for f, c in zip(fields, centres, strict=True)) / len(fields)
    met = replace(
        main,
        spans=tuple(spans[stride] for stride in sorted(spans)),
        windowed=any(field.windowed for field in fields),
        variance=variance,
    )
    old, new = main.lost(size), met.lost(size)
    return _charge(met, op, new[0] - old[0], new[1] - old[1])


def viewed(fields: Fields, shape: Sequence[int]) -> Fields:
    """Return the fields of the same positions in another shape."""
    left = [factor for dim in fields for factor in dim if factor.size != 1]
    found: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        missing = size
        while missing > 1 and left:
            factor = left.pop(0)
            if missing % factor.size == 0:
                taken.append(factor)
                missing //= factor.size
            elif factor.size % missing == 0:
                outer, inner = _split(factor, missing)
                taken.append(outer)
                left.insert(0, inner)
                missing = 1
            else:  # sizes without a common division: nothing is known from here on
                return unknown(shape)
        found.append(tuple(_merged(taken)) or (Factor(1),))
    return tuple(found)


def _split(factor: Factor, outer: int) -> tuple[Factor, Factor]:
    inner = factor.size // outer
    axis = mapped(factor.axis, lambda span: span.through(1, inner, lambda _: range(inner)))
    return Factor(outer, axis, (factor, True)), Factor(inner, (), (factor, False))


def _merged(factors: list[Factor]) -> Iterator[Factor]:
    """Join halves of one dimension that meet again."""
    waiting: Factor | None = None
    for factor in factors:
        if waiting is not None and waiting.half and factor.half and factor.half == (waiting.half[0], False):
            yield waiting.half[0]
            waiting = None
            continue
        if waiting is not None:
            yield waiting
        waiting = factor
        if not (factor.half and factor.half[1]):
            yield factor
            waiting = None
    if waiting is not None:
        yield waiting
