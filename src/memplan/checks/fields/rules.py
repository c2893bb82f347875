"""What each op does to the positions of a tensor: one entry an op, by its name without the overload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from memplan.checks.fields.op_call import Call, Rule, at, shifted, spatial
from memplan.checks.fields.rearranged import REARRANGING
from memplan.checks.fields.spans import Span
from memplan.checks.fields.tensor_fields import (
    Axis,
    Factor,
    Fields,
    charged,
    mapped,
    resolved,
    size_of,
    union,
    unknown,
    viewed,
)
from memplan.trace.records import Form


def fields_of(call: Call) -> list[Fields]:
    """Return the fields of every result of an op; of one that no rule knows, those of an elementwise op if it can be
    one."""
    rule = RULES.get(call.name, _elementwise)
    try:
        found = rule(call)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # the form in a file need not be one of that op
        return [unknown(view.shape) for view in call.form.writes]
    results = found if isinstance(found, list) else [found]
    shapes = [view.shape for view in call.form.writes]
    if not isinstance(found, list):  # further results: indices and masks as the first, statistics unknown
        results += [found if shape == shapes[0] else unknown(shape) for shape in shapes[1:]]
    agree = [tuple(map(size_of, fields)) == shape for fields, shape in zip(results, shapes, strict=False)]
    return [fields if same else unknown(shape) for fields, shape, same in zip(results, shapes, agree, strict=False)]


def _elementwise(call: Call) -> Fields:
    fits = [fields for _, fields in call.reads if _broadcasts(fields, call.shape)]
    return union(fits, call.shape, call.form.op)


def _broadcasts(fields: Fields, shape: Sequence[int]) -> bool:
    own = [size_of(dim) for dim in fields]
    return len(own) <= len(shape) and all(
        size in (1, other) for size, other in zip(reversed(own), reversed(shape), strict=False)
    )


def _mixes(call: Call) -> Fields:
    """Follow an op each of whose positions sees all others."""
    return unknown(call.shape)


def kernel_of(name: str, form: Form) -> tuple[tuple[int, ...], ...] | None:
    """Return kernel, stride, padding and dilation of a convolution or pool by dimension; None of any other op."""
    known = RULES.get(name) in (_convolution, _pool) and not form.option("transposed", False)
    return _windows(form) if known else None


def _windows(form: Form) -> tuple[tuple[int, ...], ...]:
    weight = form.read("weight")
    kernel = form.option("kernel_size") if weight is None else weight.shape[2:]
    count = len(kernel) if weight is None else len(form.writes[0].shape) - 2
    given = (kernel, form.option("stride") or kernel, form.option("padding", 0), form.option("dilation", 1))
    return tuple(tuple(at(values, n, 0 if k == 2 else 1) for n in range(count)) for k, values in enumerate(given))


def _convolution(call: Call) -> Fields:
    kernel, stride, padding, dilation = _windows(call.form)
    transposed = call.form.option("transposed", False)

    def change(n: int, span: Span) -> Span | None:
        return (span.transposed if transposed else span.window)(kernel[n], stride[n], padding[n], dilation[n])

    def spread(n: int) -> float:
        taps = kernel[n] / stride[n] if transposed else kernel[n]
        return max(0.0, taps * taps - 1) / 12 * dilation[n] ** 2

    return spatial(call, change, spread)


def _pool(call: Call) -> Fields:
    found = _convolution(call)
    channels = len(found) - len(call.form.option("kernel_size")) - 1  # they stay apart
    return tuple(call.main[place] if place == channels else dim for place, dim in enumerate(found))


def _resized(call: Call, seen: Callable[[int, int, Fraction], tuple[int, int, Callable[[int], list[int]]]]) -> Fields:
    """Follow interpolation and adaptive pools: ``seen(size, new, ratio)`` is a period, an advance and the taps."""
    shape, dims = call.shape, call.main
    count = len(call.form.option("output_size", ())) or len(shape) - 2
    scales = _scales(call, count)
    first = len(dims) - count
    found = list(dims[:first])
    for number in range(count):
        dim = dims[first + number]
        old, new = size_of(dim), shape[first + number]
        scale = scales[number]
        ratio = 1 / scale if scale else Fraction(old, new)
        axis = resolved(dim)
        if new == 1 and old > 1:
            moved: Axis = ()
        else:
            period, advance, taps = seen(old, new, ratio)
            moved = mapped(axis, lambda span, p=period, a=advance, t=taps: span.through(p, a, t), windowed=True)
        found.append((Factor(new, charged(axis, old, moved, new, call.form.op)),))
    return tuple(found)


def _scales(call: Call, count: int) -> list[Fraction | None]:
    given = call.form.option("scale_factors")
    if not given:
        names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}.get(count, ())
        given = [call.form.option(name) for name in names]
    values = [Fraction(float(value)).limit_denominator(1000) if value else None for value in given or ()]
    return values if len(values) == count else [None] * count


def _nearest(shift: Fraction) -> Rule:
    def seen(old: int, new: int, ratio: Fraction) -> tuple[int, int, Callable[[int], list[int]]]:
        return ratio.denominator, ratio.numerator, lambda o: [math.floor((o + shift) * ratio)]

    return lambda call: _resized(call, seen)


def _linear(before: int, after: int) -> Rule:
    """Return the rule of linear interpolation; ``before`` and ``after``: taps beside the two neighbours (bicubic has
    one on each side)."""

    def rule(call: Call) -> Fields:
        corners = bool(call.form.option("align_corners", False))

        def seen(old: int, new: int, ratio: Fraction) -> tuple[int, int, Callable[[int], list[int]]]:
            if corners:
                ratio = Fraction(old - 1, new - 1) if old > 1 else Fraction(old, new)

            def taps(o: int) -> list[int]:
                place = o * ratio if corners else (o + Fraction(1, 2)) * ratio - Fraction(1, 2)
                left = math.floor(place)
                return [left] if place == left else [*range(left - before, left + 2 + after)]

            return ratio.denominator, ratio.numerator, taps

        return _resized(call, seen)

    return rule


def _antialiased(reach: int) -> Rule:
    """Return the rule of interpolation whose filter widens with the step down; ``reach``: of the filter, in steps
    (UpSampleKernel.cpp)."""

    def seen(old: int, new: int, ratio: Fraction) -> tuple[int, int, Callable[[int], list[int]]]:
        support = reach * max(ratio, Fraction(1))

        def taps(o: int) -> list[int]:
            centre = ratio * (o + Fraction(1, 2))
            begin, end = math.floor(centre - support + Fraction(1, 2)), math.floor(centre + support + Fraction(1, 2))
            return [begin, end - 1]

        return ratio.denominator, ratio.numerator, taps

    return lambda call: _resized(call, seen)


def _adaptive(call: Call) -> Fields:
    def seen(old: int, new: int, ratio: Fraction) -> tuple[int, int, Callable[[int], list[int]]]:
        exact = Fraction(old, new)
        return exact.denominator, exact.numerator, lambda o: [math.floor(o * exact), math.ceil((o + 1) * exact) - 1]

    return _resized(call, seen)


def _pad(name: str) -> Rule:
    """Return the rule of a pad, ``(before, after)`` of the last dimension, then of the one before it, and so on."""

    def rule(call: Call) -> Fields:
        amounts, dims, shape = call.form.option(name, ()), list(call.main), call.shape
        for number in range(len(amounts) // 2):
            place = len(dims) - 1 - number
            if amounts[2 * number] or amounts[2 * number + 1]:
                dims[place] = shifted(dims[place], shape[place], -int(amounts[2 * number]), 1, call.form.op)
        return tuple(dims)

    return rule


def _slice(call: Call) -> Fields:
    dims = list(call.main)
    place = int(call.form.option("dim", 0)) % len(dims)
    size, start, step = size_of(dims[place]), call.form.option("start"), int(call.form.option("step", 1))
    begin = min(max(int(start or 0) + (size if int(start or 0) < 0 else 0), 0), size)
    if call.shape[place] != size or begin or step != 1:
        dims[place] = shifted(dims[place], call.shape[place], begin, step, call.form.op)
    return tuple(dims)


def _pieces(call: Call) -> list[Fields]:
    dims = list(call.main)
    place = int(call.form.option("dim", 0)) % len(dims)
    found: list[Fields] = []
    begin = 0
    for view in call.form.writes:
        piece = list(dims)
        piece[place] = shifted(dims[place], view.shape[place], begin, 1, call.form.op)
        begin += view.shape[place]
        found.append(tuple(piece))
    return found


def _flip(call: Call) -> Fields:
    dims = list(call.main)
    for place in call.dims("dims", len(dims)):
        dims[place] = shifted(dims[place], size_of(dims[place]), size_of(dims[place]) - 1, -1, call.form.op)
    return tuple(dims)


def _without(call: Call) -> Fields:
    """Follow select: one dimension less."""
    place = int(call.form.option("dim", 0)) % len(call.main)
    return tuple(dim for number, dim in enumerate(call.main) if number != place)


def _unbind(call: Call) -> list[Fields]:
    return [_without(call)] * len(call.form.writes)


def _reduced(call: Call) -> Fields:
    rank = len(call.main)
    gone = call.dims("dim", rank) or list(range(rank))
    if len(call.shape) == rank:
        return tuple((Factor(1),) if place in gone else dim for place, dim in enumerate(call.main))
    return tuple(dim for place, dim in enumerate(call.main) if place not in gone)


def _concatenated(call: Call) -> Fields:
    parts = [fields for _, fields in call.reads if len(fields) == len(call.shape)]
    place = int(call.form.option("dim", 0)) % len(call.shape)
    blanked = [
        tuple((Factor(call.shape[place]),) if number == place else dim for number, dim in enumerate(fields))
        for fields in parts
    ]
    return union(blanked, call.shape, call.form.op)


def _stacked(call: Call) -> Fields:
    place = int(call.form.option("dim", 0)) % len(call.shape)
    parts = [(*fields[:place], (Factor(call.shape[place]),), *fields[place:]) for _, fields in call.reads]
    return union(parts, call.shape, call.form.op)


def _permuted(call: Call) -> Fields:
    return tuple(call.main[place] for place in call.dims("dims", len(call.main)))


def _transposed(call: Call) -> Fields:
    dims = list(call.main)
    if len(dims) < 2:
        return tuple(dims)
    first, second = int(call.form.option("dim0", 0)) % len(dims), int(call.form.option("dim1", 1)) % len(dims)
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


def _expanded(call: Call) -> Fields:
    fields, shape = call.main, call.shape
    extra = len(shape) - len(fields)
    kept = [dim if size_of(dim) == size else (Factor(size),) for dim, size in zip(fields, shape[extra:], strict=True)]
    return (*unknown(shape[:extra]), *kept)


def _product(call: Call) -> Fields:
    """Return a matrix product: rows of the first matrix and columns of the second stay, what lies between is mixed."""
    added = call.name in ("addmm", "baddbmm") and len(call.reads) > 2
    given = [fields for _, fields in call.reads][1 if added else 0 :]
    left = given[0]
    columns = given[1][-1] if len(given) > 1 and call.name != "linear" else (Factor(call.shape[-1]),)
    return (*left[:-1], columns)


def _viewed(call: Call) -> Fields:
    return viewed(call.main, call.shape)


_BY_VALUES = ("grid_sampler_2d", "grid_sampler_3d", "fractional_max_pool2d", "fractional_max_pool3d", "index",
              "index_select", "gather", "deform_conv2d", "roi_align", "roi_pool")  # fmt: skip
"""Which positions they read depends on values."""


_MADE_LIKE = (*(f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "empty_strided")),
              *(f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn")))  # fmt: skip
"""Of the tensor that they read they take no position."""


def ends(call: Call, results: Sequence[Fields]) -> bool:
    """Return whether positions are lost on the way through an op although its results have some: they depend on values,
    or no rule says what the op does. Where every position sees all others, none are left to lose."""
    if call.name in RULES and call.name not in (*_BY_VALUES, "as_strided", *REARRANGING):
        return False
    return _slid(fields for _, fields in call.reads) and not _slid(results) and any(map(len, results))


def _slid(many: Iterable[Fields]) -> bool:
    """Return whether any of the dimensions is one that a kernel slid along."""
    return any(f.windowed for fields in many for dim in fields for factor in dim for f in factor.axis)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "_slow_conv2d_forward",
         "convolution_overrideable", "cudnn_convolution_relu"), _convolution,
    ),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
         "avg_pool2d", "avg_pool3d"), _pool,
    ),
    **dict.fromkeys(
        (f"{prefix}adaptive_{kind}_pool{n}d" for prefix in ("", "_") for kind in ("avg", "max") for n in (1, 2, 3)),
        _adaptive,
    ),
    **{f"upsample_nearest{n}d": _nearest(Fraction(0)) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": _nearest(Fraction(1, 2)) for n in (1, 2, 3)},
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _linear(0, 0)),
    "upsample_bicubic2d": _linear(1, 1),
    "_upsample_bilinear2d_aa": _antialiased(1),
    "_upsample_bicubic2d_aa": _antialiased(2),
    "constant_pad_nd": _pad("pad"),
    **dict.fromkeys((f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)), _pad("padding")),
    "slice": _slice,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"), _pieces),
    "flip": _flip,
    "select": _without,
    "unbind": _unbind,
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "logsumexp", "any",
         "all", "prod", "linalg_vector_norm", "norm"), _reduced,
    ),
    "cat": _concatenated,
    "stack": _stacked,
    "permute": _permuted,
    **dict.fromkeys(("transpose", "t"), _transposed),
    "expand": _expanded,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "linear"), _product),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze"), _viewed),
    **REARRANGING,
    **dict.fromkeys(_MADE_LIKE, _mixes),
    **dict.fromkeys((*_BY_VALUES, "as_strided"), _mixes),
    **dict.fromkeys(
        ("scatter", "scatter_add", "embedding", "sort", "topk", "cumsum", "_fft_r2c", "_fft_c2c", "_fft_c2r",
         "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "mkldnn_rnn_layer",
         "_cudnn_rnn"), _mixes,
    ),
}  # fmt: skip
"""What an op that is not listed does: as an elementwise one, wherever the shapes allow it."""
