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
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from memplan.trace.semantics import slow_convolution
from memplan.trace.semantics.layout import (
    bytes_of,
    copied_to,
    has_amx,
    level_2_cache,
    padded,
    simd,
    suggests_channels_last,
)

_FEW = 16  # below as many input channels, oneDNN reads the input plain (is_1stconv)


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution as oneDNN sees it: a transposed one is the data gradient of this one."""

    batch: int
    wide: int
    """Channels of the convolution's input (the output, where transposed)."""
    narrow: int
    """Channels of its output."""
    wide_space: tuple[int, ...]
    narrow_space: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    steps: int
    """The strides' product."""
    padding: bool
    dilated: bool
    itemsize: int
    bf16: bool

    @property
    def strided(self) -> bool:
        """Whether it skips positions."""
        return self.steps > 1

    @property
    def depthwise(self) -> bool:
        """Whether every channel stays by itself."""
        return self.groups > 1 and self.groups == self.wide == self.narrow

    @property
    def volumetric(self) -> bool:
        """Whether it is a 3-d convolution."""
        return len(self.kernel) == 3

    @property
    def pointwise(self) -> bool:
        """Whether it is a matrix product over the channels."""
        return prod(self.kernel) == 1 and not self.padding

    def wide_bytes(self, block: int = 1) -> int:
        """Bytes of the input, its channels in blocks."""
        return self.batch * padded(self.wide, block) * prod(self.wide_space) * self.itemsize

    def narrow_bytes(self, block: int = 1) -> int:
        """Bytes of the output, its channels in blocks."""
        return self.batch * padded(self.narrow, block) * prod(self.narrow_space) * self.itemsize

    def weight_bytes(self, wide_block: int = 1, narrow_block: int = 1) -> int:
        """Bytes of the weight, its channels in blocks."""
        channels = padded(self.wide // self.groups, wide_block) * padded(self.narrow, narrow_block)
        return channels * prod(self.kernel) * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """What one oneDNN call holds in its own layout. ``last``: it works on channels last."""

    source: int
    weight: int
    result: int
    scratch: int = 0
    last: bool = False
    other: int = 0
    """The second source, of a weight gradient."""


def _group_block(s: Shape) -> int:
    """Block of a grouped convolution whose channels can't be padded; 1: no kernel takes it."""
    for block in (16, 8, 4):
        if block <= simd() and not (s.wide // s.groups) % block and not (s.narrow // s.groups) % block:
            return block
    return 1


def _image_scratch(s: Shape, space: Sequence[int], channels: int, halo: bool) -> int:
    """A padded image a thread and the accumulators (brgemm's ``inp_buffer``)."""
    extra = [(k - 1) // 2 if halo else 0 for k in s.kernel]
    area = prod(n + e for n, e in zip(space, extra, strict=True))
    return torch.get_num_threads() * (area * channels * s.itemsize + 24_576)


def _columns(s: Shape) -> int:
    """An im2col of one group of one image; a slice of a volume at a time."""
    if s.pointwise and not s.strided:
        return 0
    columns = s.wide // s.groups * prod(s.kernel) * prod(s.narrow_space) * s.itemsize
    return columns // s.narrow_space[0] if s.volumetric else columns


def _plain(s: Shape, result: int, cap: int | None = None) -> Work:
    """x64:gemm (gemm_convolution_utils.cpp): columns for each thread; ``cap`` bounds those of a forward."""
    columns = _columns(s)
    return Work(0, 0, result, torch.get_num_threads() * (min(columns, cap) if cap else columns))


def _plain_weight_gradient(s: Shape) -> Work:
    """x64:gemm: one image at a time, or, where an image is too small to be shared, one for each thread."""
    threads = torch.get_num_threads()
    positions = prod(s.narrow_space) // (s.narrow_space[0] if s.volumetric else 1)
    outer = positions // threads < 256 and (s.batch != 1 or s.groups > 2)
    weight = s.weight_bytes()
    return Work(0, weight, 0, (threads if outer else 1) * (_columns(s) + 4 * weight))


def _forward(s: Shape) -> Work:
    b = simd()
    if s.depthwise:
        if s.volumetric:
            return Work(s.wide_bytes(), s.weight_bytes(1, b), s.narrow_bytes(), last=True)
        if max(s.kernel) > 14:
            return _plain(s, s.narrow_bytes(), level_2_cache() * 4 // 5)
        return Work(s.wide_bytes(b), s.weight_bytes(1, b), s.narrow_bytes(b))
    if s.bf16 and has_amx():
        scratch = _image_scratch(s, s.wide_space, padded(s.wide // s.groups, 32), False)
        return Work(s.wide_bytes(), s.weight_bytes(2, 16), s.narrow_bytes(), scratch, last=True)
    if s.groups > 1:
        block = _group_block(s)
        if block == 1:
            return _plain(s, s.narrow_bytes(), level_2_cache() * 4 // 5)
        return Work(s.wide_bytes(), s.weight_bytes(), s.narrow_bytes())
    if s.wide < _FEW and not s.pointwise:
        return Work(0, s.weight_bytes(1, b), s.narrow_bytes(b))
    scratch = 0
    if s.pointwise and s.strided:  # reduces to unit stride, an image a thread
        scratch = torch.get_num_threads() * padded(s.wide, b) * prod(s.narrow_space) * s.itemsize
    return Work(s.wide_bytes(b), s.weight_bytes(b, b), s.narrow_bytes(b), scratch)


def _data_gradient(s: Shape) -> Work:
    """Source: the output's gradient. Result: the input's."""
    b = simd()
    if s.depthwise:
        if s.volumetric or s.dilated:
            return _plain(s, s.wide_bytes())
        if s.strided and s.bf16 and has_amx():
            scratch = _image_scratch(s, s.narrow_space, 32, True)
            return Work(s.narrow_bytes(), 32 * s.weight_bytes(), s.wide_bytes(), scratch, last=True)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), s.wide_bytes(b))
    amx = s.bf16 and has_amx()
    if s.strided and s.dilated and s.groups == 1 and not amx:
        return _plain(s, s.wide_bytes())
    per_group = min(s.wide, s.narrow) // s.groups
    if amx or (s.strided and (s.groups == 1 or per_group >= 2 * b or _group_block(s) == 1)):
        scratch = _image_scratch(s, s.narrow_space, padded(s.narrow // s.groups, 32 if s.bf16 else 1), True)
        weight = s.weight_bytes(32, 32) if s.bf16 else s.weight_bytes(b, 1)
        return Work(s.narrow_bytes(), weight, s.wide_bytes(), scratch, last=True)
    if s.groups > 1:
        if _group_block(s) == 1:
            return _plain(s, s.wide_bytes())
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


def _in_place_weight_gradient(s: Shape) -> Work:
    """The same for the weight's gradient; every group's channels are padded, there is no im2col."""
    few = s.depthwise and max(s.kernel) <= 3 and not s.dilated
    if s.groups == 1 or few:
        return _weight_gradient(s)
    per_group = padded(s.wide // s.groups, simd()) * padded(s.narrow // s.groups, simd())
    return Work(0, s.groups * per_group * prod(s.kernel) * s.itemsize, 0)


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
        if s.volumetric or s.dilated or max(s.kernel) > 3:
            return _plain_weight_gradient(s)
        return Work(s.narrow_bytes(b), s.weight_bytes(1, b), 0, other=s.wide_bytes(b))
    if s.bf16 and has_amx():
        return _weight_gradient_amx(s)
    if s.groups > 1:
        if _group_block(s) < 8:
            return _plain_weight_gradient(s)
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, other=s.wide_bytes())
    if max(s.kernel) > 14:  # a ViT's patches
        return _plain_weight_gradient(s)
    if s.volumetric and s.kernel[0] > 1 and s.wide_space[0] <= s.kernel[0] // 2 + 1:
        return _plain_weight_gradient(s)  # measured: padding in front and behind that meets in the depth
    weight, block, other = s.weight_bytes(b, b), b, s.wide_bytes(b)
    if not s.pointwise:
        if s.wide <= 3:
            weight, other = s.weight_bytes(1, b), 0
        elif s.wide < _FEW:
            if s.volumetric or s.dilated:
                return _plain_weight_gradient(s)
            weight, block, other = s.weight_bytes(8, 8), 8, s.wide_bytes(8)
        elif s.dilated and (s.volumetric or s.strided):
            return _plain_weight_gradient(s)
    others = _batch_threads(s, block) - 1 if block == 16 else 0
    scratch = others * weight + (8_320 if others else 0)
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
    padding, dilated = any(steps[1]), any(v > 1 for v in steps[2])
    channels = x.shape[0], into[1], out[1]
    kind = groups, prod(steps[0]), padding, dilated, x.element_size(), bf16
    return Shape(*channels, wide_space, narrow_space, kernel, *kind)


def _finish(work: Work, result: int, before: int) -> int:
    """Peak of a call whose result is reordered into a plain tensor (``mkldnn_to_dense``)."""
    running = work.source + work.other + work.weight + work.result + work.scratch + before
    return max(running, work.result + result * (2 if work.last else 1))


def resized(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """A transposed convolution of volumes, where oneDNN does not run: the result is made as large as the input, then
    resized, which gives nothing back.

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
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return slow_convolution.forward(x, weight, result, groups, transposed, stride, padding, dilation)
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
        pad = work.result  # the bias is added afterwards
    return copies + _finish(work, y, pad) - y


def transient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``aten.convolution_backward.default``."""
    gradient, x, weight, _, stride, padding, dilation, transposed, outpad, groups, mask = args[:11]
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return slow_convolution.backward(gradient, x, weight, mask, groups, transposed, stride, padding, dilation)
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
    new = held
    if mask[1] or mask[2]:
        work = _in_place_weight_gradient(s) if last else _weight_gradient(s)
        new += w if mask[1] else 0
        if last:
            moments.append(held + work.weight + max(work.scratch, 2 * w))
        else:
            bias = 12_544 if mask[2] and not transposed and s.narrow % simd() else 0  # its padded sums
            moments.append(held + work.source + work.other + work.weight + work.scratch + bias)
            moments.append(held + work.weight + w)
    return copies + max(0, max(moments) - new)


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
    if x.dtype in (torch.bfloat16, torch.float16):
        return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
    if x.dtype is not torch.float32:
        return False
    kernel = weight.shape[-2:] if weight.dim() > 3 else (1, weight.shape[-1])
    batch, per_image = x.shape[0], prod(x.shape[1:4])
    strange = any(v > 1 for v in stride) or any(v > 1 for v in dilation)
    fast = strange or batch >= 16 or any(k != 1 for k in kernel) or torch.get_num_threads() > 1
    return fast and (groups > 1 or min(kernel) > 3 or batch > 1 or batch * per_image > 20480)
