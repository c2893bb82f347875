"""Field rules of ops that rearrange positions: pixel shuffle, im2col and col2im, unfold, unpooling, rot90, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.checks.fields.op_call import Call, Rule, option_at, shifted
from memplan.checks.fields.spans import IDENTITY, Span
from memplan.checks.fields.tensor_fields import Dim, Fields, after_op, size_of, unknown, untraced, viewed


def _variance(taps: int) -> float:
    """Return the variance of the positions of a kernel with this many taps and equal weights."""
    return (taps * taps - 1) / 12


def _view_permute_view(fields: Fields, shape: Sequence[int], order: Sequence[int], result: Sequence[int]) -> Fields:
    """Return the fields after ``x.view(shape).permute(order).view(result)``."""
    split = viewed(fields, shape)
    return viewed(tuple(split[dim] for dim in order), result)


def _pixel_shuffle(call: Call) -> Fields:
    """Receptive fields after a pixel shuffle by r: (*, C r r, H, W) to (*, C, H r, W r)."""
    *lead, channels, height, width = (size_of(dim) for dim in call.operand)
    r, n = int(call.form.option("upscale_factor", 1)), len(lead)
    shape = (*lead, channels // (r * r), r, r, height, width)
    return _view_permute_view(call.operand, shape, (*range(n), n, n + 3, n + 1, n + 4, n + 2), call.shape)


def _pixel_unshuffle(call: Call) -> Fields:
    """Receptive fields after a pixel unshuffle by r: (*, C, H r, W r) to (*, C r r, H, W)."""
    *lead, channels, height, width = (size_of(dim) for dim in call.operand)
    r, n = int(call.form.option("downscale_factor", 1)), len(lead)
    shape = (*lead, channels, height // r, r, width // r, r)
    return _view_permute_view(call.operand, shape, (*range(n), n, n + 2, n + 4, n + 1, n + 3), call.shape)


def _after_kernel(dim: Dim, size: int, call: Call, window: Span | None, spread: float = 0.0) -> Dim:
    """Return a dimension of ``size`` positions after a kernel slid along it. ``window`` are the positions of the
    operand that each new position reads, None if unknown, and ``spread`` is their variance."""

    def change(span: Span) -> Span | None:
        return span.through_window(window) if window is not None else None

    return after_op(dim, size, call.form.op, change, is_spatial=True, spread=spread)


class _Window(NamedTuple):
    """Kernel of im2col or col2im along a dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def is_disjoint(self) -> bool:
        """Whether the positions of the kernel cover each input position at most once, and none of the padding."""
        return self.kernel == self.stride and self.padding == 0 and self.dilation == 1

    def positions(self, size: int) -> int:
        """Return the number of positions of the kernel along a dimension of this size (formula of `nn.Unfold`)."""
        return (size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


def _windows(call: Call) -> tuple[_Window, _Window]:
    """Return the kernel of im2col or col2im along height and width."""
    names = (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
    height, width = (
        _Window(*(option_at(call.form.option(name), dim, default) for name, default in names)) for dim in range(2)
    )
    return height, width


def _im2col(call: Call) -> Fields:
    """Receptive fields after im2col: (N, C, H, W) to (N, C * kernel, positions of the kernel)."""
    dims = call.operand
    if len(dims) != 4:
        return unknown(call.shape)
    windows = _windows(call)
    batch, channels, *sizes = map(size_of, dims)
    counts = [window.positions(size) for window, size in zip(windows, sizes, strict=True)]
    if all(window.is_disjoint for window in windows):  # a crop, a view and a permutation
        (rows, columns), (kh, kw) = counts, (window.kernel for window in windows)
        cropped = (
            *dims[:2], shifted(dims[2], rows * kh, call.form.op), shifted(dims[3], columns * kw, call.form.op)
        )  # fmt: skip
        shape = (batch, channels, rows, kh, columns, kw)
        return _view_permute_view(cropped, shape, (0, 1, 3, 5, 2, 4), call.shape)
    height, width = (
        _after_kernel(dim, count, call, IDENTITY.window(*window), _variance(window.kernel) * window.dilation**2)
        for dim, count, window in zip(dims[2:], counts, windows, strict=True)
    )
    return (dims[0], untraced(call.shape[1]), (*height, *width))


def _col2im(call: Call) -> Fields:
    """Receptive fields after col2im, which sums overlapping patches: (N, C * kernel, positions of the kernel) to
    (N, C, H, W)."""
    dims = call.operand
    if len(dims) != 3:
        return unknown(call.shape)
    windows = _windows(call)
    batch, channels, *sizes = call.shape
    rows, columns = (window.positions(size) for window, size in zip(windows, sizes, strict=True))
    kh, kw = (window.kernel for window in windows)
    if all(window.is_disjoint for window in windows) and [rows * kh, columns * kw] == sizes:
        return _view_permute_view(dims, (batch, channels, kh, kw, rows, columns), (0, 1, 4, 2, 5, 3), call.shape)
    split = viewed(dims, (batch, channels * kh * kw, rows, columns))
    spatial = [
        _after_kernel(dim, size, call, IDENTITY.transposed(*window))
        for dim, size, window in zip(split[2:], sizes, windows, strict=True)
    ]
    return (split[0], untraced(channels), *spatial)


def _unfold(call: Call) -> Fields:
    """Receptive fields after `Tensor.unfold`: windows along a dimension, whose elements become the last dimension."""
    dims, form = call.operand, call.form
    axis = int(form.option("dimension", 0)) % len(dims)
    size, step, count = int(form.option("size", 1)), int(form.option("step", 1)), call.shape[axis]
    if size == step:  # windows without overlap: a crop and a view
        outer, inner = viewed((shifted(dims[axis], count * size, form.op),), (count, size))
    else:
        outer = _after_kernel(dims[axis], count, call, IDENTITY.window(size, step), _variance(size))
        inner = untraced(size)
    return (*dims[:axis], outer, *dims[axis + 1 :], inner)


def _max_unpool(call: Call) -> Fields:
    """Receptive fields after unpooling: each value returns to its position in the window of the max pool that computed
    the indices, as in a transposed convolution."""
    indices = call.form.read("indices")
    pool = call.makers.get(indices.storage) if indices is not None else None
    if pool is None or not pool.name.startswith("max_pool"):
        return unknown(call.shape)
    kernel, padding = pool.form.option("kernel_size"), pool.form.option("padding", 0)
    stride = pool.form.option("stride") or kernel
    first = len(call.operand) - len(kernel)
    spatial: list[Dim] = []
    for n, (dim, size) in enumerate(zip(call.operand[first:], call.shape[first:], strict=True)):
        window = IDENTITY.transposed(option_at(kernel, n), option_at(stride, n), option_at(padding, n, 0))
        spatial.append(_after_kernel(dim, size, call, window))
    return (*call.operand[:first], *spatial)


def _rot90(call: Call) -> Fields:
    """Receptive fields after a rotation: each quarter turn flips one of the two dimensions and swaps them."""
    dims = list(call.operand)
    first, second = call.dims("dims", len(dims))
    for _ in range(int(call.form.option("k", 1)) % 4):
        size = size_of(dims[second])
        flipped = shifted(dims[second], size, call.form.op, offset=size - 1, step=-1)
        dims[first], dims[second] = flipped, dims[first]
    return tuple(dims)


def _repeat(call: Call) -> Fields:
    """Receptive fields after `Tensor.repeat`: dimensions that are copied several times, or added, cannot be traced."""
    repeats = call.form.option("repeats", ())
    added = len(repeats) - len(call.operand)
    copied = zip(call.operand, repeats[added:], call.shape[added:], strict=True)
    return (*unknown(call.shape[:added]), *(dim if count == 1 else untraced(size) for dim, count, size in copied))


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
