"""Convolutions on CUDA: which library runs them, copies into its memory format, and cuDNN's workspace as an interval.

cuDNN chooses an algorithm by shape, version and card, and with ``benchmark`` by trying. Unless cuDNN itself can be
queried (`memplan.cudnn`), the workspace is unknown without the card: the lower end is 0, the upper end what the known
algorithms need. Very large 3d convolutions can need more: 17 GB and a request for 161 GiB are on record
(pytorch#128947), also #136479, #31500 and #13412.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from memplan.trace.semantics.cuda import reductions
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, nonzero
from memplan.trace.semantics.kinds import Arguments, Keywords, Temporary
from memplan.trace.semantics.layout import ceil_div, copy_bytes, padded, space, suggests_channels_last

Backend = Literal["cudnn", "depthwise", "slow", "empty"]

_REDUCED = (torch.bfloat16, torch.float16)
_FLOAT = 4
_WINOGRAD = 36 / 16
"""Values of Winograd's F(4x4, 3x3) transform per position of an image: 6x6 for every 4x4."""
_TILE = 128
_FFT_TILE = 32
_BIAS = 2
"""Position of the bias gradient among the results of ``convolution_backward``."""


class Workspace(NamedTuple):
    """Bytes of the workspace of a convolution, as an interval, and the reason."""

    low: int
    high: int
    reason: str
    product: bool = False
    """Whether the convolution runs a cuBLAS product, which needs a cuBLAS workspace, too."""
    cudnn: bool = False
    """Whether cuDNN runs the convolution, and can be queried."""


class BackendChoice(NamedTuple):
    """Which library runs a convolution, and why."""

    backend: Backend
    reason: str


@dataclass(frozen=True, slots=True)
class _Shape:
    """A convolution as a matrix product: sizes in elements. Transposed convolutions swap input and output."""

    batch: int
    inputs: int
    outputs: int
    groups: int
    large: int
    """Positions on the side with the larger images: the input of a plain convolution."""
    small: int
    """Positions on the other side: the output of a plain convolution."""
    kernel: int
    """Positions of the kernel: 9 for 3x3."""
    itemsize: int
    spatial_dims: int
    winograd: bool
    """Whether Winograd's algorithm supports it: 3x3, without stride and dilation."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs // self.groups * self.kernel


def _shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> _Shape:
    """Describe a convolution of ``x`` to ``y``, which may be transposed."""
    large, small = (y, x) if transposed else (x, y)
    kernel = weight.shape[2:]
    return _Shape(
        batch=x.shape[0],
        inputs=large.shape[1],
        outputs=small.shape[1],
        groups=groups,
        large=space(large.shape),
        small=space(small.shape),
        kernel=prod(kernel),
        itemsize=x.element_size(),
        spatial_dims=len(kernel),
        winograd=tuple(kernel) == (3, 3) and max(*stride, *dilation) == 1,
    )


def is_depthwise(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """Return whether a convolution has a group per input channel: native/Convolution.cpp, is_depthwise."""
    if transposed or x.dim() not in (4, 5) or groups <= 1:
        return False
    return x.shape[1] == groups and weight.shape[0] % x.shape[1] == 0


def _prefers_cudnn_depthwise(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether torch prefers cuDNN for a contiguous float16 depthwise convolution.

    Source: native/Convolution.cpp, use_cudnn_depthwise and check_cudnn_depthwise_workload_with_filter. From 2.14 on
    a setting of torch can override this.
    """
    if x.dtype is not torch.float16 or weight.dtype is not torch.float16 or x.dim() != 4 or x.shape[1] < 32:
        return False
    batch, channels, height, width = x.shape
    step, kernel_height, kernel_width = stride[-1], *weight.shape[-2:]
    if height == 1 and step == 1:
        return True
    if stride[0] != step and height != 1:
        return False
    if kernel_height != kernel_width or kernel_width not in (1, 3, 5) or width < 7:
        return False
    if step != 2:
        return step == 1
    if batch == 1:
        return kernel_width != 1 or width <= 28
    if kernel_width == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def in_channels_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN convolves in channels last: if input or weight is, but never in float64.

    Source: native/ConvUtils.h, cudnn_conv_suggest_memory_format.
    """
    if torch.float64 in (x.dtype, weight.dtype):
        return False
    return suggests_channels_last(x) or suggests_channels_last(weight)


def allows_tf32() -> bool:
    """Return whether cuDNN's convolutions may compute float32 in TF32: Context.cpp, allowTF32CuDNN. ``allow_tf32`` sets
    it, too."""
    cudnn: Any = torch.backends.cudnn  # torch puts an object in the module's place, which has more
    return cudnn.conv.fp32_precision == "tf32"


def convolution_backend(
    x: torch.Tensor,
    weight: torch.Tensor,
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    stride: Sequence[int],
    groups: int,
    arch: Arch,
    enabled: bool = True,
) -> BackendChoice:
    """Return which library runs a convolution on CUDA, and why.

    Source: native/Convolution.cpp, use_cudnn and _select_conv_backend. ``enabled`` is ``torch.backends.cudnn.enabled``.
    """
    if not x.numel() or not weight.numel():
        return BackendChoice("empty", "nothing to convolve")
    refusal = None  # why cuDNN does not run it
    if not enabled:
        refusal = "cuDNN is switched off"
    elif torch.bfloat16 in (x.dtype, weight.dtype) and arch.capability < (8, 0):
        refusal = "cuDNN takes bfloat16 from sm_80 on"
    elif any(padding >= step for padding, step in zip(output_padding, stride, strict=False)):
        refusal = "the output padding reaches the stride"
    if is_depthwise(x, weight, transposed, groups) and (refusal or not in_channels_last(x, weight)):
        if not refusal and max(dilation) == 1 and _prefers_cudnn_depthwise(x, weight, stride):
            return BackendChoice("cudnn", "cuDNN's depthwise kernel for float16")
        return BackendChoice("depthwise", "torch's own depthwise kernel")
    if refusal:
        return BackendChoice("slow", refusal)
    return BackendChoice("cudnn", "cuDNN")


def _layout_bytes(shape: _Shape, channels_last: bool, tensor_cores: bool) -> int:
    """Bytes of all three tensors converted to channels last, with channels padded to 16 bytes, for the tensor cores.

    0 without tensor cores, and for tensors in channels last that need no padding. Source: cuDNN's developer guide,
    "Conversion between FP32 and FP16" and "Tensor Core operations" on padding.
    """
    if not tensor_cores:
        return 0
    block = max(1, 16 // shape.itemsize)  # elements of 16 bytes
    inputs, outputs = (padded(n // shape.groups, block) * shape.groups for n in (shape.inputs, shape.outputs))
    if channels_last and (inputs, outputs) == (shape.inputs, shape.outputs):
        return 0
    images = shape.batch * (inputs * shape.large + outputs * shape.small)
    weights = inputs * outputs // shape.groups * shape.kernel
    return (images + weights) * shape.itemsize


def _winograd_bytes(shape: _Shape) -> int:
    """Bytes of F(4x4, 3x3): 36 float32 values for every 16 of the images, and 36 for every filter."""
    if not shape.winograd:
        return 0
    images = shape.batch * (shape.inputs * shape.large + shape.outputs * shape.small)
    return int((images * _WINOGRAD + shape.weights // shape.kernel * 36) * _FLOAT)


def _im2col_bytes(shape: _Shape) -> int:
    """Bytes of the im2col buffer: every patch of every image as a column."""
    if shape.kernel == 1:
        return 0
    return shape.batch * shape.inputs * shape.kernel * shape.small * shape.itemsize


def _fft_bytes(shape: _Shape) -> int:
    """Bytes of tiled FFTs: complex float32 spectra of 32 x 17 for images and filters, if kernels fit a tile."""
    if shape.spatial_dims != 2 or shape.kernel >= _FFT_TILE**2 or shape.groups > 1:
        return 0
    tiles = ceil_div(shape.large, (_FFT_TILE // 2) ** 2)
    spectrum_bytes = _FFT_TILE * (_FFT_TILE // 2 + 1) * 8
    spectra = shape.batch * (shape.inputs + shape.outputs) * tiles + shape.inputs * shape.outputs
    return spectra * spectrum_bytes


def _split_sum_bytes(shape: _Shape, arch: Arch) -> int:
    """Bytes of float32 partial weight gradients of a split product that fills the card twice with 128 x 128 tiles."""
    tile_rows = ceil_div(shape.outputs // shape.groups, _TILE)
    tile_columns = ceil_div(shape.inputs // shape.groups * shape.kernel, _TILE)
    tiles = max(1, tile_rows * tile_columns * shape.groups)
    max_splits = ceil_div(shape.batch * shape.small, _TILE)
    splits = min(max(1, 2 * arch.multiprocessors // tiles), max_splits)
    return splits * shape.weights * _FLOAT if splits > 1 else 0


def convolution_workspace(
    args: tuple[Any, ...], result: Any, arch: Arch, *, benchmark: bool = False, backward: bool = False
) -> Workspace:
    """Bytes of the workspace of ``aten.convolution`` or ``aten.convolution_backward``, as an interval.

    The upper end, with cuDNN's heuristics: the tensors in channels last with padded channels, and the largest of
    Winograd's transform (3x3, stride 1), the im2col buffer (3d, and 2d in float64), and for weight gradients the
    partial sums of a split product. With ``benchmark`` every algorithm is tried, so tiled FFTs and im2col count for
    all. Only one workspace is live at a time.

    ``backward``: whether ``args`` are those of ``convolution_backward``.
    """
    if backward:
        y, x, weight = args[:3]
        stride, _, dilation, transposed, output_padding, groups, (_, needs_weight_gradient, _) = args[4:11]
    else:
        x, weight, y = args[0], args[1], result
        stride, _, dilation, transposed, output_padding, groups = args[3:9]
        needs_weight_gradient = False
    chosen = convolution_backend(
        x, weight, dilation, transposed, output_padding, stride, groups, arch, torch.backends.cudnn.enabled
    )
    shape = _shape_of(x, weight, y, stride, dilation, transposed, groups)
    if chosen.backend == "slow":  # ConvolutionMM2d.cu and its kin: the columns of one sample, one group at a time
        columns = _im2col_bytes(shape) // max(1, shape.batch * groups)
        return Workspace(low=columns, high=columns, reason=chosen.reason, product=True)
    if chosen.backend != "cudnn":
        return Workspace(low=0, high=0, reason=chosen.reason)
    tensor_cores = arch.capability >= (7, 0) and x.dtype in _REDUCED
    if x.dtype is torch.float32 and allows_tf32():
        tensor_cores = arch.capability >= (8, 0)
    algorithms = [_winograd_bytes(shape)]
    if shape.spatial_dims == 3 or benchmark or x.dtype is torch.float64:
        algorithms.append(_im2col_bytes(shape))
    if benchmark:
        algorithms.append(_fft_bytes(shape))
    if needs_weight_gradient:
        algorithms.append(_split_sum_bytes(shape, arch))
    high = _layout_bytes(shape, in_channels_last(x, weight), tensor_cores) + max(algorithms)
    return Workspace(low=0, high=high, reason=f"{chosen.reason} chooses the algorithm on the card", cudnn=True)


def copied_operand(tensor: torch.Tensor, channels_last: bool) -> int:
    """Return the bytes of the copy of an operand into cuDNN's memory format; 0 if it is in that format.

    1d convolutions are always contiguous.
    """
    return copy_bytes(tensor, channels_last and tensor.dim() > 3)


def forward_copies(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (native/Convolution.cpp, _convolution): copies of input and weight in cuDNN's memory format."""
    return _copies(args[:2])


def backward_copies(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (native/Convolution.cpp, convolution_backward): copies of gradient, input and weight in cuDNN's
    memory format."""
    return _copies(args[:3])


def _copies(operands: Sequence[torch.Tensor]) -> AllocationBytes:
    """Bytes of the operands' copies in the layout in which cuDNN convolves. The last two are input and weight."""
    channels_last = in_channels_last(*operands[-2:]) and torch.backends.cudnn.enabled
    return nonzero(*(copied_operand(operand, channels_last) for operand in operands))


def operand_copies(args: tuple[Any, ...], arch: Arch, *, backward: bool) -> list[Temporary]:
    """Return the copies that a convolution by cuDNN makes of its operands, with their lifetimes.

    In the backward, the staging buffer of the bias gradient is among them. Operands are copied before the results are
    allocated, and freed when the bias gradient is computed. Source: native/Convolution.cpp, convolution_backward;
    native/cudnn/ConvShared.cpp, cudnn_convolution_backward: the gradient of the result is converted once, and made
    contiguous for each of the two gradients. Lifetimes are in positions of the results: the gradients of input, weight
    and bias.

    ``args``: of ``aten.convolution``, or of ``aten.convolution_backward`` if ``backward``.
    """
    if not backward:
        return _copied_at_first(args[:2], in_channels_last(*args[:2]))
    grad, x, weight, *_ = args
    needs_input, needs_weight, needs_bias = args[10]
    channels_last = in_channels_last(x, weight)
    at_first = [x, weight] if needs_weight else [weight]
    later = list[Temporary]()
    if grad.dim() > 3 and suggests_channels_last(grad) != channels_last:
        at_first.append(grad)
    else:
        size = copied_operand(grad, channels_last)
        if size and needs_input:
            later.append(Temporary(size, after=0))
        if size and needs_weight:  # copied before that result is allocated
            later.append(Temporary(size, after=0, until=_BIAS))
    if needs_bias:
        summed_dims = [0, *range(2, grad.dim())]
        staging = reductions.staging_buffer(grad, summed_dims, max(4, grad.element_size()), arch)
        later += [Temporary(size, after=_BIAS) for size in staging if size]
    return _copied_at_first(at_first, channels_last) + later


def _copied_at_first(operands: Sequence[torch.Tensor], channels_last: bool) -> list[Temporary]:
    """The copies that live from before the first result until the bias gradient is computed."""
    sizes = [copied_operand(operand, channels_last) for operand in operands]
    return [Temporary(size, first=True, until=_BIAS) for size in sizes if size]


FORMULAS = {"aten.convolution.default": forward_copies, "aten.convolution_backward.default": backward_copies}
"""Overload name -> bytes of copies."""
