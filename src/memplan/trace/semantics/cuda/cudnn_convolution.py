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
from memplan.trace.semantics.kinds import Temporary
from memplan.trace.semantics.layout import bytes_of, copied_to, padded, space, suggests_channels_last

Backend = Literal["cudnn", "depthwise", "slow", "empty"]

_REDUCED = (torch.bfloat16, torch.float16)
_FLOAT = 4
_WINOGRAD = 36 / 16
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
    kernel: int
    itemsize: int
    ranks: int
    winograd: bool

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs // self.groups * self.kernel


def _shape_of(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, options: tuple[Any, ...]) -> _Shape:
    """Describe a convolution of ``x`` to ``y``; ``options``: stride, dilation, transposed, groups."""
    stride, dilation, transposed, groups = options
    big, little = (y, x) if transposed else (x, y)
    taps = weight.shape[2:]
    winograd = all(n == 3 for n in taps) and all(n == 1 for n in (*stride, *dilation)) and len(taps) == 2
    return _Shape(
        batch=x.shape[0],
        inputs=big.shape[1],
        outputs=little.shape[1],
        groups=groups,
        large=space(big.shape),
        small=space(little.shape),
        kernel=prod(taps),
        itemsize=x.element_size(),
        ranks=len(taps),
        winograd=winograd,
    )


def is_depthwise(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """native/Convolution.cpp, is_depthwise: one group per channel."""
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
    step, taps = stride[-1], weight.shape[-1]
    if height == 1 and step == 1:
        return True
    if (stride[0] != step and height != 1) or weight.shape[-2] != taps or taps not in (1, 3, 5) or width < 7:
        return False
    if step != 2:
        return step == 1
    if batch == 1:
        return taps != 1 or width <= 28
    if taps == 1:
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
    """Context.cpp, allowTF32CuDNN, for convolutions; ``allow_tf32`` sets it, too."""
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
    """Which library runs a convolution on CUDA.

    Source: native/Convolution.cpp, use_cudnn and _select_conv_backend. ``enabled`` is ``torch.backends.cudnn.enabled``.
    """
    if not x.numel() or not weight.numel():
        return BackendChoice("empty", "nothing to convolve")
    bfloat16 = torch.bfloat16 in (x.dtype, weight.dtype)
    wide = any(p >= s for p, s in zip(output_padding, stride, strict=False))
    refusal = None
    if not enabled:
        refusal = "cuDNN is switched off"
    elif bfloat16 and arch.capability < (8, 0):
        refusal = "cuDNN takes bfloat16 from sm_80 on"
    elif wide:
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

    Source: cuDNN's developer guide, "Conversion between FP32 and FP16" and "Tensor Core operations" on padding.
    """
    if not tensor_cores:
        return 0
    block = 16 // shape.itemsize if shape.itemsize < 16 else 1
    deep, wide = (padded(n // shape.groups, block) * shape.groups for n in (shape.inputs, shape.outputs))
    unpadded = deep == shape.inputs and wide == shape.outputs
    if channels_last and unpadded:
        return 0
    images = shape.batch * (deep * shape.large + wide * shape.small)
    return (images + deep * wide // shape.groups * shape.kernel) * shape.itemsize


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
    if shape.ranks != 2 or shape.kernel >= _FFT_TILE**2 or shape.groups > 1:
        return 0
    tiles = -(-shape.large // (_FFT_TILE // 2) ** 2)
    spectrum = _FFT_TILE * (_FFT_TILE // 2 + 1) * 8
    pairs = shape.batch * (shape.inputs + shape.outputs) * tiles + shape.inputs * shape.outputs
    return pairs * spectrum


def _split_sum_bytes(shape: _Shape, arch: Arch) -> int:
    """Bytes of float32 partial weight gradients of a split product that fills the card twice with 128 x 128 tiles."""
    high = -(-shape.outputs // shape.groups // _TILE)
    wide = -(-(shape.inputs // shape.groups * shape.kernel) // _TILE)
    splits = max(1, 2 * arch.multiprocessors // max(1, high * wide * shape.groups))
    most = -(-shape.batch * shape.small // _TILE)
    return min(splits, most) * shape.weights * _FLOAT if min(splits, most) > 1 else 0


def convolution_workspace(
    args: tuple[Any, ...], result: Any, arch: Arch, *, benchmark: bool = False, backward: bool = False
) -> Workspace:
    """Bytes of the workspace of ``aten.convolution`` or ``aten.convolution_backward``, as an interval.

    The upper end, with cuDNN's heuristics: the tensors in channels last with padded channels, and the largest of
    Winograd's transform (3x3, stride 1), the im2col buffer (3d, and 2d in float64), and for weight gradients the
    partial sums of a split product. With ``benchmark`` every algorithm is tried, so tiled FFTs and im2col count for
    all. Only one workspace is live at a time.

    Args:
        args: as dispatched.
        result: the op's result; only the forward's is looked at.
        benchmark: ``torch.backends.cudnn.benchmark``.
        backward: whether ``args`` are those of ``convolution_backward``.
    """
    if backward:
        y, x, weight = args[:3]
        stride, dilation, transposed, output_padding, groups, mask = *args[4:5], *args[6:11]
    else:
        x, weight, y = args[0], args[1], result
        stride, dilation, transposed, output_padding, groups = *args[3:4], *args[5:9]
        mask = (True, False, False)
    chosen = convolution_backend(
        x, weight, dilation, transposed, output_padding, stride, groups, arch, torch.backends.cudnn.enabled
    )
    shape = _shape_of(x, weight, y, (stride, dilation, transposed, groups))
    if chosen.backend == "slow":  # ConvolutionMM2d.cu and its kin: the columns of one sample, one group at a time
        columns = _im2col_bytes(shape) // max(1, shape.batch * groups)
        return Workspace(columns, columns, chosen.reason, product=True)
    if chosen.backend != "cudnn":
        return Workspace(0, 0, chosen.reason)
    cores = arch.capability >= (7, 0) and x.dtype in _REDUCED
    cores = cores or (arch.capability >= (8, 0) and x.dtype is torch.float32 and allows_tf32())
    algorithms = [_winograd_bytes(shape)]
    if shape.ranks == 3 or benchmark or x.dtype is torch.float64:
        algorithms.append(_im2col_bytes(shape))
    if benchmark:
        algorithms.append(_fft_bytes(shape))
    if mask[1]:
        algorithms.append(_split_sum_bytes(shape, arch))
    high = _layout_bytes(shape, in_channels_last(x, weight), cores) + max(algorithms)
    return Workspace(0, high, f"{chosen.reason} chooses the algorithm on the card", cudnn=True)


def copied_operand(tensor: torch.Tensor, channels_last: bool) -> int:
    """Return the bytes of the copy of an operand into cuDNN's memory format; 0 if it is in that format."""
    if tensor.dim() == 3:
        return 0 if tensor.is_contiguous() else bytes_of(tensor)
    return copied_to(tensor, channels_last)


def copies(backward: bool) -> Any:
    """Formula for the copies of the operands into cuDNN's memory format.

    Source: native/Convolution.cpp, _convolution and convolution_backward.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        operands = args[:3] if backward else args[:2]
        x, weight = operands[-2:]
        last = in_channels_last(x, weight) and torch.backends.cudnn.enabled
        return tuple(size for t in operands if (size := copied_operand(t, last)))

    return formula


def operand_copies(args: tuple[Any, ...], arch: Arch, *, backward: bool) -> list[Temporary]:
    """The copies that a convolution makes of its operands (see `copies`), with their lifetimes, and the staging buffer
    of the bias gradient.

    Operands are copied before the results are allocated, and freed when the bias gradient is computed. Source:
    native/Convolution.cpp, convolution_backward; native/cudnn/ConvShared.cpp, cudnn_convolution_backward: the gradient
    of the result is converted once, and made contiguous for each of the two gradients.
    """
    x, weight = args[1:3] if backward else args[:2]
    last = in_channels_last(x, weight)
    before = [x, weight] if not backward or args[10][1] else [weight]
    after = list[Temporary]()
    if backward:
        grad = args[0]
        if grad.dim() > 3 and suggests_channels_last(grad) != last:
            before.append(grad)
        else:
            size = copied_operand(grad, last)
            for_input, for_weight = Temporary(size, after=0), Temporary(size, after=0, until=_BIAS)
            after = [
                copy for copy, wanted in zip((for_input, for_weight), args[10], strict=False) if size and wanted
            ]  # the weight gradient's copy is made before that result is allocated
        if args[10][_BIAS]:
            summed = reductions.staging_buffer(grad, [0, *range(2, grad.dim())], max(4, grad.element_size()), arch)
            after += [Temporary(size, after=_BIAS) for size in summed if size]
    sizes = [copied_operand(operand, last) for operand in before]
    return [*(Temporary(size, first=True, until=_BIAS) for size in sizes if size), *after]


FORMULAS = {"aten.convolution.default": copies(False), "aten.convolution_backward.default": copies(True)}
"""Overload name -> bytes of copies."""
