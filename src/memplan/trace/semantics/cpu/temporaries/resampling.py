"""Temporaries of interpolation on the CPU (cpu/UpSampleKernel.cpp)."""

from __future__ import annotations

from typing import Any

from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import copy_bytes, suggests_channels_last

_INDEX = 8
_SMALL_OUTPUT = 128


def index_table(taps: int) -> Formula:
    """Return the formula of upsampling by tables (upsample_generic_Nd_kernel_impl): for each output position in each
    dimension, the indices and weights of ``taps`` inputs."""

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        return sum(result.shape[2:]) * taps * (_INDEX + result.element_size())

    return formula


def index_table_or_copies(taps: int) -> Formula:
    """Return the formula of upsampling: the index table for contiguous inputs; channels-last copies of input and output
    if the output is small; nothing for channels-last inputs.

    ``taps``: inputs of an output position, in each dimension.
    """

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        x, channels = args[0], args[0].shape[1]
        if x.dim() == 4 and sum(result.shape[2:]) <= _SMALL_OUTPUT:
            copies = copy_bytes(x, channels_last=True) + copy_bytes(result, channels_last=True)
            return copies if channels > 1 else 0
        if channels > 1 and suggests_channels_last(x):
            return 0
        return index_table(taps)(args, kwargs, result)

    return formula


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

}  # fmt: skip
