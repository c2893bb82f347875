"""Temporaries of ``aten.convolution`` and its backward if oneDNN runs them.

ATen/native/mkldnn/Conv.cpp asks oneDNN for its preferred layout ("any"), reorders the input and the weight into it,
computes, and reorders the result back. oneDNN's choice (x64/cpu_convolution_list.cpp, and each kernel's ``init_conf``)
is one of three kinds:

- blocked: channels in blocks of 16 (8, 4), padded if there is one group ("aBcd16b");
- channels last ("acdb"), for strided gradients, transposed convolution and bfloat16 with AMX;
- plain, an im2col and a GEMM, for the shapes that no other kernel supports.

Observed in torch 2.13 with oneDNN's verbose mode on AVX512 with AMX. The blocks of 8 elsewhere are those that oneDNN
documents, unverified.
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


def _runs_on_avx2(s: Shape) -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and not s.bf16


def _weight_gradient_on_avx2(s: Shape) -> bool:
    """Return whether AVX2's weight gradient runs, also on AVX-512, whose kernel refuses some shapes.

    Source: src/cpu/x64/jit_avx512_common_conv_kernel.cpp, `jit_avx512_common_conv_bwd_weights_kernel_f32_t::init_conf`.
    """
    if _runs_on_avx2(s):
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
    if _runs_on_avx2(s) and onednn_avx2.goes_by_columns(s):
        return plain_forward(s)
    falls_back_to_avx2 = b > _AVX2_LANES and not s.bf16 and not s.simple and not forward_unrolled_in_avx512(s)
    if falls_back_to_avx2 and (onednn_avx2.goes_by_columns(s) or (s.groups > 1 and group_block(s) < _AVX2_LANES)):
        return plain_forward(s)
    if s.groups > 1:
        block = group_block(s)
        if block == 1:
            return plain_forward(s)
        return Work(s.wide_bytes(), s.weight_bytes(), s.narrow_bytes())
    if falls_back_to_avx2:
        flat = s.wide in (1, 3)
        wide, weight = 0 if flat else s.wide_bytes(_AVX2_LANES), s.weight_bytes(1 if flat else _AVX2_LANES, _AVX2_LANES)
        return Work(wide, weight, s.narrow_bytes(_AVX2_LANES))
    if s.wide < b and not s.simple:  # ``is_1stconv``, ``flat``
        return Work(0, s.weight_bytes(1, b), s.narrow_bytes(b))
    scratch = _float32_accumulators(s, s.narrow)
    if s.simple and s.strided:  # reduces to unit stride, an image a thread
        scratch = to_unit_stride(s, padded(s.wide, b))
    return Work(s.wide_bytes(b), s.weight_bytes(b, b), s.narrow_bytes(b), scratch)


def _data_gradient(s: Shape) -> Work:
    """The source is the output's gradient, the result the input's."""
    b = simd()
    if s.tiled and not (s.depthwise and not s.strided):
        return _data_gradient_amx(s)
    if s.dilated and (s.strided or (s.depthwise and s.volumetric)):
        return plain_data_gradient(s)
    blocks = _strided_blocks(s) if s.strided and (s.bf16 or not s.depthwise) else None
    if blocks:
        unchanged = s.narrow == 1 or prod(s.narrow_space) == 1  # the same bytes in channels last
        source, scratch = 0 if unchanged else s.narrow_bytes(), strided_data_gradient(s, blocks)
        return Work(source, strided_weight(s, blocks), s.wide_bytes(), scratch, last=True, as_plain=s.wide == 1)
    if s.depthwise:
        if s.volumetric or s.dilated:
            return plain_data_gradient(s)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), s.wide_bytes(b))
    if not _has_vector_kernel(s):
        return plain_data_gradient(s)
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), s.wide_bytes())
    return Work(s.narrow_bytes(b), s.weight_bytes(b, b), s.wide_bytes(b), _float32_accumulators(s, s.wide))


def _data_gradient_amx(s: Shape) -> Work:
    """AMX's data gradient, modelled in whole rows, which is approximate."""
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


def _float32_accumulators(s: Shape, channels: int) -> int:
    """Return the bytes of a 1x1 kernel's float32 accumulators in 16 bits: an image per thread."""
    if not (s.bf16 and s.simple):
        return 0
    return booked(torch.get_num_threads() * padded(channels, simd()) * prod(s.narrow_space) * 4)


def _strided_blocks(s: Shape, last: bool = False) -> Blocks | None:
    """Return the blocks of brgemm's strided data gradient, or None if another kernel runs.

    Its groups need many channels. The order of preference is AVX-512's brgemm, kernels without brgemm, AVX2's brgemm.
    """
    narrow, wide, threads = s.narrow // s.groups, s.wide // s.groups, torch.get_num_threads()
    if s.bf16:  # groups of few channels are left to the vector kernels that support them
        refused = s.groups > 1 and narrow <= simd() and not (narrow % 4 or wide % 4)
        return None if refused else best_blocks(s, simd(), threads)
    for vector in (simd(), _AVX2_LANES):
        blocks = best_blocks(s, vector, threads) if s.groups == 1 or narrow > vector else None
        if blocks or _has_vector_kernel(s, last):
            return blocks
    return None


_AVX2_LANES = 8
"""Floats in a register of AVX2."""


def _has_vector_kernel(s: Shape, last: bool = False) -> bool:
    """Return whether a kernel without brgemm supports a data gradient; those for channels last pad groups."""
    if s.padded_beyond or (s.groups > 1 and group_block(s) == 1 and not last):
        return False
    return s.simple or s.dilated or s.bf16 or simd() == _AVX2_LANES or unrolled_in_avx512(s)


def _channels_last(s: Shape, data_gradient: bool) -> Work:
    """Channels-last tensors: only the weight is reordered; oneDNN reads and writes the others in place."""
    work = _data_gradient(s) if data_gradient else _forward(s)
    if s.depthwise or s.bf16:
        return replace(work, weight=s.weight_bytes(1, simd()))
    blocks = _strided_blocks(s, last=True) if data_gradient and s.strided and not s.dilated else None
    if blocks:
        return Work(0, strided_weight(s, blocks), 0, strided_data_gradient(s, blocks))
    block = simd()
    alignment = ALIGNED if data_gradient else 0
    if s.groups > 1:
        narrow, wide = s.narrow // s.groups, s.wide // s.groups
        input_channels, output_channels = (narrow, wide) if data_gradient else (wide, narrow)
        if input_channels > block and not (data_gradient and s.strided):  # brgemm, whose groups need many channels
            weight = s.groups * input_channels * padded(output_channels, block) * prod(s.kernel) * s.itemsize
            return Work(0, weight, 0, in_channels_last(s) + alignment)
        if data_gradient and not _has_vector_kernel(s, last=True):
            block = _AVX2_LANES
        elif max(narrow, wide) < block:
            block = group_block(s) if group_block(s) > 1 else block
        return Work(0, s.groups * padded(narrow, block) * padded(wide, block) * prod(s.kernel) * s.itemsize, 0)
    weight = s.weight_bytes(block, 1) if data_gradient else s.weight_bytes(1, block)
    return Work(0, weight, 0, in_channels_last(s) + alignment)


def _channels_last_weight_gradient(s: Shape, bias: bool) -> Work:
    """As `_channels_last` for the weight's gradient; the channels of every group are padded, those of the bias too."""
    few = s.depthwise and max(s.kernel) <= 3 and not s.dilated and not s.low
    if _runs_on_avx2(s) and s.groups == 1:
        return onednn_avx2.weight_gradient(s, last=True)
    if s.groups == 1 or few:
        return _weight_gradient(s)
    narrow = s.groups * padded(s.narrow // s.groups, simd())
    weight = narrow * padded(s.wide // s.groups, simd()) * prod(s.kernel) * s.itemsize
    return Work(0, weight, 0, narrow * s.itemsize + ALIGNED if bias and narrow > s.narrow else 0)


def _weight_gradient(s: Shape) -> Work:
    """The sources are the output's gradient and the input."""
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
    if _weight_gradient_on_avx2(s):
        return onednn_avx2.weight_gradient(s)
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, weight_sums(s, b), other=s.wide_bytes())
    flat = s.wide <= 3 and not s.simple
    scratch = weight_sums(s, s.wide if flat else b) + weight_gradient_to_unit_stride(s, b)
    other = 0 if flat else s.wide_bytes(b)
    return Work(s.narrow_bytes(b), s.weight_bytes(1 if flat else b, b), 0, scratch, other=other)


def _weight_gradient_amx(s: Shape) -> Work:
    """brgemm accumulates in float32 and transposes images; the size of these is approximate."""
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
    """``x`` and ``y`` are input and output of the op, also if it is transposed."""
    wide, narrow = (tuple(y), tuple(x.shape)) if transposed else (tuple(x.shape), tuple(y))
    bf16 = x.dtype in (torch.bfloat16, torch.float16)
    wide_space, narrow_space, kernel = wide[2:], narrow[2:], tuple(weight.shape[2:])
    if len(kernel) == 1:  # view1d_as_2d
        wide_space, narrow_space, kernel = (1, *wide_space), (1, *narrow_space), (1, *kernel)
    dilated = any(v > 1 for v in steps[2]) and prod(kernel) > 1
    padding = (*(0,) * (len(kernel) - len(steps[1])), *steps[1])
    stride = (*(1,) * (len(kernel) - len(steps[0])), *steps[0])
    channels = x.shape[0], wide[1], narrow[1]
    properties = groups, stride, padding, dilated, x.element_size(), bf16, x.dtype is torch.bfloat16 and has_amx()
    return Shape(*channels, wide_space, narrow_space, kernel, *properties)


def _as_transposed(work: Work) -> Work:
    """Return the work of a transposed convolution: its scratchpad is nested in another (``key_nested``), which aligns
    it."""
    return replace(work, scratch=work.scratch + (ALIGNED if work.scratch else 0))


def _peak_with_reorder(work: Work, result: int, before: int) -> int:
    """Peak bytes of a call whose result is reordered to a plain tensor (``mkldnn_to_dense``)."""
    running = work.source + work.other + work.weight + work.result + work.scratch + before
    return max(running, work.result + result * (2 if work.last and not work.as_plain else 1))


def resized(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return the result of a 3-d transposed convolution without oneDNN in a storage of the input's size: the kernel
    allocates it that large, then resizes it, which frees nothing.

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
    if not x.numel():  # torch's backend for empty inputs only allocates the result
        return 0
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        geometry = transposed, stride, padding, dilation
        return im2col_convolution.forward(x, weight, result, bias is not None, groups, *geometry)
    last = _works_channels_last(x, weight)
    copies = copied_to(x, last and x.dim() > 3) + copied_to(weight, last)
    s = _shape(x, weight, result.shape, (stride, padding, dilation), transposed, groups)
    y = bytes_of(result)
    if last:
        work = _channels_last(s, transposed)
        return copies + work.weight + work.scratch
    work = _as_transposed(_data_gradient(s)) if transposed else _forward(s)
    pad = 0
    if bias is not None:
        pad = _bias_of_transposed(s, work) if transposed else _bias_in_forward(s, work)
    return copies + _peak_with_reorder(work, y, pad) - y


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
    grad_input = bytes_of(x) if mask[0] else 0
    grad_weight = bytes_of(weight)
    peaks = [0]
    if mask[0]:
        plain = _as_transposed(_forward(s)) if transposed else _data_gradient(s)
        work = _channels_last(s, not transposed) if last else plain
        peaks.append(work.weight + work.scratch + grad_input if last else _peak_with_reorder(work, grad_input, 0))
    bias_bytes = gradient.shape[1] * s.itemsize if mask[2] else 0
    results = grad_input + bias_bytes
    if mask[1] or mask[2]:
        work = _channels_last_weight_gradient(s, mask[2]) if last else _weight_gradient(s)
        work = _as_transposed(work) if transposed else work
        results += grad_weight if mask[1] else 0
        if last:
            peaks.append(grad_input + work.weight + max(work.scratch, 2 * grad_weight) + bias_bytes)
        else:
            bias = _bias_gradient(s, work) if mask[2] and not transposed else 0
            peaks.append(grad_input + work.source + work.other + work.weight + work.scratch + bias + bias_bytes)
            peaks.append(grad_input + work.weight + grad_weight + 2 * bias_bytes)
    return copies + max(0, max(peaks) - results)


def _bias_gradient(s: Shape, work: Work) -> int:
    if work.by_columns:
        return booked(4 * s.narrow) if s.bf16 else 0
    if s.depthwise:
        return channel_sums(replace(s, kernel=(1, 1)))
    if _weight_gradient_on_avx2(s):
        return onednn_avx2.bias_gradient(s)
    sums = 0 if s.bf16 else onednn_avx2.bias_sums(s, simd())
    return sums + _padded_bias(s, simd())


def _bias_of_transposed(s: Shape, work: Work) -> int:
    """Return the bytes for a bias that is added after the product: the result in float32."""
    fused = work.last and not (s.uneven and not s.tiled)
    return 0 if fused else work.result // s.itemsize * 4 + ALIGNED


def _bias_in_forward(s: Shape, work: Work) -> int:
    """Return the bytes of the bias padded to blocks of channels, except with groups; in 16 bits it is in float32 for
    depthwise kernels and GEMMs."""
    if s.bf16 and (work.by_columns or (s.depthwise and not work.last)):
        return booked(4 * (s.narrow if work.by_columns else padded(s.narrow, simd())))
    if _runs_on_avx2(s) or work.by_columns or work.last or (s.groups > 1 and not s.depthwise):
        return 0
    return booked(padded(s.narrow, simd()) * s.itemsize) if s.narrow % simd() else 0


def _padded_bias(s: Shape, block: int) -> int:
    """Return the bytes of the bias or its gradient if its channels do not fill blocks (``padded_bias``)."""
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
    strided_or_dilated = any(v > 1 for v in stride) or any(v > 1 for v in dilation)
    worthwhile = strided_or_dilated or batch >= 16 or any(k != 1 for k in kernel) or torch.get_num_threads() > 1
    return worthwhile and (groups > 1 or min(kernel) > 3 or batch > 1 or batch * per_image > 20480)
