"""The receptive fields of a tensor, dimension by dimension, and how views and sums combine them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    windowed: bool = False
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


def unknown(shape: Sequence[int]) -> Fields:
    """Return the fields of a tensor whose positions cannot be traced to an input."""
    return tuple((Factor(size),) for size in shape)


def size_of(dim: Dim) -> int:
    """Return the number of positions of a dimension."""
    return math.prod(factor.size for factor in dim)


def resolved(dim: Dim) -> Axis:
    """Return the fields of a dimension as a whole.

    In a dimension merged from a traced factor and untraced factors inside of it (a pixel shuffle), all positions inside
    see what the traced position saw.
    """
    factors = [factor for factor in dim if factor.size > 1]
    if len(factors) == 1:
        return factors[0].axis
    if not factors or not factors[0].axis or any(factor.axis for factor in factors[1:]):
        return dim[0].axis if len(dim) == 1 else ()
    repeat = math.prod(factor.size for factor in factors[1:])
    return mapped(factors[0].axis, lambda span: span.through(repeat, 1, lambda _: [0]))


def mapped(axis: Axis, change: Callable[[Span], Span | None], *, windowed: bool = False, spread: float = 0.0) -> Axis:
    """Return the receptive fields after an op that applies ``change`` to each span; fields are dropped where it returns
    None.

    ``spread`` is the variance of the op's own taps, in positions of its operand.
    """
    fields: list[Field] = []
    for field in axis:
        changed = [change(span) for span in field.spans]
        spans = tuple(span for span in changed if span is not None)
        if len(spans) == len(changed):
            variance = field.variance + spread * float(field.spans[0].stride) ** 2
            fields.append(replace(field, spans=spans, windowed=field.windowed or windowed, variance=variance))
    return tuple(fields)


def with_border_losses(before: Axis, size_before: int, after: Axis, size_after: int, op: int) -> Axis:
    """Return the receptive fields ``after`` an op, with the input positions that the op itself lost at the border noted
    as its `Loss`."""
    by_source = {field.source: field for field in before}
    fields: list[Field] = []
    for field in after:
        old = by_source[field.source].lost(size_before)
        new = field.lost(size_after)
        fields.append(_with_loss(field, op, new[0] - old[0], new[1] - old[1]))
    return tuple(fields)


def _with_loss(field: Field, op: int, before: Fraction, after: Fraction) -> Field:
    return replace(field, losses=Loss(op, before, after, field.losses)) if before or after else field


def union(operands: Iterable[Fields], shape: Sequence[int], op: int) -> Fields:
    """Return the receptive fields of an elementwise op's result of this shape: what the operands, broadcast, see
    together."""
    fields = list(operands)
    return tuple(
        _union_of_dims(_aligned_dims(fields, dim, len(shape), size), size, op) for dim, size in enumerate(shape)
    )


def _aligned_dims(operands: list[Fields], dim: int, rank: int, size: int) -> list[Dim]:
    """Return the operands' dimensions that are aligned with dimension ``dim`` of the result and not broadcast."""
    dims = [fields[dim - rank + len(fields)] for fields in operands if dim - rank + len(fields) >= 0]
    return [dim for dim in dims if size_of(dim) == size]


def _union_of_dims(dims: list[Dim], size: int, op: int) -> Dim:
    """Return a dimension whose positions see what they see in any of the operands' dimensions."""
    traced = [dim for dim in dims if any(factor.axis for factor in dim)]
    if not traced:
        return dims[0] if dims else (Factor(size),)
    if len(traced) == 1 or all(dim == traced[0] for dim in traced[1:]):
        return traced[0]
    sizes = {tuple(factor.size for factor in dim if factor.size > 1) for dim in traced}
    if len(sizes) > 1:  # merged from different factors: join the dimensions as a whole
        return (Factor(size, _union_of_axes([resolved(dim) for dim in traced], size, op)),)
    factors = [[factor for factor in dim if factor.size > 1] or list(dim[:1]) for dim in traced]
    return tuple(
        Factor(same[0].size, _union_of_axes([factor.axis for factor in same], same[0].size, op))
        for same in zip(*factors, strict=True)
    )


def _union_of_axes(axes: list[Axis], size: int, op: int) -> Axis:
    """Return the union of the fields, for each dimension of an input by itself."""
    fields = [field for axis in axes for field in axis]
    sources = sorted({field.source for field in fields})
    return tuple(_union_of_fields([f for f in fields if f.source == source], size, op) for source in sources)


def _union_of_fields(fields: list[Field], size: int, op: int) -> Field:
    """Return the field of positions that see what any of the paths sees; losses are those of the widest path."""
    widest = max(fields, key=lambda field: field.width)
    spans: dict[Fraction, Span] = {}
    for span in (span for field in fields for span in field.spans):
        same_stride = spans.get(span.stride)
        both = span if same_stride is None else same_stride.union(span)
        spans[span.stride] = both if both is not None else span
    centres = [float(field.centre(0)) for field in fields]
    mean = sum(centres) / len(centres)
    variance = sum(f.variance + (c - mean) ** 2 for f, c in zip(fields, centres, strict=True)) / len(fields)
    field = replace(
        widest,
        spans=tuple(spans[stride] for stride in sorted(spans)),
        windowed=any(field.windowed for field in fields),
        variance=variance,
    )
    old, new = widest.lost(size), field.lost(size)
    return _with_loss(field, op, new[0] - old[0], new[1] - old[1])


def viewed(fields: Fields, shape: Sequence[int]) -> Fields:
    """Return the receptive fields of the same positions viewed in another shape; unknown if the sizes have no common
    split."""
    remaining = [factor for dim in fields for factor in dim if factor.size != 1]
    dims: list[Dim] = []
    for size in shape:
        factors: list[Factor] = []
        missing = size
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
        dims.append(tuple(_with_halves_merged(factors)) or (Factor(1),))
    return tuple(dims)


def _split(factor: Factor, outer: int) -> tuple[Factor, Factor]:
    """Return the outer and the inner part of a dimension that a view splits. Positions are traced in the outer part,
    each of which sees all of its inner ones."""
    inner = factor.size // outer
    axis = mapped(factor.axis, lambda span: span.through(1, inner, lambda _: range(inner)))
    return Factor(outer, axis, (factor, True)), Factor(inner, (), (factor, False))


def _with_halves_merged(factors: list[Factor]) -> Iterator[Factor]:
    """Yield the factors, with the two halves of a split dimension merged where they are neighbours again."""
    outer: Factor | None = None  # an outer half whose inner half may follow
    for factor in factors:
        if outer is not None and outer.half and factor.half and factor.half == (outer.half[0], False):
            yield outer.half[0]
            outer = None
            continue
        if outer is not None:
            yield outer
        outer = factor
        if not (factor.half and factor.half[1]):
            yield factor
            outer = None
    if outer is not None:
        yield outer
