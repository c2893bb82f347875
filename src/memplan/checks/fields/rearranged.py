"""Field rules of ops that rearrange positions: pixel shuffle, im2col and col2im, unfold, unpooling, rot90, repeat."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.checks.fields.op_call import Call, Rule, option_at, shifted
from memplan.checks.fields.spans import IDENTITY, Span
from memplan.checks.fields.tensor_fields import (
    Dim,
    Factor,
    Fields,
    mapped,
    resolved,
    size_of,
    unknown,
    viewed,
    with_border_losses,
)


def _view_permute_view(fields: Fields, shape: Sequence[int], order: Sequence[int], result: Sequence[int]) -> Fields:
    """Return the fields after ``x.view(shape).permute(order).view(result)``."""
    split = viewed(fields, shape)
    return viewed(tuple(split[dim] for dim in order), result)


def _pixel_shuffle(call: Call) -> Fields:
    """Receptive fields after a pixel shuffle: (C r r, H, W) to (C, H r, W r)."""
    *lead, channels, height, width = (size_of(dim) for dim in call.main)
    r, n = int(call.form.option("upscale_factor", 1)), len(call.main) - 3
    shape = (*lead, channels // (r * r), r, r, height, width)
    return _view_permute_view(call.main, shape, (*range(n), n, n + 3, n + 1, n + 4, n + 2), call.shape)


def _pixel_unshuffle(call: Call) -> Fields:
    """Receptive fields after a pixel unshuffle: (C, H r, W r) to (C r r, H, W)."""
    *lead, channels, height, width = (size_of(dim) for dim in call.main)
    r, n = int(call.form.option("downscale_factor", 1)), len(call.main) - 3
    shape = (*lead, channels, height // r, r, width // r, r)
    return _view_permute_view(call.main, shape, (*range(n), n, n + 2, n + 4, n + 1, n + 3), call.shape)


def _after_kernel(dim: Dim, size: int, call: Call, window: Span | None, spread: float = 0.0) -> Dim:
    """Return a dimension after a kernel slid along it.

    ``size`` is the new size; ``window`` are the positions of the operand that each new position reads, with the
    variance ``spread``; None where they are unknown.
    """
    axis = resolved(dim)
    moved = mapped(axis, lambda span: _through_window(span, window), windowed=True, spread=spread)
    return (Factor(size, with_border_losses(axis, size_of(dim), moved, size, call.form.op)),)


def _through_window(span: Span, window: Span | None) -> Span | None:
    if window is None:
        return None
    seen = lambda position: range(window.low(position), window.high(position) + 1)  # noqa: E731
    return span.through(window.period, window.advance, seen)


def _windows(call: Call) -> list[tuple[int, int, int, int]]:
    """Return kernel, stride, padding and dilation of im2col and col2im, for each dimension."""
    form = call.form
    names = (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
    return [tuple(option_at(form.option(name), n, default) for name, default in names) for n in range(2)]  # pyright: ignore[reportReturnType]  # four


def _window_counts(sizes: Sequence[int], windows: Sequence[tuple[int, int, int, int]]) -> list[int]:
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, (k, s, p, d) in zip(sizes, windows, strict=True)]


def _are_disjoint(windows: Sequence[tuple[int, int, int, int]]) -> bool:
    return all(k == s and p == 0 and d == 1 for k, s, p, d in windows)


def _im2col(call: Call) -> Fields:
    """Receptive fields after im2col: (N, C, H, W) to (N, C kernel, positions), without overlap a view and a
    permutation."""
    dims, windows = call.main, _windows(call)
    if len(dims) != 4:
        return unknown(call.shape)
    counts = _window_counts([size_of(dim) for dim in dims[2:]], windows)
    if _are_disjoint(windows):
        (rows, columns), (kh, kw) = counts, (window[0] for window in windows)
        cropped = (
            *dims[:2],
            *(shifted(d, n * k, 0, 1, call.form.op) for d, n, k in zip(dims[2:], counts, (kh, kw), strict=True)),
        )
        batch, channels = (size_of(dim) for dim in dims[:2])
        shape = (batch, channels, rows, kh, columns, kw)
        return _view_permute_view(cropped, shape, (0, 1, 3, 5, 2, 4), call.shape)
    spatial = [
        _after_kernel(dim, count, call, IDENTITY.window(k, s, p, d), (k * k - 1) / 12 * d * d)
        for dim, count, (k, s, p, d) in zip(dims[2:], counts, windows, strict=True)
    ]
    return (dims[0], (Factor(call.shape[1]),), (*spatial[0], *spatial[1]))


def _col2im(call: Call) -> Fields:
    """Receptive fields after col2im: (N, C kernel, positions) to (N, C, H, W), where overlapping patches are summed."""
    dims, windows = call.main, _windows(call)
    if len(dims) != 3:
        return unknown(call.shape)
    batch, channels = call.shape[:2]
    rows, columns = _window_counts(call.shape[2:], windows)
    kh, kw = (window[0] for window in windows)
    if _are_disjoint(windows) and (rows * kh, columns * kw) == call.shape[2:]:
        return _view_permute_view(dims, (batch, channels, kh, kw, rows, columns), (0, 1, 4, 2, 5, 3), call.shape)
    split = viewed(dims, (batch, channels * kh * kw, rows, columns))
    spatial = [
        _after_kernel(dim, size, call, IDENTITY.transposed(k, s, p, d))
        for dim, size, (k, s, p, d) in zip(split[2:], call.shape[2:], windows, strict=True)
    ]
    return (split[0], (Factor(channels),), *spatial)


def _unfold(call: Call) -> Fields:
    """Receptive fields after unfolding windows along a dimension; their taps become the last dimension."""
    dims, form = list(call.main), call.form
    axis = int(form.option("dimension", 0)) % len(dims)
    size, step, count = int(form.option("size", 1)), int(form.option("step", 1)), call.shape[axis]
    if size == step:
        outer, inner = viewed((shifted(dims[axis], count * size, 0, 1, call.form.op),), (count, size))
        return (*dims[:axis], outer, *dims[axis + 1 :], inner)
    outer = _after_kernel(dims[axis], count, call, IDENTITY.window(size, step), (size * size - 1) / 12)
    return (*dims[:axis], outer, *dims[axis + 1 :], (Factor(size),))


def _max_unpool(call: Call) -> Fields:
    """Receptive fields after unpooling: each value returns to its position in the max pool's window."""
    indices = call.form.read("indices")
    maker = call.makers.get(indices.storage) if indices is not None else None
    if maker is None or not maker.name.startswith("max_pool"):
        return unknown(call.shape)
    kernel, padding = maker.form.option("kernel_size"), maker.form.option("padding", 0)
    stride = maker.form.option("stride") or kernel
    first = len(call.main) - len(kernel)
    spatial = [
        _after_kernel(
            dim, size, call, IDENTITY.transposed(option_at(kernel, n), option_at(stride, n), option_at(padding, n, 0))
        )
        for n, (dim, size) in enumerate(zip(call.main[first:], call.shape[first:], strict=True))
    ]
    return (*call.main[:first], *spatial)


def _rot90(call: Call) -> Fields:
    """Receptive fields after a rotation: each quarter turn flips one of the two dimensions and swaps them."""
    dims = list(call.main)
    first, second = call.dims("dims", len(dims))
    for _ in range(int(call.form.option("k", 1)) % 4):
        size = size_of(dims[second])
        dims[first], dims[second] = shifted(dims[second], size, size - 1, -1, call.form.op), dims[first]
    return tuple(dims)


def _repeat(call: Call) -> Fields:
    """Receptive fields after a repetition: dimensions that are copied several times, or added, cannot be traced."""
    repeats = call.form.option("repeats", ())
    added = len(repeats) - len(call.main)
    dims = [dim if count == 1 else (Factor(size),)
            for dim, count, size in zip(call.main, repeats[added:], call.shape[added:], strict=True)]  # fmt: skip
    return (*unknown(call.shape[:added]), *dims)


REARRANGING: dict[str, Rule] = {
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "im2col": _im2col,
    "col2im": _col2im,
    "unfold": _unfold,
    "max_unpool2d": _max_unpool,
    "max_unpool3d": _max_unpool,
    "rot90": _rot90,
    "repeat": _repeat,
}
