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

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu import im2col_convolution, onednn_avx2
from memplan.trace.semantics.cpu.onednn import (
    ALIGNED,
    Shape,
    Work,
    booked,
    channel_sums,
    forward_unrolled_in_avx512,
    group_block,
    image_scratch,
    in_channels_last,
    sharers,
    to_unit_stride,
    unrolled_in_avx512,
    weight_gradient_to_unit_stride,
    weight_sums,
)
from memplan.trace.semantics.cpu.onednn_kernels.by_columns import (
    plain_data_gradient,
    plain_forward,
    plain_weight_gradient,
)
from memplan.trace.semantics.cpu.onednn_kernels.strided_estimate import Blocks
from memplan.trace.semantics.cpu.onednn_kernels.strided_gradient import (
    best_blocks,
    strided_data_gradient,
    strided_weight,
)
from memplan.trace.semantics.layout import (
    bytes_of,
    copied_to,
    has_amx,
    padded,
    simd,
    suggests_channels_last,
)


def _by_avx2(s: Shape) -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and not s.bf16


def _in_avx2(s: Shape) -> bool:
    """Return whether the weight's gradient is that of AVX2, also beside AVX-512, whose kernel refuses some shapes.

    Source: src/cpu/x64/jit_avx512_common_conv_kernel.cpp, `jit_avx512_common_conv_bwd_weights_kernel_f32_t::init_conf`.
    """
    if _by_avx2(s):
        return True
    if s.simple or s.bf16:
        return False
    few = s.groups == 1 and 3 < s.wide < simd()
    over = s.volumetric and s.padding[0] > 0 and s.kernel[0] >= s.wide_space[0] + s.padding[0]
    skips = s.dilated and (s.volumetric or s.stride[-2] > 1)
    refused = few or over or skips or s.padded_beyond or not s.padded_by_half or s.kernel[-1] > 14
    return refused or (s.groups > 1 and group_block(s) == 8)


def _forward(s: Shape) -> Work:
    b = simd()
    if s.depthwise and s.volumetric and not s.dilated:
        return Work(s.wide_bytes(), s.weight_bytes(1, b), s.narrow_bytes(), last=True)
    if s.padded_beyond or (s.depthwise and s.volumetric):
        return plain_forward(s)
    if s.depthwise:
        if max(s.kernel) > 14:
            return plain_forward(s)
        return Work(s.wide_bytes(b), s.weight_bytes(1, b), s.narrow_bytes(b))
    if s.tiled:
        scratch = image_scratch(s, s.wide_space, padded(s.wide // s.groups, 32), False)
        return Work(s.wide_bytes(), s.weight_bytes(2, 16), s.narrow_bytes(), scratch, last=True)
    if _by_avx2(s) and onednn_avx2.goes_by_columns(s):
        return plain_forward(s)
    long = b > _SHORT and not s.bf16 and not s.simple and not forward_unrolled_in_avx512(s)
    if long and (onednn_avx2.goes_by_columns(s) or (s.groups > 1 and group_block(s) < _SHORT)):
        return plain_forward(s)
    if s.groups > 1:
        block = group_block(s)
        if block == 1:
            return plain_forward(s)
        return Work(s.wide_bytes(), s.weight_bytes(), s.narrow_bytes())
    if long:
        flat = s.wide in (1, 3)
        wide, weight = 0 if flat else s.wide_bytes(_SHORT), s.weight_bytes(1 if flat else _SHORT, _SHORT)
        return Work(wide, weight, s.narrow_bytes(_SHORT))
    if s.wide < b and not s.simple:  # ``is_1stconv``, ``flat``
        return Work(0, s.weight_bytes(1, b), s.narrow_bytes(b))
    scratch = _sums_of_pixels(s, s.narrow)
    if s.simple and s.strided:  # reduces to unit stride, an image a thread
        scratch = to_unit_stride(s, padded(s.wide, b))
    return Work(s.wide_bytes(b), s.weight_bytes(b, b), s.narrow_bytes(b), scratch)


def _data_gradient(s: Shape) -> Work:
    """Source: the output's gradient. Result: the input's."""
    b = simd()
    if s.tiled and not (s.depthwise and not s.strided):
        return _data_gradient_amx(s)
    if s.dilated and (s.strided or (s.depthwise and s.volumetric)):
        return plain_data_gradient(s)
    blocks = _strided_blocks(s) if s.strided and (s.bf16 or not s.depthwise) else None
    if blocks:
        as_it_is = s.narrow == 1 or prod(s.narrow_space) == 1  # in channels last, too
        source, scratch = 0 if as_it_is else s.narrow_bytes(), strided_data_gradient(s, blocks)
        return Work(source, strided_weight(s, blocks), s.wide_bytes(), scratch, last=True, as_plain=s.wide == 1)
    if s.depthwise:
        if s.volumetric or s.dilated:
            return plain_data_gradient(s)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), s.wide_bytes(b))
    if not _in_vectors(s):
        return plain_data_gradient(s)
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), s.wide_bytes())
    return Work(s.narrow_bytes(b), s.weight_bytes(b, b), s.wide_bytes(b), _sums_of_pixels(s, s.wide))


def _data_gradient_amx(s: Shape) -> Work:
    """Taken in whole rows, which is approximate."""
    if s.depthwise and (s.volumetric or s.dilated):
        return plain_data_gradient(s)
    if s.depthwise:
        scratch = image_scratch(s, s.narrow_space, 32, True)
        return Work(s.narrow_bytes(), 32 * s.weight_bytes(), s.wide_bytes(), scratch, last=True)
    depth, height, width = (1, *s.wide_space)[-3:]
    taps = (1, *s.kernel)[-3:-1]
    blocks = Blocks(min(padded(s.wide, 16), 32), depth, height, width, (taps[0], taps[1]))
    image = image_scratch(s, s.narrow_space, padded(s.narrow, 32), True)
    scratch = strided_data_gradient(s, blocks) if s.strided else image
    source = 0 if s.narrow == 1 or prod(s.narrow_space) == 1 else s.narrow_bytes()
    return Work(source, s.weight_bytes(32, 32), s.wide_bytes(), scratch, last=True)


def _sums_of_pixels(s: Shape, channels: int) -> int:
    """Return an image of a thread in float32, which a 1x1 kernel in fewer bits sums up in."""
    if not (s.bf16 and s.simple):
        return 0
    return booked(torch.get_num_threads() * padded(channels, simd()) * prod(s.narrow_space) * 4)


def _strided_blocks(s: Shape, last: bool = False) -> Blocks | None:
    """Return the blocks of brgemm's strided data gradient, which takes groups of many channels alone; None where other
    kernels run: AVX-512's come first, then those without brgemm, then AVX2's."""
    narrow, wide, threads = s.narrow // s.groups, s.wide // s.groups, torch.get_num_threads()
    if s.bf16:  # groups of a few channels are refused where those of vectors take them
        refused = s.groups > 1 and narrow <= simd() and not (narrow % 4 or wide % 4)
        return None if refused else best_blocks(s, simd(), threads)
    for vector in (simd(), _SHORT):
        found = best_blocks(s, vector, threads) if s.groups == 1 or narrow > vector else None
        if found or _in_vectors(s, last):
            return found
    return None


_SHORT = 8
"""Floats in a register of AVX2."""


def _in_vectors(s: Shape, last: bool = False) -> bool:
    """Return whether a kernel of vectors, without brgemm, takes a data gradient: those of channels last pad groups."""
    if s.padded_beyond or (s.groups > 1 and group_block(s) == 1 and not last):
        return False
    return s.simple or s.dilated or s.bf16 or simd() == _SHORT or unrolled_in_avx512(s)


def _in_place(s: Shape, data_gradient: bool) -> Work:
    """On channels-last tensors only the weight is reordered: oneDNN reads and writes the rest as it is."""
    work = _data_gradient(s) if data_gradient else _forward(s)
    if s.depthwise or s.bf16:
        return replace(work, weight=s.weight_bytes(1, simd()))
    blocks = _strided_blocks(s, last=True) if data_gradient and s.strided and not s.dilated else None
    if blocks:
        return Work(0, strided_weight(s, blocks), 0, strided_data_gradient(s, blocks))
    block = simd()
    aligned = ALIGNED if data_gradient else 0
    if s.groups > 1:
        narrow, wide = s.narrow // s.groups, s.wide // s.groups
        read, made = (narrow, wide) if data_gradient else (wide, narrow)
        if read > block and not (data_gradient and s.strided):  # brgemm, which takes groups of many channels alone
            weight = s.groups * read * padded(made, block) * prod(s.kernel) * s.itemsize
            return Work(0, weight, 0, in_channels_last(s) + aligned)
        if data_gradient and not _in_vectors(s, last=True):
            block = _SHORT
        elif max(narrow, wide) < block:
            block = group_block(s) if group_block(s) > 1 else block
        return Work(0, s.groups * padded(narrow, block) * padded(wide, block) * prod(s.kernel) * s.itemsize, 0)
    weight = s.weight_bytes(block, 1) if data_gradient else s.weight_bytes(1, block)
    return Work(0, weight, 0, in_channels_last(s) + aligned)


def _in_place_weight_gradient(s: Shape, bias: bool) -> Work:
    """Return the same for the weight's gradient; every group's channels are padded, the bias's too."""
    few = s.depthwise and max(s.kernel) <= 3 and not s.dilated and not s.low
    if _by_avx2(s) and s.groups == 1:
        return onednn_avx2.weight_gradient(s, last=True)
    if s.groups == 1 or few:
        return _weight_gradient(s)
    narrow = s.groups * padded(s.narrow // s.groups, simd())
    weight = narrow * padded(s.wide // s.groups, simd()) * prod(s.kernel) * s.itemsize
    return Work(0, weight, 0, narrow * s.itemsize + ALIGNED if bias and narrow > s.narrow else 0)


def _weight_gradient(s: Shape) -> Work:
    """Sources: the output's gradient and the input."""
    b = simd()
    if s.depthwise:
        small = max(s.kernel) <= 3 and all(p <= k // 2 for p, k in zip(s.padding, s.kernel, strict=True))
        if s.volumetric or s.dilated or s.low or not small:
            return plain_weight_gradient(s)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), 0, channel_sums(s), other=s.wide_bytes(b))
    if s.tiled:
        return _weight_gradient_amx(s)
    if s.groups > 1 and group_block(s) < 8:
        return plain_weight_gradient(s)
    if _in_avx2(s):
        return onednn_avx2.weight_gradient(s)
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, weight_sums(s, b), other=s.wide_bytes())
    flat = s.wide <= 3 and not s.simple
    scratch = weight_sums(s, s.wide if flat else b) + weight_gradient_to_unit_stride(s, b)
    other = 0 if flat else s.wide_bytes(b)
    return Work(s.narrow_bytes(b), s.weight_bytes(1 if flat else b, b), 0, scratch, other=other)


def _weight_gradient_amx(s: Shape) -> Work:
    """brgemm accumulates in float32 and transposes images; the transposed images are approximate."""
    weight, batch = s.weight_bytes(32, 16), sharers(s, 16)
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
    stride = (*(1,) * (len(kernel) - len(steps[0])), *steps[0])
    channels = x.shape[0], into[1], out[1]
    kind = groups, stride, padding, dilated, x.element_size(), bf16, x.dtype is torch.bfloat16 and has_amx()
    return Shape(*channels, wide_space, narrow_space, kernel, *kind)


def _as_transposed(work: Work) -> Work:
    """Return a convolution's call as a transposed one makes it: its scratch lies in the other's (``key_nested``)."""
    return replace(work, scratch=work.scratch + (ALIGNED if work.scratch else 0))


def _finish(work: Work, result: int, before: int) -> int:
    """Peak of a call whose result is reordered into a plain tensor (``mkldnn_to_dense``)."""
    running = work.source + work.other + work.weight + work.result + work.scratch + before
    return max(running, work.result + result * (2 if work.last and not work.as_plain else 1))


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
        how = transposed, stride, padding, dilation
        return im2col_convolution.forward(x, weight, result, bias is not None, groups, *how)
    last = _works_channels_last(x, weight)
    copies = copied_to(x, last and x.dim() > 3) + copied_to(weight, last)
    s = _shape(x, weight, result.shape, (stride, padding, dilation), transposed, groups)
    y = bytes_of(result)
    if last:
        work = _in_place(s, transposed)
        return copies + work.weight + work.scratch
    work = _as_transposed(_data_gradient(s)) if transposed else _forward(s)
    pad = 0
    if bias is not None:
        pad = _beside_transposed(s, work) if transposed else _bias_in_forward(s, work)
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
        plain = _as_transposed(_forward(s)) if transposed else _data_gradient(s)
        work = _in_place(s, not transposed) if last else plain
        moments.append(work.weight + work.scratch + held if last else _finish(work, held, 0))
    bias_bytes = gradient.shape[1] * s.itemsize if mask[2] else 0
    new = held + bias_bytes
    if mask[1] or mask[2]:
        work = _in_place_weight_gradient(s, mask[2]) if last else _weight_gradient(s)
        work = _as_transposed(work) if transposed else work
        new += w if mask[1] else 0
        if last:
            moments.append(held + work.weight + max(work.scratch, 2 * w) + bias_bytes)
        else:
            bias = _for_the_bias(s, work) if mask[2] and not transposed else 0
            moments.append(held + work.source + work.other + work.weight + work.scratch + bias + bias_bytes)
            moments.append(held + work.weight + w + 2 * bias_bytes)
    return copies + max(0, max(moments) - new)


def _for_the_bias(s: Shape, work: Work) -> int:
    if work.by_columns:
        return booked(4 * s.narrow) if s.bf16 else 0
    if s.depthwise:
        return channel_sums(replace(s, kernel=(1, 1)))
    if _in_avx2(s):
        return onednn_avx2.bias_gradient(s)
    sums = 0 if s.bf16 else onednn_avx2.bias_sums(s, simd())
    return sums + _padded_bias(s, simd())


def _beside_transposed(s: Shape, work: Work) -> int:
    """Return what a bias takes that is added afterwards: the result in float32."""
    at_once = work.last and not (s.uneven and not s.tiled)
    return 0 if at_once else work.result // s.itemsize * 4 + ALIGNED


def _bias_in_forward(s: Shape, work: Work) -> int:
    """Return the bias with channels that fill blocks, save for those of groups; in fewer bits as float32, by channel or
    for a matrix product."""
    if s.bf16 and (work.by_columns or (s.depthwise and not work.last)):
        return booked(4 * (s.narrow if work.by_columns else padded(s.narrow, simd())))
    if _by_avx2(s) or work.by_columns or work.last or (s.groups > 1 and not s.depthwise):
        return 0
    return booked(padded(s.narrow, simd()) * s.itemsize) if s.narrow % simd() else 0


def _padded_bias(s: Shape, block: int) -> int:
    """Return the bias, or its gradient, where its channels fill no block (``padded_bias``)."""
    return padded(s.narrow, block) * s.itemsize + ALIGNED if s.narrow % block and not s.bf16 else 0


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
