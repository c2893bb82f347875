"""Rules for the receptive fields after each op, by the op's name without the overload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from memplan.checks.fields.op_call import Call, Rule, option_at, shifted
from memplan.checks.fields.rearranged import REARRANGING
from memplan.checks.fields.spans import Span
from memplan.checks.fields.tensor_fields import Fields, after_op, size_of, union, unknown, untraced, viewed
from memplan.trace.records import Form


def fields_of(call: Call) -> list[Fields]:
    """Return the receptive fields of every result of an op. An op without a rule counts as elementwise. Where fields do
    not have the shape of the result, they are unknown."""
    shapes = [view.shape for view in call.form.writes]
    rule = RULES.get(call.name, _elementwise)
    try:
        results = rule(call)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # a trace file may have impossible arguments
        return [unknown(shape) for shape in shapes]
    if not isinstance(results, list):  # a rule for the first result: indices and masks of its shape have its fields
        results = [results] * len(shapes)
    return [
        fields if tuple(map(size_of, fields)) == shape else unknown(shape)
        for fields, shape in zip(results, shapes, strict=False)
    ]


def _elementwise(call: Call) -> Fields:
    """Receptive fields after an elementwise op: a position sees what the same position of each operand sees."""
    operands = [fields for _, fields in call.reads if _broadcasts(fields, call.shape)]
    return union(operands, call.shape, call.form.op)


def _broadcasts(fields: Fields, shape: Sequence[int]) -> bool:
    """Return whether a tensor with these fields broadcasts to ``shape``."""
    sizes = [size_of(dim) for dim in fields]
    return len(sizes) <= len(shape) and all(
        size in (1, target) for size, target in zip(reversed(sizes), reversed(shape), strict=False)
    )


def _unknown(call: Call) -> Fields:
    """Receptive fields of a result whose positions see all positions, none, or those that values choose: unknown."""
    return unknown(call.shape)


class KernelWindows(NamedTuple):
    """Arguments of a convolution or pool, each by spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


def kernel_of(name: str, form: Form) -> KernelWindows | None:
    """Return the kernel of a convolution or pool, by its recorded arguments; None for other ops, as transposed ones."""
    is_window = RULES.get(name) in (_convolution, _pool) and not form.option("transposed", False)
    return _windows(form) if is_window else None


def _windows(form: Form) -> KernelWindows:
    """Return the kernel of a convolution or pool from the recorded arguments of its call."""
    weight = form.read("weight")
    kernel = form.option("kernel_size") if weight is None else weight.shape[2:]
    count = len(kernel) if weight is None else len(form.writes[0].shape) - 2

    def by_dimension(values: Any, default: int) -> tuple[int, ...]:
        return tuple(option_at(values, dim, default) for dim in range(count))

    return KernelWindows(
        by_dimension(kernel, 1),
        by_dimension(form.option("stride") or kernel, 1),
        by_dimension(form.option("padding"), 0),
        by_dimension(form.option("dilation"), 1),
    )


def _convolution(call: Call) -> Fields:
    """Receptive fields after a convolution or a transposed one. The kernel slides along the last dimensions. The
    dimension before them, the channels, cannot be traced: each channel reads all channels of the operand."""
    kernel, stride, padding, dilation = _windows(call.form)
    transposed = call.form.option("transposed", False)
    first = len(call.operand) - len(kernel)
    result = list(call.operand[:first])
    if first > 0:
        result[-1] = untraced(call.shape[first - 1])
    for n, dim in enumerate(call.operand[first:]):

        def change(span: Span, n: int = n) -> Span | None:
            return (span.transposed if transposed else span.window)(kernel[n], stride[n], padding[n], dilation[n])

        # variance of the positions that a kernel of equal weights reads: (taps * taps - 1) / 12
        taps = kernel[n] / stride[n] if transposed else kernel[n]
        spread = max(0.0, taps * taps - 1) / 12 * dilation[n] ** 2
        result.append(after_op(dim, call.shape[first + n], call.form.op, change, is_spatial=True, spread=spread))
    return tuple(result)


def _pool(call: Call) -> Fields:
    """Receptive fields after a pool: as after a convolution, but channels are not mixed."""
    dims = list(_convolution(call))
    channels = len(dims) - len(call.form.option("kernel_size")) - 1
    if channels >= 0:
        dims[channels] = call.operand[channels]
    return tuple(dims)


_Sampling = Callable[[int, int, Fraction], tuple[Fraction, Callable[[int], list[int]]]]
"""From the old size, the new size and their ratio to the distance of neighbouring new positions in old ones, and to a
function from a new position to the old positions that it reads."""


def _resized(call: Call, sampling: _Sampling) -> Fields:
    """Return the receptive fields after an interpolation or an adaptive pool, which resizes the last dimensions.
    ``sampling`` tells which old positions each new position reads."""
    shape, dims = call.shape, call.operand
    count = len(call.form.option("output_size", ())) or len(shape) - 2
    first = len(dims) - count
    result = list(dims[:first])
    for dim, new, scale in zip(dims[first:], shape[first:], _scales(call, count), strict=True):
        old = size_of(dim)
        if new == 1 and old > 1:  # a global pool: its single position sees everything
            result.append(untraced(new))
            continue
        ratio, taps = sampling(old, new, 1 / scale if scale else Fraction(old, new))

        def change(span: Span, ratio: Fraction = ratio, taps: Callable[[int], list[int]] = taps) -> Span | None:
            return span.through(ratio.denominator, ratio.numerator, taps)

        result.append(after_op(dim, new, call.form.op, change, is_spatial=True))
    return tuple(result)


def _scales(call: Call, count: int) -> list[Fraction | None]:
    """Return the scale factors of an interpolation by dimension, of which there are ``count``; None where only the
    output size is set."""
    factors = call.form.option("scale_factors")
    if not factors:
        names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}.get(count, ())
        factors = [call.form.option(name) for name in names]
    scales = [Fraction(float(factor)).limit_denominator(1000) if factor else None for factor in factors]
    return scales if len(scales) == count else [None] * count


def _nearest(shift: Fraction) -> Rule:
    """Return the rule of a nearest-neighbour interpolation, whose output ``o`` reads position
    ``floor((o + shift) * ratio)``."""

    def sampling(old: int, new: int, ratio: Fraction) -> tuple[Fraction, Callable[[int], list[int]]]:
        return ratio, lambda o: [math.floor((o + shift) * ratio)]

    return lambda call: _resized(call, sampling)


def _linear(further: int) -> Rule:
    """Return the rule of an interpolation between the two neighbours of a position, and ``further`` positions to each
    side of them (bicubic: 1)."""

    def rule(call: Call) -> Fields:
        corners = bool(call.form.option("align_corners", False))

        def sampling(old: int, new: int, ratio: Fraction) -> tuple[Fraction, Callable[[int], list[int]]]:
            if corners:
                ratio = Fraction(old - 1, new - 1) if old > 1 else Fraction(old, new)

            def taps(o: int) -> list[int]:
                # without align_corners, the centres of pixels are aligned
                position = o * ratio if corners else (o + Fraction(1, 2)) * ratio - Fraction(1, 2)
                left = math.floor(position)
                return [left] if position == left else [*range(left - further, left + 2 + further)]

            return ratio, taps

        return _resized(call, sampling)

    return rule


def _antialiased(reach: int) -> Rule:
    """Return the rule of an interpolation with a filter that widens with the downsampling ratio. ``reach`` is half the
    filter's width at ratio 1; an output reads the positions that the filter covers (UpSampleKernel.cpp)."""

    def sampling(old: int, new: int, ratio: Fraction) -> tuple[Fraction, Callable[[int], list[int]]]:
        support = reach * max(ratio, Fraction(1))

        def taps(o: int) -> list[int]:
            centre = ratio * (o + Fraction(1, 2))
            begin, end = math.floor(centre - support + Fraction(1, 2)), math.floor(centre + support + Fraction(1, 2))
            return [begin, end - 1]

        return ratio, taps

    return lambda call: _resized(call, sampling)


def _adaptive(call: Call) -> Fields:
    """Receptive fields after an adaptive pool, whose output ``o`` reads the positions from ``o * old / new`` to
    ``(o + 1) * old / new``."""

    def sampling(old: int, new: int, ratio: Fraction) -> tuple[Fraction, Callable[[int], list[int]]]:
        exact = Fraction(old, new)
        return exact, lambda o: [math.floor(o * exact), math.ceil((o + 1) * exact) - 1]

    return _resized(call, sampling)


def _pad(name: str) -> Rule:
    """Return the rule of a pad whose argument ``name`` is (before, after) of the last dimension, then of the one before
    it, and so on."""

    def rule(call: Call) -> Fields:
        amounts, dims = call.form.option(name, ()), list(call.operand)
        for axis, before, after in zip(range(len(dims) - 1, -1, -1), amounts[::2], amounts[1::2], strict=False):
            if before or after:  # a dimension without padding keeps its factors
                dims[axis] = shifted(dims[axis], call.shape[axis], call.form.op, offset=-int(before))
        return tuple(dims)

    return rule


def _slice(call: Call) -> Fields:
    """Receptive fields after a slice: the sliced dimension begins later, and may have a larger stride."""
    dims = list(call.operand)
    axis = int(call.form.option("dim", 0)) % len(dims)
    size, start, step = size_of(dims[axis]), int(call.form.option("start") or 0), int(call.form.option("step", 1))
    begin = min(max(start + size if start < 0 else start, 0), size)
    if call.shape[axis] != size or begin or step != 1:
        dims[axis] = shifted(dims[axis], call.shape[axis], call.form.op, offset=begin, step=step)
    return tuple(dims)


def _split(call: Call) -> list[Fields]:
    """Receptive fields after a split: each result is a crop of the operand."""
    dims = list(call.operand)
    axis = int(call.form.option("dim", 0)) % len(dims)
    results: list[Fields] = []
    begin = 0
    for view in call.form.writes:
        piece = list(dims)
        piece[axis] = shifted(dims[axis], view.shape[axis], call.form.op, offset=begin)
        begin += view.shape[axis]
        results.append(tuple(piece))
    return results


def _flip(call: Call) -> Fields:
    """Receptive fields after a flip: the dimension is read from its end."""
    dims = list(call.operand)
    for axis in call.dims("dims", len(dims)):
        size = size_of(dims[axis])
        dims[axis] = shifted(dims[axis], size, call.form.op, offset=size - 1, step=-1)
    return tuple(dims)


def _select(call: Call) -> Fields:
    """Receptive fields after `Tensor.select`, which drops a dimension."""
    axis = int(call.form.option("dim", 0)) % len(call.operand)
    return tuple(dim for n, dim in enumerate(call.operand) if n != axis)


def _reduce(call: Call) -> Fields:
    """Receptive fields after a reduction: reduced dimensions cannot be traced, and are gone without ``keepdim``."""
    rank = len(call.operand)
    reduced = call.dims("dim", rank) or list(range(rank))
    if len(call.shape) == rank:
        return tuple(untraced(1) if n in reduced else dim for n, dim in enumerate(call.operand))
    return tuple(dim for n, dim in enumerate(call.operand) if n not in reduced)


def _cat(call: Call) -> Fields:
    """Receptive fields after a concatenation: that dimension is not traced, the others are as after elementwise ops."""
    axis = int(call.form.option("dim", 0)) % len(call.shape)
    operands = [
        (*fields[:axis], untraced(call.shape[axis]), *fields[axis + 1 :])
        for _, fields in call.reads
        if len(fields) == len(call.shape)
    ]
    return union(operands, call.shape, call.form.op)


def _stack(call: Call) -> Fields:
    """Receptive fields after a stack: the new dimension cannot be traced, the others are as after an elementwise op."""
    axis = int(call.form.option("dim", 0)) % len(call.shape)
    operands = [(*fields[:axis], untraced(call.shape[axis]), *fields[axis:]) for _, fields in call.reads]
    return union(operands, call.shape, call.form.op)


def _transpose(call: Call) -> Fields:
    """Receptive fields after a transposition."""
    dims = list(call.operand)
    if len(dims) < 2:
        return tuple(dims)
    first, second = int(call.form.option("dim0", 0)) % len(dims), int(call.form.option("dim1", 1)) % len(dims)
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


def _expand(call: Call) -> Fields:
    """Receptive fields after an expansion: dimensions that are broadcast or added cannot be traced."""
    fields, shape = call.operand, call.shape
    added = len(shape) - len(fields)
    dims = [dim if size_of(dim) == size else untraced(size) for dim, size in zip(fields, shape[added:], strict=True)]
    return (*unknown(shape[:added]), *dims)


def _matrix_product(call: Call) -> Fields:
    """Receptive fields after a product: rows of the first matrix and columns of the second keep theirs; the inner
    dimension is summed up."""
    matrices = [fields for _, fields in call.reads]
    if call.name in ("addmm", "baddbmm") and len(matrices) > 2:  # the first operand is added to the product
        matrices = matrices[1:]
    if call.name == "linear" or len(matrices) < 2:  # columns are those of a weight
        return (*matrices[0][:-1], untraced(call.shape[-1]))
    return (*matrices[0][:-1], matrices[1][-1])


_BY_VALUES = ("grid_sampler_2d", "grid_sampler_3d", "fractional_max_pool2d", "fractional_max_pool3d", "index",
              "index_select", "gather", "deform_conv2d", "roi_align", "roi_pool")  # fmt: skip
"""Ops whose operands' values decide which positions they read."""


_FACTORIES = (*(f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "empty_strided")),
              *(f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn")))  # fmt: skip
"""Ops that take shape and dtype from a tensor, and no position."""


def loses_positions(call: Call, results: Sequence[Fields]) -> bool:
    """Return whether an op reads tensors with spatial dimensions (`has_spatial_dim`), and no dimension of its results
    can be traced to them: values decide which positions it reads, or it has no rule.

    ``results`` are the receptive fields of its results.
    """
    if call.name in RULES and call.name not in (*_BY_VALUES, "as_strided", *REARRANGING):
        return False  # other rules trace what can be traced; after an FFT or attention every position sees all others
    is_scalar = not any(results)  # it has no positions to lose
    return not is_scalar and has_spatial_dim(fields for _, fields in call.reads) and not has_spatial_dim(results)


def has_spatial_dim(tensors: Iterable[Fields]) -> bool:
    """Return whether any dimension of the tensors is spatial: the kernel of a convolution or pool slid along it."""
    return any(field.is_spatial for fields in tensors for dim in fields for factor in dim for field in factor.axis)


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
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _linear(further=0)),
    "upsample_bicubic2d": _linear(further=1),
    "_upsample_bilinear2d_aa": _antialiased(reach=1),
    "_upsample_bicubic2d_aa": _antialiased(reach=2),
    "constant_pad_nd": _pad("pad"),
    **dict.fromkeys((f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)), _pad("padding")),
    "slice": _slice,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"), _split),
    "flip": _flip,
    "select": _select,
    "unbind": lambda call: [_select(call)] * len(call.form.writes),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "logsumexp", "any",
         "all", "prod", "linalg_vector_norm", "norm"), _reduce,
    ),
    "cat": _cat,
    "stack": _stack,
    "permute": lambda call: tuple(call.operand[axis] for axis in call.dims("dims", len(call.operand))),
    **dict.fromkeys(("transpose", "t"), _transpose),
    "expand": _expand,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "linear"), _matrix_product),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze"),
        lambda call: viewed(call.operand, call.shape),
    ),
    **REARRANGING,
    **dict.fromkeys(_FACTORIES, _unknown),
    **dict.fromkeys((*_BY_VALUES, "as_strided"), _unknown),
    **dict.fromkeys(
        ("scatter", "scatter_add", "embedding", "sort", "topk", "cumsum", "_fft_r2c", "_fft_c2c", "_fft_c2r",
         "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "mkldnn_rnn_layer",
         "_cudnn_rnn"), _unknown,
    ),
}  # fmt: skip
"""Ops that are not listed count as elementwise, if the shapes allow it."""
