"""Depthwise convolution in 1D to 3D: each channel has a filter of its own.

    y[n, c, o] = bias[c] + Σ_k weight[c, k] · x[n, c, o·stride + k·dilation - padding]

    dx[n, c, i] = Σ_k weight[c, k] · dy[n, c, (i + padding - k·dilation) / stride]   where that is a whole position of y
    dweight[c, k] = Σ_n Σ_o dy[n, c, o] · x[n, c, o·stride + k·dilation - padding]
    dbias[c] = Σ_n Σ_o dy[n, c, o]

with positions o, i and taps k in up to three dimensions, x zero outside of its bounds, and sums in float32, or float64
for float64.

Saved for the backward pass: x and weight, as in plain torch.

Bytes moved, of b-byte elements, n of x and m of y: forward reads x and writes y, (n + m) b; the gradient of x reads dy
and writes dx, (n + m) b; the gradient of the weight reads x and dy, (n + m) b. That is the least. Each element is used
by up to K taps: a program loops over the taps of a tile, or of a part of tiles for the weight, whose elements it finds
in the cache after the first. Besides, a part's sums are written and read again, 4 bytes a tap and channel each. Parts
are of at least 40 K positions, of several samples where one has fewer. So the sums take at most a tenth of what dy
takes in float32, and those of a last part, which may have fewer, as much as the filters.

Sums are made in a fixed order: taps in order, a part's samples and positions in one program, parts by torch. No
atomics, so that results are the same in each run; cuDNN has algorithms that add the weight's gradient by atomics.
No layout is converted: channels last stays so, and y is laid out as x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, block_of, jit, launch, launches, tl, warps_of

_TILE = 1024
"""Elements that a program takes at a time."""
_LEAST_PART = 1024
"""Positions of which a program makes sums for the weight's gradient, at least."""
_PART_OF_TAPS = 40
"""So many times the taps, at least: so that the parts' sums are few bytes."""
_DIMS = 3
"""Kernels see all inputs in 3D: missing dimensions, first, are of one element."""


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """``F.conv3d(x, weight, bias, stride, padding, dilation, groups=C)``, or conv1d or conv2d, by x's dimensions.

    Gradients are the same in each run, bit for bit.

    Args:
        x: (N, C, ...) with one to three further dimensions, contiguous or channels last; other layouts are copied.
        weight: (C, 1, ...): a filter for each channel. Of x's dtype, unless within autocast.
        bias: (C,), or None. Of x's dtype, unless within autocast.
        stride, padding, dilation: one number, or one for each dimension.

    Returns:
        A tensor of x's dtype and layout, (N, C, ...) with torch's sizes.

    Raises:
        InputError: shapes, dtypes or options that do not fit, several filters a channel, and under ``torch.vmap``.

    Example:
        >>> x, weight = torch.randn(2, 8, 9, 9, requires_grad=True), torch.randn(8, 1, 3, 3)
        >>> depthwise_conv(x, weight, stride=2, padding=1).shape
        torch.Size([2, 8, 5, 5])
    """
    dims = x.dim() - 2
    if not 1 <= dims <= _DIMS or not x.is_floating_point():
        problem = f"x has the shape {tuple(x.shape)} and is of {x.dtype}"
        raise InputError(problem, expected="(N, C, ...) of floats, with one to three further dimensions")
    if weight.shape[:2] != (x.shape[1], 1) or weight.dim() != x.dim() or weight.numel() == 0:
        expected = f"({x.shape[1]}, 1, ...) of {x.dim()} dimensions, a filter for each channel of x"
        raise InputError(f"weight has the shape {tuple(weight.shape)}", expected=expected)
    if bias is not None and bias.shape != x.shape[1:2]:
        raise InputError(f"bias has the shape {tuple(bias.shape)}", expected=f"{tuple(x.shape[1:2])}")
    steps = [
        _numbers(name, value, dims, least)
        for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    ]
    if any(size < 1 for size in _sizes_of_result(x, weight, *steps)):
        problem = f"x has the shape {tuple(x.shape)}, with padding {tuple(steps[1])}"
        reach = tuple(d * (k - 1) + 1 for d, k in zip(steps[2], weight.shape[2:], strict=True))
        raise InputError(problem, expected=f"at least the filter's reach, {reach}")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.dtype != x.dtype:
            raise InputError(f"x is of {x.dtype}, {name} of {vector.dtype}", expected="one dtype", do="Use autocast")
    if not _is_dense(x):
        x = x.contiguous()
    return depthwise(x, weight.contiguous(), bias, *steps)


def _numbers(name: str, value: int | Sequence[int], dims: int, least: int) -> list[int]:
    """An option's number for each dimension."""
    numbers = [value] * dims if isinstance(value, int) else value
    if isinstance(numbers, str) or len(numbers) != dims or min(numbers) < least:
        expected = f"a number from {least} on, or {dims} of them"
        raise InputError(f"{name} is {value!r}", expected=expected)
    return list(numbers)


def _sizes_of_result(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Sizes of y, without samples and channels."""
    return [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]


def _is_dense(x: Tensor) -> bool:
    """Whether positions follow each other evenly, in each channel or with the channels of each innermost."""
    return x.is_contiguous() or x.is_contiguous(memory_format=_channels_last(x))


def _channels_last(x: Tensor) -> torch.memory_format:
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)


def _layout_of(x: Tensor) -> torch.memory_format:
    """The memory format of a dense tensor. Where channels or positions are one, both are: contiguous."""
    return torch.contiguous_format if x.is_contiguous() else _channels_last(x)


# The ops


@custom_op("memplan::depthwise", mutates_args=())
def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """y, laid out as x, which is contiguous or channels last; `weight` is contiguous."""
    if not launches(x, weight, bias):
        y = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), x.shape[1])
        return y.contiguous(memory_format=_layout_of(x))
    y = _empty_result(x, weight, bias, stride, padding, dilation)
    _convolve(x, weight, bias, y, stride, padding, dilation, transposed=False)
    return y


@depthwise.register_fake
def _empty_result(x, weight, bias, stride, padding, dilation):
    """Memory for y: the op's result on fake tensors."""
    sizes = _sizes_of_result(x, weight, stride, padding, dilation)
    return torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device=x.device, memory_format=_layout_of(x))


@custom_op("memplan::depthwise_backward", mutates_args=())
def depthwise_backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; those that are not wanted are empty."""
    d_y = d_y.contiguous(memory_format=_layout_of(x))
    if not launches(d_y, x, weight):
        return _backward(d_y, x, weight, stride, padding, dilation, wanted)
    results = d_x, d_weight, d_bias = _empty_gradients(d_y, x, weight, stride, padding, dilation, wanted)
    if wanted[0]:
        _convolve(
            d_y, weight, bias=None, result=d_x, stride=stride, padding=padding, dilation=dilation, transposed=True
        )
    if wanted[1] or wanted[2]:
        _sum_weight_gradient(d_y, x, weight, d_weight, d_bias, stride, padding, dilation)
    return results


@depthwise_backward.register_fake
def _empty_gradients(d_y, x, weight, stride, padding, dilation, wanted):
    return (
        torch.empty_like(x, memory_format=_layout_of(x)) if wanted[0] else x.new_empty(0),
        torch.empty_like(weight) if wanted[1] else x.new_empty(0),
        x.new_empty(x.shape[1] if wanted[2] else 0),
    )


def _save(ctx, inputs, output):
    """Save x and weight for the backward pass (`torch.library` calls this after the op)."""
    x, weight, _, *ctx.steps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx, d_y):
    """Gradients of the op's arguments, in their order."""
    wanted = ctx.needs_input_grad[:3]
    gradients = depthwise_backward(d_y, *ctx.saved_tensors, *ctx.steps, wanted)
    return *(gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)), None, None, None


depthwise.register_autograd(_differentiate, setup_context=_save)


@depthwise.register_vmap
def _(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.depthwise_conv does not run under torch.vmap", do="Call it on the whole batch of samples"
    )


# In plain torch


def _backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, of no elements where they are not wanted."""
    d_x, d_weight, d_bias = torch.ops.aten.convolution_backward(
        d_y, x, weight, [x.shape[1]], stride, padding, dilation, False, [0] * len(stride), x.shape[1], list(wanted)
    )
    return (
        d_x.contiguous(memory_format=_layout_of(x)) if wanted[0] else x.new_empty(0),
        d_weight.contiguous() if wanted[1] else x.new_empty(0),
        d_bias if wanted[2] else x.new_empty(0),
    )


# In Triton


@jit
def _source_of(
    position, tap, of_h, of_w, from_d, from_h, from_w, stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
    dilation_d, dilation_h, dilation_w, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The position of the source that a tap reads for each position of the result, and whether there is one.

    The result has of_h x of_w positions in its last dimensions, the source from_d x from_h x from_w. TRANSPOSED: the
    result is the gradient of the convolution's input, and the source that of its result.
    """
    d, h, w = position // (of_h * of_w), position // of_w % of_h, position % of_w
    tap_d, tap_h, tap_w = tap // (TAPS_H * TAPS_W), tap // TAPS_W % TAPS_H, tap % TAPS_W
    if TRANSPOSED:
        d += padding_d - tap_d * dilation_d
        h += padding_h - tap_h * dilation_h
        w += padding_w - tap_w * dilation_w
        inside = (d >= 0) & (h >= 0) & (w >= 0)
        inside = inside & (d % stride_d == 0) & (h % stride_h == 0) & (w % stride_w == 0)
        d, h, w = d // stride_d, h // stride_h, w // stride_w
    else:
        d = d * stride_d + tap_d * dilation_d - padding_d
        h = h * stride_h + tap_h * dilation_h - padding_h
        w = w * stride_w + tap_w * dilation_w - padding_w
        inside = (d >= 0) & (h >= 0) & (w >= 0)
    inside = inside & (d < from_d) & (h < from_h) & (w < from_w)
    return (d.to(tl.int64) * from_h + h) * from_w + w, inside


@jit
def depthwise_kernel(
    source, weight, bias, result, channels, positions, parts, of_h, of_w, from_d, from_h, from_w,
    stride_d, stride_h, stride_w, padding_d, padding_h, padding_w, dilation_d, dilation_h, dilation_w,
    result_channel_stride, result_position_stride, source_channel_stride, source_position_stride,
    TAPS: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program for CHANNELS channels and POSITIONS positions of a sample of the result: y from x, or, TRANSPOSED, dx
    from dy. A sample has ``parts`` ranges of POSITIONS positions; sizes are those of `_source_of`."""
    sample_part = tl.program_id(0)
    sample = (sample_part // parts).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    position = (sample_part % parts) * POSITIONS + tl.arange(0, POSITIONS)
    present = channel < channels
    within = position < positions
    source += sample * channels * from_d * from_h * from_w
    channel_offset = channel.to(tl.int64)[:, None] * source_channel_stride
    total = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)[:, None]
    for tap in range(TAPS):
        source_index, inside = _source_of(
            position, tap, of_h, of_w, from_d, from_h, from_w, stride_d, stride_h, stride_w,
            padding_d, padding_h, padding_w, dilation_d, dilation_h, dilation_w, TAPS_H, TAPS_W, TRANSPOSED,
        )  # fmt: skip
        inside = present[:, None] & (inside & within)[None, :]
        source_offset = channel_offset + source_index[None, :] * source_position_stride
        values = tl.load(source + source_offset, mask=inside, other=0.0)
        factor = tl.load(weight + channel.to(tl.int64) * TAPS + tap, mask=present, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)[:, None]
    result_offset = sample * channels * positions + channel.to(tl.int64)[:, None] * result_channel_stride
    result_offset += position.to(tl.int64)[None, :] * result_position_stride
    tl.store(result + result_offset, total.to(result.dtype.element_ty), mask=present[:, None] & within[None, :])


@jit
def weight_gradient_kernel(
    d_y, x, sums, samples, channels, positions, parts, samples_of_part, length, of_h, of_w, from_d, from_h, from_w,
    stride_d, stride_h, stride_w, padding_d, padding_h, padding_w, dilation_d, dilation_h, dilation_w,
    result_channel_stride, result_position_stride, source_channel_stride, source_position_stride,
    TAPS: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program for CHANNELS channels and a part of dy, `length` positions of each of `samples_of_part` samples: its
    sums for each tap, and for the bias in a further row. ROWS is TAPS, with a bias one more."""
    program = tl.program_id(0)
    first = program // parts * samples_of_part
    last = tl.minimum(first + samples_of_part, samples)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    present = channel < channels
    d_y_channel_offset = channel.to(tl.int64)[:, None] * result_channel_stride
    x_channel_offset = channel.to(tl.int64)[:, None] * source_channel_stride
    begin = (program % parts) * length
    end = tl.minimum(begin + length, positions)
    tiles = tl.cdiv(end - begin, POSITIONS)
    for tap in range(ROWS):
        total = tl.zeros((CHANNELS, POSITIONS), tl.float32)
        for tile in range(tiles * (last - first)):
            sample = tl.cast(first + tile // tiles, tl.int64) * channels  # channels of earlier samples
            position = begin + tile % tiles * POSITIONS + tl.arange(0, POSITIONS)
            within = position < end
            source_index, inside = _source_of(
                position, tap, of_h, of_w, from_d, from_h, from_w, stride_d, stride_h, stride_w,
                padding_d, padding_h, padding_w, dilation_d, dilation_h, dilation_w, TAPS_H, TAPS_W, False,
            )  # fmt: skip
            inside = inside & (tap < TAPS)
            offset = sample * positions + d_y_channel_offset + position.to(tl.int64)[None, :] * result_position_stride
            grad = tl.load(d_y + offset, mask=present[:, None] & within[None, :], other=0.0).to(tl.float32)
            inside = present[:, None] & (inside & within)[None, :]
            x_offset = sample * from_d * from_h * from_w + x_channel_offset
            x_offset += source_index[None, :] * source_position_stride
            values = tl.load(x + x_offset, mask=inside, other=0.0).to(tl.float32)
            values = tl.where(tap < TAPS, values, 1.0)  # in the bias's row, dy alone is summed
            total += grad * values
        sums_offset = (program.to(tl.int64) * ROWS + tap) * channels + channel
        tl.store(sums + sums_offset, tl.sum(total, 1), mask=present)


@dataclass(frozen=True)
class _Geometry:
    """A convolution's sizes in 3D, as arguments of the kernels. The result is what positions are of."""

    result: Tensor
    source: Tensor
    weight: Tensor
    steps: tuple[Sequence[int], Sequence[int], Sequence[int]]
    """Stride, padding and dilation."""

    def _in_3d(self, numbers: Sequence[int], filler: int = 1) -> list[int]:
        """The numbers of each dimension, with a ``filler`` for missing dimensions, which come first."""
        return [filler] * (_DIMS - len(numbers)) + list(numbers)

    @property
    def positions(self) -> int:
        return self.result.shape[2:].numel()

    @property
    def sizes(self) -> list[int]:
        """Arguments of the kernels, in their order: sizes of the result in its last two dimensions, of the source,
        stride, padding, dilation, and the strides of channels and positions in result and source."""
        stride, padding, dilation = self.steps
        channels_last = not self.result.is_contiguous() or not self.source.is_contiguous()
        channels = self.result.shape[1]
        strides = [
            number
            for tensor in (self.result, self.source)
            for number in ((1, channels) if channels_last else (tensor.shape[2:].numel(), 1))
        ]
        return [
            *self._in_3d(self.result.shape[2:])[1:], *self._in_3d(self.source.shape[2:]),
            *self._in_3d(stride), *self._in_3d(padding, filler=0), *self._in_3d(dilation), *strides,
        ]  # fmt: skip

    @property
    def taps(self) -> dict[str, int]:
        """Taps of a filter, and in its last two dimensions."""
        sizes = self._in_3d(self.weight.shape[2:])
        return {"TAPS": self.weight.shape[2:].numel(), "TAPS_H": sizes[1], "TAPS_W": sizes[2]}

    def tile(self, most_channels: int) -> dict[str, int]:
        """Channels and positions of a tile, and warps."""
        if self.result.is_contiguous() and self.source.is_contiguous():
            positions = block_of(self.positions, _TILE)
            channels = max(1, _TILE // positions)
        else:
            channels = block_of(self.result.shape[1], most_channels)
            positions = max(1, _TILE // channels)
        return {"CHANNELS": channels, "POSITIONS": positions, "num_warps": warps_of(channels * positions)}


def _convolve(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    result: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    transposed: bool,
) -> None:
    """Write y from x, or dx from dy."""
    geometry = _Geometry(result, source, weight, (stride, padding, dilation))
    tile = geometry.tile(most_channels=64)
    samples, channels, parts = *result.shape[:2], -(-geometry.positions // tile["POSITIONS"])
    launch(
        depthwise_kernel, (samples * parts, -(-channels // tile["CHANNELS"])),
        source, weight, weight if bias is None else bias, result, channels, geometry.positions, parts, *geometry.sizes,
        **geometry.taps, TRANSPOSED=transposed, BIAS=bias is not None, **tile,
    )  # fmt: skip


def parts_of(samples: int, positions: int, taps: int, tile: int = 1) -> tuple[int, int, int]:
    """How programs share dy to sum the gradient of a filter: (number of parts, samples of a part, positions of each of
    these samples). Parts smaller than a sample have full tiles.

    A part has enough positions (`least`) that the sums, a number for each tap, are few compared to dy.
    """
    least = max(_LEAST_PART, _PART_OF_TAPS * taps)
    if positions < 2 * least:
        samples_of_part = max(1, min(samples, -(-least // max(1, positions))))
        return -(-samples // samples_of_part), samples_of_part, positions
    equal_length = -(-positions // (positions // least))
    length = -(-equal_length // tile) * tile
    return samples * -(-positions // length), 1, length


def _sum_weight_gradient(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> None:
    """Write the gradients of weight and bias, where they have elements: sums of parts by a kernel, and their sum."""
    geometry = _Geometry(d_y, x, weight, (stride, padding, dilation))
    tile, taps = geometry.tile(most_channels=16), geometry.taps
    samples, channels = d_y.shape[:2]
    programs, samples_of_part, length = parts_of(samples, geometry.positions, taps["TAPS"], tile["POSITIONS"])
    parts, rows = -(-geometry.positions // length), taps["TAPS"] + (d_bias.numel() > 0)
    sums = d_y.new_empty((programs, rows, channels), dtype=accumulated(d_y.dtype))
    launch(
        weight_gradient_kernel, (programs, -(-channels // tile["CHANNELS"])),
        d_y, x, sums, samples, channels, geometry.positions, parts, samples_of_part, length, *geometry.sizes, **taps,
        ROWS=rows, **tile,
    )  # fmt: skip
    total = sums[0] if programs == 1 else sums.sum(0)  # (rows, C)
    if d_weight.numel():
        d_weight.view(channels, -1).copy_(total[: taps["TAPS"]].t())
    if d_bias.numel():
        d_bias.copy_(total[-1])
