"""Temporaries of interpolation on the CPU (cpu/UpSampleKernel.cpp)."""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import copied_to, suggests_channels_last

_INDEX = 8


def index_table(taps: int) -> Formula:
    """upsample_generic_Nd_kernel_impl: indices and weights of `taps` inputs per output position and dimension."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        return sum(result.shape[2:]) * taps * (_INDEX + result.element_size())

    return formula


def index_table_or_copies(taps: int) -> Formula:
    """Return the formula of upsampling: the index table for contiguous inputs; channels-last copies of input and output
    if the output is small; nothing for channels-last inputs."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        x = args[0]
        if x.dim() == 4 and sum(result.shape[2:]) <= _SMALL_OUTPUT:
            return 0 if x.shape[1] == 1 else copied_to(x, True) + copied_to(result, True)
        if x.shape[1] > 1 and suggests_channels_last(x):
            return 0
        return index_table(taps)(args, kwargs, result)

    return formula


_SMALL_OUTPUT = 128


def separable(reach: int) -> Formula:
    """separable_upsample_generic_Nd_kernel_impl: the image resized along its rows and, per output position, the weights
    within the filter's reach, three integers and a pointer."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        x, aligned, scales = args[0], args[2], (args[3:5] if len(args) > 3 else (None, None))
        (in_height, in_width), (height, width) = x.shape[-2:], result.shape[-2:]
        intermediate = (
            result.numel() // max(1, height) * in_height * x.element_size()
            if (in_height, in_width) != (height, width)
            else 0
        )
        rows = _weights_bytes(in_width, width, aligned, scales[1], reach, x)
        columns = _weights_bytes(in_height, height, aligned, scales[0], reach, x)
        return (intermediate if rows and columns else 0) + max(rows, columns)

    return formula


def _weights_bytes(size: int, target: int, aligned: bool, factor: float | None, reach: int, x: torch.Tensor) -> int:
    if size == target:
        return 0
    scale = 1 / factor if factor else size / target
    if aligned:
        scale = (size - 1) / (target - 1) if target > 1 else 0.0
    taps = 2 * math.ceil(reach * max(scale, 1.0)) + 1
    return target * (4 * _INDEX + taps * x.element_size())


def copied_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """A copy of the gradient unless it is contiguous in its memory format."""
    return copied_to(args[0], suggests_channels_last(args[0]))


def trilinear(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Linear.cpp, _trilinear: for one slice, the product of the first two operands, and its product with the third."""
    tensors, expands, summed = args[:3], args[3:6], args[6]
    unrolled = args[7] if len(args) > 7 else kwargs.get("unroll_dim", 1)
    if not all(tensor.numel() for tensor in tensors):
        return 0
    shapes = []
    for tensor, expand in zip(tensors, expands, strict=True):
        sizes = iter(tensor.shape)
        shapes.append([1 if d in expand else next(sizes) for d in range(tensor.dim() + len(expand))])
    first = list(torch.broadcast_shapes(shapes[0], shapes[1]))
    first = [1 if d == unrolled or (d in summed and d in expands[2]) else n for d, n in enumerate(first)]
    both = torch.broadcast_shapes(first, [1 if d == unrolled else n for d, n in enumerate(shapes[2])])
    second = [1 if d in summed else n for d, n in enumerate(both)]
    return (math.prod(first) + math.prod(second)) * result.element_size()


_BACKWARD = (
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}.default": index_table(1) for name in ("upsample_nearest1d", "_upsample_nearest_exact1d")},
    "aten.upsample_linear1d.default": index_table(2),
    "aten.upsample_bicubic2d.default": index_table(4),
    **{
        f"aten.{name}.default": index_table_or_copies(1)
        for name in (
            "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"
        )
    },
    "aten.upsample_bilinear2d.default": index_table_or_copies(2),
    "aten.upsample_trilinear3d.default": index_table_or_copies(2),
    "aten._upsample_bilinear2d_aa.default": separable(1),
    "aten._upsample_bicubic2d_aa.default": separable(2),
    **{f"aten.{name}_backward.default": copied_gradient for name in _BACKWARD},
    "aten._trilinear.default": trilinear,
}  # fmt: skip
