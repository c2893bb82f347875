"""Buffers of oneDNN's convolutions, estimated without oneDNN's own choice of kernels.

oneDNN reorders the operands into its own layout and computes in one of three ways (x64/cpu_convolution_list.cpp):

- blocked: channels in blocks of a vector register, padded unless there are groups ("aBcd16b");
- channels last ("acdb"), for strided gradients and in AMX's tiles;
- by columns, an im2col and a GEMM, for shapes that no other kernel supports.

The choice and the scratchpad depend on the processor and on oneDNN's estimates of speed. The rules here compute the
sizes of the tensors in these layouts, and an upper bound of the scratchpad of all threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from memplan.trace.semantics.layout import ceil_div, padded, simd


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution as passed to oneDNN; a transposed convolution is the data gradient of this convolution."""

    batch: int
    inputs: int
    """Channels of the convolution's input (of the output if transposed)."""
    outputs: int
    """Channels of the convolution's output (of the input if transposed)."""
    input_space: tuple[int, ...]
    output_space: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """On the low side of each dimension."""
    dilated: bool
    """Whether any dimension is dilated."""
    itemsize: int
    tiled: bool = False
    """Whether AMX's tiles compute it, in bfloat16."""

    @property
    def strided(self) -> bool:
        """Whether any stride is larger than 1."""
        return prod(self.stride) > 1

    @property
    def padded_beyond(self) -> bool:
        """Whether a kernel position can lie completely in the padding, which vector kernels do not support."""
        sides = zip(self.padding, self.kernel, strict=True)
        return any(pad >= size for pad, size in sides if pad and (size == 1 or not self.dilated))

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    @property
    def small_depthwise(self) -> bool:
        """Whether the kernel for depthwise weight gradients supports it: up to 3x3, on images at least as high."""
        return self.depthwise and not self.dilated and max(self.kernel) <= 3 and self.input_space[-2] >= self.kernel[-2]

    @property
    def volumetric(self) -> bool:
        """Whether it is a 3-d convolution."""
        return len(self.kernel) == 3

    @property
    def pointwise(self) -> bool:
        """Whether the 1x1 kernels support it: without padding; strided only for images whose size the stride
        divides."""
        if prod(self.kernel) != 1 or any(self.padding):
            return False
        divides = not self.volumetric and prod(self.output_space) * prod(self.stride) == prod(self.input_space)
        return divides or not self.strided

    def input_bytes(self, block: int = 1) -> int:
        """Return the bytes of the input, with channels padded to blocks."""
        return self.batch * padded(self.inputs, block) * prod(self.input_space) * self.itemsize

    def output_bytes(self, block: int = 1) -> int:
        """Return the bytes of the output, with channels padded to blocks."""
        return self.batch * padded(self.outputs, block) * prod(self.output_space) * self.itemsize

    def weight_bytes(self, input_block: int = 1, output_block: int = 1) -> int:
        """Return the bytes of the weight, with channels padded to blocks."""
        channels = padded(self.inputs // self.groups, input_block) * padded(self.outputs, output_block)
        return channels * prod(self.kernel) * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of the buffers of one oneDNN call in its own layout."""

    source: int
    weight: int
    result: int
    scratch: int = 0
    channels_last: bool = False
    """Whether the layout is channels last."""
    other: int = 0
    """The second source, of a weight gradient."""


def forward(conv: Shape) -> Work:
    """Return the buffers of a forward pass, depending on oneDNN's kernel for it."""
    block = simd()
    if conv.tiled or (conv.depthwise and conv.volumetric and not conv.dilated):
        return Work(conv.input_bytes(), conv.weight_bytes(1, block), conv.output_bytes(), channels_last=True)
    if _goes_by_columns(conv, _least_block(), conv.output_space[-1]):
        return Work(0, 0, conv.output_bytes(), torch.get_num_threads() * _columns(conv))
    if conv.depthwise:
        return Work(conv.input_bytes(block), conv.weight_bytes(1, block), conv.output_bytes(block))
    if conv.groups > 1:
        return Work(conv.input_bytes(), conv.weight_bytes(), conv.output_bytes())
    if conv.inputs < block and not conv.pointwise:  # ``is_1stconv``: reads a plain tensor
        return Work(0, conv.weight_bytes(1, block), conv.output_bytes(block))
    return Work(
        conv.input_bytes(block), conv.weight_bytes(block, block), conv.output_bytes(block), _unit_stride_copy(conv)
    )


def data_gradient(conv: Shape) -> Work:
    """Return the buffers of a data gradient: the source is the gradient of the output, the result the
    gradient of the input.

    Strided convolutions without dilation are computed channels last, except if the output channels of a group fit into
    a vector register.
    """
    block = simd()
    narrow_groups = conv.groups > 1 and conv.outputs // conv.groups <= block
    if conv.tiled or (conv.strided and not narrow_groups and not conv.dilated):
        # with a single channel or position, both formats are the same
        source = 0 if conv.outputs == 1 or prod(conv.output_space) == 1 else conv.output_bytes()
        return Work(
            source, conv.weight_bytes(block, 1), conv.input_bytes(), _padded_image(conv), channels_last=conv.inputs > 1
        )
    unsupported = conv.dilated and (conv.strided or conv.depthwise)
    if unsupported or _goes_by_columns(conv, _least_block(), conv.input_space[-1]):
        return Work(0, 0, conv.input_bytes(), torch.get_num_threads() * _columns(conv))
    if conv.depthwise:
        return Work(conv.output_bytes(block), conv.weight_bytes(1, block), conv.input_bytes(block))
    if conv.groups > 1:
        return Work(conv.output_bytes(), conv.weight_bytes(), conv.input_bytes())
    return Work(conv.output_bytes(block), conv.weight_bytes(block, block), conv.input_bytes(block))


def weight_gradient(conv: Shape) -> Work:
    """Return the buffers of a weight gradient: the sources are the output's gradient and the input. Threads share the
    images of a batch, and each has its own partial sums."""
    block = simd()
    if conv.depthwise:
        wide_padding = any(2 * padding > size for padding, size in zip(conv.padding, conv.kernel, strict=True))
        if conv.volumetric or not conv.small_depthwise or wide_padding:
            return _weight_gradient_by_columns(conv)
        return Work(conv.output_bytes(block), conv.weight_bytes(1, block), 0, other=conv.input_bytes(block))
    shallow = conv.volumetric and conv.padding[0] > 0 and conv.kernel[0] >= conv.input_space[0] + conv.padding[0]
    skips = conv.dilated and (conv.volumetric or conv.strided)
    by_columns = _goes_by_columns(conv, group_block=8, row=1) or (simd() == 8 and _avx2_refuses(conv))
    if shallow or skips or by_columns or conv.kernel[-1] > _LONGEST_OF_WEIGHT_GRADIENT:
        return _weight_gradient_by_columns(conv)
    if conv.groups > 1:
        return Work(
            conv.output_bytes(),
            conv.weight_bytes(),
            0,
            _weight_sums(conv, conv.weight_bytes()),
            other=conv.input_bytes(),
        )
    reads_plain_input = conv.inputs <= 3 and not conv.pointwise
    if 3 < conv.inputs < block and not conv.pointwise:  # AVX-512's kernel refuses it, AVX2's runs
        block = 8
    weight = conv.weight_bytes(1 if reads_plain_input else block, block)
    scratch = _weight_sums(conv, weight) + _unit_stride_copy(conv)
    return Work(conv.output_bytes(block), weight, 0, scratch, other=0 if reads_plain_input else conv.input_bytes(block))


def _weight_gradient_by_columns(conv: Shape) -> Work:
    """Return the buffers of a weight gradient by columns: those of an image and partial sums four times as large as the
    weight, for each thread if threads share the images, which they do if these are small (`init_conf` in
    src/cpu/gemm_convolution_utils.cpp)."""
    threads = torch.get_num_threads()
    if (conv.batch == 1 and conv.groups <= 2) or prod(conv.output_space[-2:]) // threads >= 256:
        threads = 1
    return Work(0, conv.weight_bytes(), 0, threads * (_columns(conv) + 4 * conv.weight_bytes()) + 2 * _ALIGNMENT)


def channels_last_weight_gradient(conv: Shape) -> Work:
    """Return the buffers of a weight gradient of channels-last tensors, which are read in place; the channels of every
    group are padded."""
    if conv.groups == 1 or conv.small_depthwise:
        work = weight_gradient(conv)
        return Work(0, work.weight, 0, work.scratch)
    block = simd()
    channels = conv.groups * padded(conv.outputs // conv.groups, block) * padded(conv.inputs // conv.groups, block)
    return Work(0, channels * prod(conv.kernel) * conv.itemsize, 0)


def _goes_by_columns(conv: Shape, group_block: int, row: int) -> bool:
    """Return whether only the im2col kernel supports a convolution.

    Args:
        conv: the convolution.
        group_block: the other kernels need groups whose channels are a multiple of this.
        row: results in a row, for which the other kernels unroll their code; it must stay short.
    """
    # instructions for a row: at most 16 channels of a block, and at most 28 results, for which there are registers
    unrolled = conv.kernel[-1] * min(conv.inputs // conv.groups, 16) * min(row, 28)
    if conv.padded_beyond or (conv.depthwise and conv.volumetric) or unrolled > _MAX_UNROLLED:
        return True
    return (
        conv.groups > 1
        and not conv.depthwise
        and any(n // conv.groups % group_block for n in (conv.inputs, conv.outputs))
    )


def _avx2_refuses(conv: Shape) -> bool:
    """Return whether AVX2's weight gradient does not support a convolution: dilation, padding of a volume's depth, and
    a kernel larger than the image in any dimension but the last (`jit_avx2_conv_bwd_weights_kernel_f32::init_conf` in
    src/cpu/x64/jit_avx2_conv_kernel_f32.cpp)."""
    sizes = zip(conv.kernel[:-1], conv.input_space[:-1], strict=True)
    return conv.dilated or (conv.volumetric and conv.padding[0] > 0) or any(kernel > size for kernel, size in sizes)


def _least_block() -> int:
    """Return the least channels of a group that the kernels of forward and data gradient support."""
    return 4 if simd() == 16 else 8


_MAX_UNROLLED = (256 << 10) // (3 * 15)
"""Most instructions of 15 bytes in a kernel's code for each of its three cases: both edges of a row, and the middle
(`init_conf` in src/cpu/x64/jit_avx512_common_conv_kernel.cpp). Approximate."""
_LONGEST_OF_WEIGHT_GRADIENT = 13
"""Width of a kernel above which a weight gradient is computed by columns."""


def _columns(conv: Shape) -> int:
    """Return the bytes of im2col's columns of an image or of a slice of a volume, of which a thread has its own.

    oneDNN limits them to 15 times the tensors.
    """
    if conv.pointwise and not conv.strided:  # reads its input in place
        return 0
    columns = conv.inputs // conv.groups * prod(conv.kernel) * prod(conv.output_space[-2:]) * conv.itemsize
    limit = 15 * (conv.input_bytes() + conv.output_bytes() + conv.weight_bytes())
    return min(columns, limit)


def _padded_image(conv: Shape) -> int:
    """Return the bytes of an image of the output's gradient, padded for the kernel's reads, for each thread."""
    sizes = zip(conv.output_space, conv.kernel, conv.stride, strict=True)
    positions = prod(length + (kernel - 1) // stride for length, kernel, stride in sizes)
    return torch.get_num_threads() * positions * conv.outputs * conv.itemsize


def _unit_stride_copy(conv: Shape) -> int:
    """Return the bytes of a strided 1x1 convolution's input without skipped positions, for each thread."""
    if not (conv.pointwise and conv.strided):
        return 0
    return torch.get_num_threads() * padded(conv.inputs, simd()) * prod(conv.output_space) * conv.itemsize


def _weight_sums(conv: Shape, weight: int) -> int:
    """Return the bytes of partial gradients of weight and bias of threads that share the images of a batch or parts of
    them, for all threads but the first.

    Threads share channels instead if the weight is large compared to the tensors: oneDNN minimizes the bytes moved
    (`balance` in jit_avx512_common_conv_kernel.cpp, src/cpu/x64). The limit here is approximate, except for 1x1 kernels
    in float32. ``weight``: bytes of the weight in the kernel's layout.
    """
    if simd() == 8:
        return _weight_sums_on_avx2(conv, weight)
    if conv.pointwise and conv.itemsize == 4:  # bfloat16 has kernels with other rules
        others = _threads_along_batch(conv) - 1
        return others * weight + _REDUCTION_BARRIERS if others else 0
    others = min(torch.get_num_threads(), conv.batch * _image_parts(conv)) - 1
    if others == 0 or 5 * weight > min(conv.input_bytes() // prod(conv.stride), conv.output_bytes()):
        return 0
    bias = 0 if conv.pointwise else padded(conv.outputs, simd()) * conv.itemsize  # also where the layer has none
    return others * (weight + bias) + _REDUCTION_BARRIERS


def _weight_sums_on_avx2(conv: Shape, weight: int) -> int:
    """As `_weight_sums`: with AVX2, threads share images, slices of a volume or, for a 1x1 kernel, positions only if
    the weight has fewer parts than there are threads. With a 1x1 kernel the first thread has partial sums, too.

    A part is a block of channels for each of input and output; for a 1x1 kernel, about 9 blocks for the input and 32
    for the output (`init_conf` and `init_balancers` in src/cpu/x64/jit_avx2_1x1_conv_kernel_f32.cpp and
    jit_avx2_1x1_convolution.hpp; `reduce_balancer_t::balance` in src/cpu/x64/cpu_reducer.cpp).
    """
    input_blocks, output_blocks = ceil_div(conv.inputs // conv.groups, 8), ceil_div(conv.outputs // conv.groups, 8)
    if conv.pointwise:
        parts, shared = ceil_div(input_blocks, 9) * ceil_div(output_blocks, 32), prod(conv.output_space)
    else:
        parts, shared = input_blocks * output_blocks, conv.output_space[0] if conv.volumetric else 1
    sharing = min(torch.get_num_threads() // (conv.groups * parts), conv.batch * shared)
    if sharing <= 1:
        return 0
    if conv.pointwise:
        return sharing * weight + _REDUCTION_BARRIERS
    # a page of barriers for each part, and a page each to align barriers and sums
    return (sharing - 1) * weight + 4096 * (conv.groups * parts + 2)


def _threads_along_batch(conv: Shape) -> int:
    """Return how many threads divide the batch and the positions of its images for the weight gradient of a 1x1 kernel
    in float32; each of them has partial sums. Further threads divide the channels.

    Of all divisions, oneDNN takes the one in which a thread reads and writes the fewest elements, where the weight
    counts twelvefold; of several, the one with most threads along the batch, then along the output's channels
    (`balance` in src/cpu/x64/jit_avx512_common_1x1_conv_kernel.cpp).
    """
    threads, block, positions = torch.get_num_threads(), simd(), _positions_at_once(conv)
    steps = conv.batch * prod(conv.output_space) // positions
    input_blocks, output_blocks = ceil_div(conv.inputs, block), ceil_div(conv.outputs, block)
    divisions = list[tuple[int, int, int]]()
    for along_batch in range(1, min(threads, steps) + 1):
        thread_positions = ceil_div(steps, along_batch) * positions
        for of_outputs in range(1, min(threads // along_batch, output_blocks) + 1):
            of_inputs = min(threads // along_batch // of_outputs, input_blocks)
            inputs, outputs = ceil_div(input_blocks, of_inputs) * block, ceil_div(output_blocks, of_outputs) * block
            moved = thread_positions * (inputs + outputs) + 12 * inputs * outputs
            divisions.append((moved, -along_batch, -of_outputs))
    along_batch = -min(divisions)[1]
    return min(conv.batch, threads) if threads // 2 < along_batch < threads else along_batch


def _positions_at_once(conv: Shape) -> int:
    """Return the positions of an image that a 1x1 kernel for weight gradients adds up in a step (``reduce_block`` of
    the same file): the largest divisor from 7 to 16, or else the smallest divisor of a row from 4 on."""
    positions, row = prod(conv.output_space), conv.output_space[-1]
    divisors = [size for size in range(min(7, positions), min(16, positions) + 1) if positions % size == 0]
    if divisors:
        return divisors[-1]
    of_row = next(size for size in range(min(4, row), row + 1) if row % size == 0)
    return of_row if of_row <= 256 else 1


def _image_parts(conv: Shape) -> int:
    """Return into how many parts threads divide an image of a weight gradient (``nthr_mb_work`` of the same file):
    positions of a 1x1 kernel, slices of a volume, groups of at least 9 rows of an image. Where a volume has more than a
    block of channels, threads divide these."""
    if conv.pointwise:
        return prod(conv.output_space)
    if conv.volumetric:
        return conv.output_space[0] if max(conv.inputs, conv.outputs) <= simd() else 1
    return 1 if conv.dilated else max(1, conv.output_space[-2] // 9)


_ALIGNMENT = 128
"""Bytes that a buffer of a scratchpad takes besides, for its alignment."""
_REDUCTION_BARRIERS = 8192 + _ALIGNMENT
"""Bytes of the barriers at which threads that add up partial sums wait for each other, and of the sums' alignment
(`init_scratchpad` in the same files)."""
