"""Temporaries of ``aten.convolution`` and its backward where oneDNN runs them.

ATen/native/mkldnn/Conv.cpp asks oneDNN which layout it wants ("any"), reorders the input and the weight
into it, computes, and reorders the result back. oneDNN's choice (x64/cpu_convolution_list.cpp, and each
kernel's ``init_conf``) falls into three kinds here:

- blocked: channels in blocks of 16 (8, 4), padded where there is one group ("aBcd16b");
- channels last ("acdb"), for strided gradients, transposed convolution and bfloat16 with AMX;
- plain, an im2col and a matrix product, for the shapes that no kernel takes.

Seen in torch 2.13 with oneDNN's verbose mode on AVX512 with AMX. The blocks of 8 elsewhere are oneDNN's
documented ones, unverified.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu import im2col_convolution, onednn_avx2
from memplan.trace.semantics.cpu.onednn import (
    Shape,
    Work,
    group_block,
    image_scratch,
    plain,
    plain_weight_gradient,
    to_unit_stride,
    weight_gradient_to_unit_stride,
)
from memplan.trace.semantics.layout import (
    bytes_of,
    copied_to,
    has_amx,
    level_2_cache,
    padded,
    simd,
    suggests_channels_last,
)


def _by_avx2(s: Shape) -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and not s.bf16


def _forward(s: Shape) -> Work:
    b = simd()
    if s.depthwise:
        if s.volumetric:
            return Work(s.wide_bytes(), s.weight_bytes(1, b), s.narrow_bytes(), last=True)
        if max(s.kernel) > 14:
            return plain(s, s.narrow_bytes(), level_2_cache() * 4 // 5)
        return Work(s.wide_bytes(b), s.weight_bytes(1, b), s.narrow_bytes(b))
    if s.bf16 and has_amx():
        scratch = image_scratch(s, s.wide_space, padded(s.wide // s.groups, 32), False)
        return Work(s.wide_bytes(), s.weight_bytes(2, 16), s.narrow_bytes(), scratch, last=True)
    if _by_avx2(s) and onednn_avx2.goes_by_columns(s):
        return plain(s, s.narrow_bytes(), level_2_cache() * 4 // 5)
    if s.groups > 1:
        block = group_block(s)
        if block == 1:
            return plain(s, s.narrow_bytes(), level_2_cache() * 4 // 5)
        return Work(s.wide_bytes(), s.weight_bytes(), s.narrow_bytes())
    if s.wide < b and not s.simple:  # ``is_1stconv``, ``flat``
        return Work(0, s.weight_bytes(1, b), s.narrow_bytes(b))
    scratch = 0
    if s.simple and s.strided:  # reduces to unit stride, an image a thread
        scratch = to_unit_stride(s, padded(s.wide, b))
    return Work(s.wide_bytes(b), s.weight_bytes(b, b), s.narrow_bytes(b), scratch)


def _data_gradient(s: Shape) -> Work:
    """Source: the output's gradient. Result: the input's."""
    b = simd()
    if s.depthwise:
        if s.volumetric or s.dilated:
            return plain(s, s.wide_bytes())
        if s.strided and s.bf16 and has_amx():
            scratch = image_scratch(s, s.narrow_space, 32, True)
            return Work(s.narrow_bytes(), 32 * s.weight_bytes(), s.wide_bytes(), scratch, last=True)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), s.wide_bytes(b))
    amx = s.bf16 and has_amx()
    if s.strided and s.dilated and s.groups == 1 and not amx:
        return plain(s, s.wide_bytes())
    if _by_avx2(s) and s.groups > 1 and s.strided and s.narrow // s.groups <= b:
        return plain(s, s.wide_bytes())
    per_group = min(s.wide, s.narrow) // s.groups
    if amx or (s.strided and (s.groups == 1 or per_group >= 2 * b or group_block(s) == 1)):
        scratch = image_scratch(s, s.narrow_space, padded(s.narrow // s.groups, 32 if s.bf16 else 1), True)
        weight = s.weight_bytes(32, 32) if s.bf16 else s.weight_bytes(b, 1)
        return Work(s.narrow_bytes(), weight, s.wide_bytes(), scratch, last=True)
    if s.groups > 1:
        if group_block(s) == 1:
            return plain(s, s.wide_bytes())
        return Work(s.narrow_bytes(), s.weight_bytes(), s.wide_bytes())
    return Work(s.narrow_bytes(b), s.weight_bytes(b, b), s.wide_bytes(b))


def _in_place(s: Shape, data_gradient: bool) -> Work:
    """On channels-last tensors only the weight is reordered: oneDNN reads and writes the rest as it is."""
    work = _data_gradient(s) if data_gradient else _forward(s)
    if s.depthwise or s.bf16:
        return replace(work, weight=s.weight_bytes(1, simd()))
    if s.groups > 1:
        narrow = s.groups * padded(s.narrow // s.groups, simd())
        wide = padded(s.wide // s.groups, simd())
        return Work(0, narrow * wide * prod(s.kernel) * s.itemsize, 0)
    block = simd()
    weight = s.weight_bytes(block, 1) if data_gradient else s.weight_bytes(1, block)
    return Work(0, weight, 0, work.scratch if data_gradient else 12_288)


def _in_place_weight_gradient(s: Shape, bias: bool) -> Work:
    """Return the same for the weight's gradient; every group's channels are padded, the bias's too."""
    few = s.depthwise and max(s.kernel) <= 3 and not s.dilated and not s.low
    if _by_avx2(s) and s.groups == 1:
        return onednn_avx2.weight_gradient(s, last=True)
    if s.groups == 1 or few:
        return _weight_gradient(s)
    narrow = s.groups * padded(s.narrow // s.groups, simd())
    weight = narrow * padded(s.wide // s.groups, simd()) * prod(s.kernel) * s.itemsize
    return Work(0, weight, 0, narrow * s.itemsize + _ALIGNED if bias and narrow > s.narrow else 0)


@functools.lru_cache(maxsize=4096)
def _shared_by(s: Shape, block: int, threads: int) -> int:
    """Threads that share the weight gradient's batch: jit_avx512_common_conv_kernel.cpp, balance().

    The costs of a weight's read and write are those that fit what was measured.
    """
    weight_cost, steps = (12, 1) if s.pointwise else (5, s.steps)
    if threads < s.groups:
        return 1
    threads //= s.groups
    blocks_wide = -(-(s.wide // s.groups) // block)
    blocks_narrow = -(-(s.narrow // s.groups) // block)
    best, cost = 1, None
    for batch in range(1, min(threads, s.batch) + 1):
        for narrow in range(1, min(threads // batch, blocks_narrow) + 1):
            wide = min(threads // batch // narrow, blocks_wide)
            images, n, w = -(-s.batch // batch), -(-blocks_narrow // narrow), -(-blocks_wide // wide)
            bill = images * w * block * prod(s.wide_space) // steps
            bill += images * n * block * prod(s.narrow_space)
            bill += weight_cost * n * w * block * block * prod(s.kernel)
            if cost is None or bill <= cost:
                best, cost = batch, bill
    return best


def _batch_threads(s: Shape, block: int) -> int:
    return _shared_by(s, block, torch.get_num_threads())


def _weight_gradient(s: Shape) -> Work:
    """Sources: the output's gradient and the input."""
    b = simd()
    if s.depthwise:
        if s.volumetric or s.dilated or s.low or max(s.kernel) > 3 or (s.pointwise and s.strided):
            return plain_weight_gradient(s)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), 0, other=s.wide_bytes(b))
    if s.bf16 and has_amx():
        return _weight_gradient_amx(s)
    if s.groups > 1:
        if group_block(s) < 8:
            return plain_weight_gradient(s)
        if _by_avx2(s):
            return onednn_avx2.weight_gradient(s)
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, other=s.wide_bytes())
    if _by_avx2(s):
        return onednn_avx2.weight_gradient(s)
    if max(s.kernel) > 14:  # a ViT's patches
        return plain_weight_gradient(s)
    if s.volumetric and s.kernel[0] > 1 and s.wide_space[0] <= s.kernel[0] // 2 + 1:
        return plain_weight_gradient(s)  # measured: padding in front and behind that meets in the depth
    weight, block, other = s.weight_bytes(b, b), b, s.wide_bytes(b)
    if not s.simple:
        if s.wide <= 3:
            weight, other = s.weight_bytes(1, b), 0
        elif s.wide < b:
            if s.dilated or (s.volumetric and any(s.padding)):
                return plain_weight_gradient(s)
            weight, block, other = s.weight_bytes(8, 8), 8, s.wide_bytes(8)
        elif s.dilated and (s.volumetric or s.strided):
            return plain_weight_gradient(s)
    others = _batch_threads(s, block) - 1 if block == 16 else 0
    scratch = others * weight + (8_320 if others else 0) + weight_gradient_to_unit_stride(s, block)
    return Work(s.narrow_bytes(block), weight, 0, scratch, other=other)


def _weight_gradient_amx(s: Shape) -> Work:
    """brgemm accumulates in float32 and transposes images; the transposed images are approximate."""
    weight, batch = s.weight_bytes(32, 16), _batch_threads(s, 16)
    image = 2 * s.wide_bytes() // s.batch + s.narrow_bytes() // s.batch
    scratch = batch * (2 * weight + min(image, 300_000)) + 20_480
    return Work(s.narrow_bytes(), weight, 0, scratch, True, s.wide_bytes())


def _shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: Sequence[int],
    steps: tuple[Sequence[int], Sequence[int], Sequence[int]],
    transposed: bool,
    groups: int,
) -> Shape:
    """``x`` and ``y`` are the op's input and output, also where it is transposed."""
    into, out = (tuple(y), tuple(x.shape)) if transposed else (tuple(x.shape), tuple(y))
    bf16 = x.dtype in (torch.bfloat16, torch.float16)
    wide_space, narrow_space, kernel = into[2:], out[2:], tuple(weight.shape[2:])
    if len(kernel) == 1:  # view1d_as_2d
        wide_space, narrow_space, kernel = (1, *wide_space), (1, *narrow_space), (1, *kernel)
    dilated = any(v > 1 for v in steps[2]) and prod(kernel) > 1
    padding = (*(0,) * (len(kernel) - len(steps[1])), *steps[1])
    channels = x.shape[0], into[1], out[1]
    low = _is_low(wide_space, narrow_space, kernel, padding, steps[0])
    kind = groups, prod(steps[0]), padding, dilated, x.element_size(), bf16, low
    return Shape(*channels, wide_space, narrow_space, kernel, *kind)


def _is_low(
    wide: Sequence[int], narrow: Sequence[int], kernel: Sequence[int], padding: Sequence[int], strides: Sequence[int]
) -> bool:
    """See `Shape.low`; measured, by the last two dimensions of each."""
    step = strides[-2] if len(strides) > 1 else 1
    firsts = range(-padding[-2], narrow[-2] * step - padding[-2], step)
    return not any(0 <= first <= wide[-2] - kernel[-2] for first in firsts) or strides[-1] > kernel[-1]


def _finish(work: Work, result: int, before: int) -> int:
    """Peak of a call whose result is reordered into a plain tensor (``mkldnn_to_dense``)."""
    running = work.source + work.other + work.weight + work.result + work.scratch + before
    return max(running, work.result + result * (2 if work.last else 1))


def resized(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return a transposed convolution of volumes, where oneDNN does not run: the result is made as large as the input,
    then resized, which gives nothing back.

    Source: aten/src/ATen/native/NaiveConvolutionTranspose3d.cpp, `slow_conv_transpose3d_cpu`.
    """
    x, weight, _, stride, _, dilation, transposed, outpad, groups = args[:9]
    if not transposed or groups > 1 or x.dim() != 5 or x.numel() <= result.numel():
        return result
    if uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return result
    return result.new_empty(x.numel()).as_strided(result.shape, result.stride())


def transient(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``aten.convolution.default``."""
    x, weight, bias, stride, padding, dilation, transposed, outpad, groups = args[:9]
    if not x.numel():  # torch's backend for these makes the result alone
        return 0
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return im2col_convolution.forward(x, weight, result, groups, transposed, stride, padding, dilation)
    last = _works_channels_last(x, weight)
    copies = copied_to(x, last and x.dim() > 3) + copied_to(weight, last)
    s = _shape(x, weight, result.shape, (stride, padding, dilation), transposed, groups)
    y = bytes_of(result)
    if last:
        work = _in_place(s, transposed)
        return copies + work.weight + work.scratch
    work = _data_gradient(s) if transposed else _forward(s)
    pad = 0
    if bias is not None and transposed and not work.last:
        pad = work.result + _ALIGNED  # the bias is added afterwards
    elif bias is not None and not transposed and not _by_avx2(s):
        pad = _padded_bias(s, simd())
    return copies + _finish(work, y, pad) - y


def transient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``aten.convolution_backward.default``."""
    gradient, x, weight, _, stride, padding, dilation, transposed, outpad, groups, mask = args[:11]
    if not x.numel():
        return 0
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return im2col_convolution.backward(gradient, x, weight, mask, groups, transposed, stride, padding, dilation)
    last = _works_channels_last(x, weight)
    copies = sum(copied_to(t, last) for t in (gradient, x, weight))
    s = _shape(x, weight, gradient.shape, (stride, padding, dilation), transposed, groups)
    held = bytes_of(x) if mask[0] else 0
    w = bytes_of(weight)
    moments = [0]
    if mask[0]:
        plain = _forward if transposed else _data_gradient
        work = _in_place(s, not transposed) if last else plain(s)
        moments.append(work.weight + work.scratch + held if last else _finish(work, held, 0))
    bias_bytes = gradient.shape[1] * s.itemsize if mask[2] else 0
    new = held + bias_bytes
    if mask[1] or mask[2]:
        work = _in_place_weight_gradient(s, mask[2]) if last else _weight_gradient(s)
        new += w if mask[1] else 0
        if last:
            moments.append(held + work.weight + max(work.scratch, 2 * w) + bias_bytes)
        else:
            bias = _for_the_bias(s, work) if mask[2] and not transposed else 0
            moments.append(held + work.source + work.other + work.weight + work.scratch + bias + bias_bytes)
            moments.append(held + work.weight + w + 2 * bias_bytes)
    return copies + max(0, max(moments) - new)


def _for_the_bias(s: Shape, work: Work) -> int:
    if not work.source:  # an im2col has nothing for it
        return 0
    if _by_avx2(s):
        return onednn_avx2.bias_gradient(s)
    block = _FEW if _few_into_many(s) else simd()
    if not s.narrow % block:
        return 0
    return 12_544 if _batch_threads(s, block) > 1 else _padded_bias(s, block)


def _padded_bias(s: Shape, block: int) -> int:
    """Return the bias, or its gradient, where its channels fill no block (``padded_bias``)."""
    return padded(s.narrow, block) * s.itemsize + _ALIGNED if s.narrow % block and not s.bf16 else 0


def _few_into_many(s: Shape) -> bool:
    """Return whether the weight's gradient takes blocks of 8, for an input of few channels."""
    return s.groups == 1 and 3 < s.wide < simd() and not s.simple


_FEW = 8
_ALIGNED = 128
"""Bytes that a buffer of oneDNN's may move by, to be aligned."""


def _works_channels_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """``mkldnn_conv_use_channels_last`` (ConvUtils.h); a 1-d convolution makes its input contiguous first."""
    return x.dim() > 3 and (suggests_channels_last(x) or suggests_channels_last(weight))


def uses_onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    outpad: Sequence[int],
    groups: int,
) -> bool:
    """``ConvParams::use_mkldnn`` (ATen/native/Convolution.cpp)."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if transposed and any(p >= s for p, s in zip(outpad, stride, strict=True)):
        return False
    if not _torch.onednn_computes_in(x.dtype):
        return False
    if x.dtype is not torch.float32:
        return True
    kernel = weight.shape[-2:] if weight.dim() > 3 else (1, weight.shape[-1])
    batch, per_image = x.shape[0], prod(x.shape[1:4])
    strange = any(v > 1 for v in stride) or any(v > 1 for v in dilation)
    fast = strange or batch >= 16 or any(k != 1 for k in kernel) or torch.get_num_threads() > 1
    return fast and (groups > 1 or min(kernel) > 3 or batch > 1 or batch * per_image > 20480)
