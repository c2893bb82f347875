"""Temporaries of interpolation on the CPU (cpu/UpSampleKernel.cpp)."""

from __future__ import annotations

from typing import Any

from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import copied_to, suggests_channels_last

_INDEX = 8


def index_table(taps: int) -> Formula:
    """Return the formula of upsampling by tables (upsample_generic_Nd_kernel_impl): for each output position in each
    dimension, the indices and weights of ``taps`` inputs."""

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


def copied_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries of upsampling's backward: a copy of the gradient unless it is contiguous in its format."""
    return copied_to(args[0], suggests_channels_last(args[0]))


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
    **{f"aten.{name}_backward.default": copied_gradient for name in _BACKWARD},
}  # fmt: skip
