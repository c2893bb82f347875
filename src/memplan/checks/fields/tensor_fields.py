"""The receptive fields of a tensor, dimension by dimension, and how views and sums combine them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from memplan.checks.fields.spans import IDENTITY, Span


@dataclass(frozen=True, slots=True)
class Loss:
    """Positions of the input that an op lost before its first and after its last output; negative if it pads.

    ``op`` is the op's index. The sum over the chain of ``parent`` is the loss of the whole path.
    """

    op: int
    before: Fraction
    after: Fraction
    parent: Loss | None


@dataclass(frozen=True, slots=True)
class Field:
    """What the positions of a tensor's dimension see of a dimension of an input.

    ``source`` is the number of that dimension (see `Followed.sources`), and ``extent`` its size. ``spans`` has the
    receptive fields by path from the input, a span for each stride: paths of equal stride are joined. ``variance`` is
    that of the positions seen, for equal weights.
    """

    source: int
    extent: int
    spans: tuple[Span, ...] = (IDENTITY,)
    is_spatial: bool = False
    """Whether a kernel slid along it: it is a spatial dimension."""
    variance: float = 0.0
    losses: Loss | None = None

    def centre(self, position: int) -> Fraction:
        """Return the middle between the lowest and the highest input position that an output position sees.

        Both are on the lines fitted through each span's lows and highs, so the centre can be a fraction of a position.
        """
        low = min(span.first_low + span.stride * position for span in self.spans)
        high = max(span.first_high + span.stride * position for span in self.spans)
        return (low + high) / 2

    def stride(self, size: int) -> Fraction:
        """Return the distance between the receptive fields of neighbouring outputs, in positions of the input.

        Spans of different strides have no common one: then it is the average over a dimension of ``size`` outputs.
        """
        if len(self.spans) == 1 or size < 2:
            return self.spans[0].stride
        return (self.centre(size - 1) - self.centre(0)) / (size - 1)

    @property
    def width(self) -> int:
        """Size of the receptive field."""
        return max(span.size for span in self.spans)

    def lost(self, size: int) -> tuple[Fraction, Fraction]:
        """Return the positions of the input before the first of ``size`` outputs, and after the last; negative if
        outputs lie beyond the input's border."""
        stride = self.stride(size)
        first, last = (0, size - 1) if stride >= 0 else (size - 1, 0)  # swapped after a flip
        margin = (abs(stride) - 1) / 2
        return self.centre(first) - margin, self.extent - 1 - self.centre(last) - margin


Axis = tuple[Field, ...]
"""A field for each dimension of an input that a dimension can be traced to, in order of the sources."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A dimension, or one of several dimensions that a view has merged."""

    size: int
    axis: Axis = ()
    half: tuple[Factor, bool] | None = None
    """If a view has split a dimension: that dimension, and whether this is its outer part."""


Dim = tuple[Factor, ...]
"""A dimension of a tensor: the factors of its size, outermost first."""
Fields = tuple[Dim, ...]
"""The dimensions of a tensor."""


def untraced(size: int) -> Dim:
    """Return a dimension whose positions cannot be traced to an input."""
    return (Factor(size),)


def unknown(shape: Sequence[int]) -> Fields:
    """Return the fields of a tensor of this shape whose positions cannot be traced to an input."""
    return tuple(untraced(size) for size in shape)


def size_of(dim: Dim) -> int:
    """Return the number of positions of a dimension."""
    return math.prod(factor.size for factor in dim)


def resolved(dim: Dim) -> Axis:
    """Return the fields of a dimension as a whole; () if they are unknown.

    ``dim`` has a factor for each of the dimensions that a view merged into it, outermost first. If only the outermost
    is traced (a pixel shuffle), each of its positions is followed by all inner positions, which see what it saw.
    """
    if len(dim) == 1:
        return dim[0].axis
    factors = [factor for factor in dim if factor.size > 1]
    if len(factors) == 1:
        return factors[0].axis
    if not factors or not factors[0].axis or any(factor.axis for factor in factors[1:]):
        return ()  # several traced dimensions were merged
    repeat = math.prod(factor.size for factor in factors[1:])
    return mapped(factors[0].axis, lambda span: span.through(repeat, advance=1, seen=lambda _: [0]))


def mapped(axis: Axis, change: Callable[[Span], Span | None], *, is_spatial: bool = False, spread: float = 0.0) -> Axis:
    """Return the receptive fields after an op.

    Args:
        axis: those before it.
        change: from a span before the op to the span after it, or to None if it is unknown: then the field is dropped.
        is_spatial: whether a kernel slides along the dimension.
        spread: variance of the positions of the operand that a position of the result reads, for equal weights.
    """
    fields: list[Field] = []
    for field in axis:
        changed = [change(span) for span in field.spans]
        spans = tuple(span for span in changed if span is not None)
        if len(spans) == len(changed):
            variance = field.variance + spread * float(field.spans[0].stride) ** 2
            fields.append(replace(field, spans=spans, is_spatial=field.is_spatial or is_spatial, variance=variance))
    return tuple(fields)


def after_op(
    dim: Dim,
    size: int,
    op: int,
    change: Callable[[Span], Span | None],
    *,
    is_spatial: bool = False,
    spread: float = 0.0,
) -> Dim:
    """Return a dimension after an op, with the input's positions that the op lost at the border as a `Loss`. ``size``
    are the positions of the result; ``change``, ``is_spatial``, ``spread`` are as for `mapped`."""
    axis = resolved(dim)
    lost_before = {field.source: field.lost(size_of(dim)) for field in axis}
    moved = mapped(axis, change, is_spatial=is_spatial, spread=spread)
    return (Factor(size, tuple(_with_loss(field, op, lost_before[field.source], size) for field in moved)),)


def _with_loss(field: Field, op: int, lost_before: tuple[Fraction, Fraction], size: int) -> Field:
    """Return a field with what an op lost at each side, if anything: what is lost after it, less ``lost_before`` it."""
    before, after = (new - old for new, old in zip(field.lost(size), lost_before, strict=True))
    return replace(field, losses=Loss(op, before, after, field.losses)) if before or after else field


def union(operands: Iterable[Fields], shape: Sequence[int], op: int) -> Fields:
    """Return the receptive fields of an elementwise op's result of this shape: what the operands, broadcast, see
    together. ``op`` is the op's index."""
    fields = list(operands)
    dims: list[Dim] = []
    for from_end, size in zip(
        range(len(shape), 0, -1), shape, strict=True
    ):  # broadcasting aligns dimensions at the end
        aligned = [operand[-from_end] for operand in fields if len(operand) >= from_end]
        dims.append(_union_of_dims([dim for dim in aligned if size_of(dim) == size], size, op))
    return tuple(dims)


def _union_of_dims(dims: list[Dim], size: int, op: int) -> Dim:
    """Return a dimension of ``size`` positions, each of which sees what it sees in any of the operands' dimensions."""
    traced = [dim for dim in dims if any(factor.axis for factor in dim)]
    if not traced:
        return dims[0] if dims else untraced(size)
    if len(traced) == 1 or all(dim == traced[0] for dim in traced[1:]):
        return traced[0]
    # a factor for each dimension that a view has merged into the operand's dimension
    factors = [[factor for factor in dim if factor.size > 1] or list(dim[:1]) for dim in traced]
    if len({tuple(factor.size for factor in of_dim) for of_dim in factors}) > 1:  # merged from different sizes
        return (Factor(size, _union_of_axes([resolved(dim) for dim in traced], size, op)),)
    return tuple(
        Factor(same[0].size, _union_of_axes([factor.axis for factor in same], same[0].size, op))
        for same in zip(*factors, strict=True)
    )


def _union_of_axes(axes: list[Axis], size: int, op: int) -> Axis:
    """Return the union of the operands' fields, a field for each dimension of an input (source)."""
    fields = [field for axis in axes for field in axis]
    sources = sorted({field.source for field in fields})
    return tuple(_union_of_fields([f for f in fields if f.source == source], size, op) for source in sources)


def _union_of_fields(fields: list[Field], size: int, op: int) -> Field:
    """Return the field of ``size`` positions that see what they see in any of these fields of the same source. Its
    losses are those of the widest field."""
    widest = max(fields, key=lambda field: field.width)
    spans: dict[Fraction, Span] = {}  # by stride
    for span in (span for field in fields for span in field.spans):
        same_stride = spans.get(span.stride)
        both = span if same_stride is None else same_stride.union(span)
        spans[span.stride] = both if both is not None else span
    # variance of the mixture of all fields: the mean of their variances, and the variance of their centres
    centres = [float(field.centre(0)) for field in fields]
    mean = sum(centres) / len(centres)
    variance = sum(f.variance + (c - mean) ** 2 for f, c in zip(fields, centres, strict=True)) / len(fields)
    field = replace(
        widest,
        spans=tuple(spans[stride] for stride in sorted(spans)),
        is_spatial=any(field.is_spatial for field in fields),
        variance=variance,
    )
    return _with_loss(field, op, widest.lost(size), size)


def viewed(fields: Fields, shape: Sequence[int]) -> Fields:
    """Return the receptive fields of a tensor after ``view(shape)``; unknown if the sizes have no common split.

    A new dimension has a factor for each old dimension that it merges, or the outer or inner part of one that is split.
    """
    remaining = [factor for dim in fields for factor in dim if factor.size != 1]
    dims: list[Dim] = []
    for size in shape:
        factors: list[Factor] = []
        missing = size  # positions of the new dimension that no factor provides yet
        while missing > 1 and remaining:
            factor = remaining.pop(0)
            if missing % factor.size == 0:
                factors.append(factor)
                missing //= factor.size
            elif factor.size % missing == 0:
                outer, inner = _split(factor, missing)
                factors.append(outer)
                remaining.insert(0, inner)
                missing = 1
            else:
                return unknown(shape)
        dims.append(tuple(_with_halves_merged(factors)) or untraced(1))
    return tuple(dims)


def _split(factor: Factor, outer: int) -> tuple[Factor, Factor]:
    """Return the outer and the inner part of a dimension that a view splits; ``outer`` is the size of the outer. Only
    the outer part is traced: each of its positions sees what all of its inner positions saw."""
    inner = factor.size // outer
    axis = mapped(factor.axis, lambda span: span.through(period=1, advance=inner, seen=lambda _: range(inner)))
    return Factor(outer, axis, (factor, True)), Factor(inner, (), (factor, False))


def _with_halves_merged(factors: list[Factor]) -> list[Factor]:
    """Return the factors, with an outer and an inner half replaced by the dimension that a view had split into them."""
    merged: list[Factor] = []
    for factor in factors:
        outer = merged[-1].half if merged else None
        if outer is not None and factor.half == (outer[0], False) and outer[1]:
            merged[-1] = outer[0]
        else:
            merged.append(factor)
    return merged
