"""Ops that take positions apart and put them together again: patches, shuffled pixels, unpooling, turns."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.checks.fields.op_call import Call, Rule, at, shifted
from memplan.checks.fields.spans import IDENTITY, Span
from memplan.checks.fields.tensor_fields import Dim, Factor, Fields, charged, mapped, resolved, size_of, unknown, viewed


def _apart(fields: Fields, shape: Sequence[int], order: Sequence[int], wanted: Sequence[int]) -> Fields:
    """Return a view, a permutation, and a view again."""
    split = viewed(fields, shape)
    return viewed(tuple(split[place] for place in order), wanted)


def _shuffled(call: Call) -> Fields:
    """Follow pixel_shuffle: (C r r, H, W) to (C, H r, W r)."""
    *lead, channels, high, wide = (size_of(dim) for dim in call.main)
    r, n = int(call.form.option("upscale_factor", 1)), len(call.main) - 3
    shape = (*lead, channels // (r * r), r, r, high, wide)
    return _apart(call.main, shape, (*range(n), n, n + 3, n + 1, n + 4, n + 2), call.shape)


def _unshuffled(call: Call) -> Fields:
    """Follow pixel_unshuffle: (C, H r, W r) to (C r r, H, W)."""
    *lead, channels, high, wide = (size_of(dim) for dim in call.main)
    r, n = int(call.form.option("downscale_factor", 1)), len(call.main) - 3
    shape = (*lead, channels, high // r, r, wide // r, r)
    return _apart(call.main, shape, (*range(n), n, n + 2, n + 4, n + 1, n + 3), call.shape)


def _slid(dim: Dim, size: int, call: Call, change: Span | None, spread: float = 0.0) -> Dim:
    """Return a dimension after a kernel slid along it; ``change`` is the field of one step, of a tensor that sees
    itself."""
    axis = resolved(dim)
    moved = mapped(axis, lambda span: _after(span, change), windowed=True, spread=spread)
    return (Factor(size, charged(axis, size_of(dim), moved, size, call.form.op)),)


def _after(span: Span, change: Span | None) -> Span | None:
    if change is None:
        return None
    seen = lambda place: range(change.low(place), change.high(place) + 1)  # noqa: E731
    return span.through(change.period, change.advance, seen)


def _windows(call: Call) -> list[tuple[int, int, int, int]]:
    """Return kernel, stride, padding and dilation of im2col and col2im, for each dimension."""
    form = call.form
    names = (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
    return [tuple(at(form.option(name), n, least) for name, least in names) for n in range(2)]  # pyright: ignore[reportReturnType]  # four


def _counts(sizes: Sequence[int], windows: Sequence[tuple[int, int, int, int]]) -> list[int]:
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, (k, s, p, d) in zip(sizes, windows, strict=True)]


def _side_by_side(windows: Sequence[tuple[int, int, int, int]]) -> bool:
    return all(k == s and p == 0 and d == 1 for k, s, p, d in windows)


def _patches(call: Call) -> Fields:
    """Follow im2col: (N, C, H, W) to (N, C kernel, positions). Patches side by side only take positions apart."""
    dims, windows = call.main, _windows(call)
    if len(dims) != 4:
        return unknown(call.shape)
    counts = _counts([size_of(dim) for dim in dims[2:]], windows)
    if _side_by_side(windows):
        (high, wide), (kh, kw) = counts, (window[0] for window in windows)
        cut = (
            *dims[:2],
            *(shifted(d, n * k, 0, 1, call.form.op) for d, n, k in zip(dims[2:], counts, (kh, kw), strict=True)),
        )
        batch, channels = (size_of(dim) for dim in dims[:2])
        return _apart(cut, (batch, channels, high, kh, wide, kw), (0, 1, 3, 5, 2, 4), call.shape)
    slid = [
        _slid(dim, count, call, IDENTITY.window(k, s, p, d), (k * k - 1) / 12 * d * d)
        for dim, count, (k, s, p, d) in zip(dims[2:], counts, windows, strict=True)
    ]
    return (dims[0], (Factor(call.shape[1]),), (*slid[0], *slid[1]))


def _put_together(call: Call) -> Fields:
    """Follow col2im: (N, C kernel, positions) to (N, C, H, W): what overlaps is added up."""
    dims, windows = call.main, _windows(call)
    if len(dims) != 3:
        return unknown(call.shape)
    batch, channels = call.shape[:2]
    high, wide = _counts(call.shape[2:], windows)
    kh, kw = (window[0] for window in windows)
    if _side_by_side(windows) and (high * kh, wide * kw) == call.shape[2:]:
        return _apart(dims, (batch, channels, kh, kw, high, wide), (0, 1, 4, 2, 5, 3), call.shape)
    split = viewed(dims, (batch, channels * kh * kw, high, wide))
    back = [
        _slid(dim, size, call, IDENTITY.transposed(k, s, p, d))
        for dim, size, (k, s, p, d) in zip(split[2:], call.shape[2:], windows, strict=True)
    ]
    return (split[0], (Factor(channels),), *back)


def _unfolded(call: Call) -> Fields:
    """Follow Tensor.unfold: windows along a dimension, whose taps become the last one."""
    dims, form = list(call.main), call.form
    place = int(form.option("dimension", 0)) % len(dims)
    size, step, count = int(form.option("size", 1)), int(form.option("step", 1)), call.shape[place]
    if size == step:
        outer, inner = viewed((shifted(dims[place], count * size, 0, 1, call.form.op),), (count, size))
        return (*dims[:place], outer, *dims[place + 1 :], inner)
    slid = _slid(dims[place], count, call, IDENTITY.window(size, step), (size * size - 1) / 12)
    return (*dims[:place], slid, *dims[place + 1 :], (Factor(size),))


def _unpooled(call: Call) -> Fields:
    """Follow max_unpool: each value goes back to where it was the largest, somewhere in the window of the pool."""
    indices = call.form.read("indices")
    maker = call.makers.get(indices.storage) if indices is not None else None
    if maker is None or not maker.name.startswith("max_pool"):
        return unknown(call.shape)
    kernel, padding = maker.form.option("kernel_size"), maker.form.option("padding", 0)
    stride = maker.form.option("stride") or kernel
    first = len(call.main) - len(kernel)
    back = [
        _slid(dim, size, call, IDENTITY.transposed(at(kernel, n), at(stride, n), at(padding, n, 0)))
        for n, (dim, size) in enumerate(zip(call.main[first:], call.shape[first:], strict=True))
    ]
    return (*call.main[:first], *back)


def _turned(call: Call) -> Fields:
    """Follow rot90: a flip of one of two dimensions for each quarter, and the two exchanged."""
    dims = list(call.main)
    first, second = call.dims("dims", len(dims))
    for _ in range(int(call.form.option("k", 1)) % 4):
        size = size_of(dims[second])
        dims[first], dims[second] = shifted(dims[second], size, size - 1, -1, call.form.op), dims[first]
    return tuple(dims)


def _repeated(call: Call) -> Fields:
    """Follow repeat: dimensions that are repeated once stay what they are."""
    times = call.form.option("repeats", ())
    extra = len(times) - len(call.main)
    kept = [dim if count == 1 else (Factor(size),)
            for dim, count, size in zip(call.main, times[extra:], call.shape[extra:], strict=True)]  # fmt: skip
    return (*unknown(call.shape[:extra]), *kept)


REARRANGING: dict[str, Rule] = {
    "pixel_shuffle": _shuffled,
    "pixel_unshuffle": _unshuffled,
    "im2col": _patches,
    "col2im": _put_together,
    "unfold": _unfolded,
    "max_unpool2d": _unpooled,
    "max_unpool3d": _unpooled,
    "rot90": _turned,
    "repeat": _repeated,
}
