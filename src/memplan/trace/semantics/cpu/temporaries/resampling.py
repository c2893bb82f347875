"""Temporaries of interpolation on the CPU (cpu/UpSampleKernel.cpp)."""

from __future__ import annotations

from functools import partial
from typing import Any

from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import copy_bytes, suggests_channels_last

_INDEX = 8
_SMALL_OUTPUT = 128


def index_table(args: Arguments, kwargs: Keywords, result: Any, *, taps: int) -> int:
    """Bytes of temporaries of upsampling by tables (upsample_generic_Nd_kernel_impl): for each output position in each
    dimension, the indices and weights of ``taps`` inputs."""
    return sum(result.shape[2:]) * taps * (_INDEX + result.element_size())


def index_table_or_copies(args: Arguments, kwargs: Keywords, result: Any, *, taps: int) -> int:
    """Bytes of temporaries of upsampling: the index table for contiguous inputs; channels-last copies of input and
    output if the output is small; nothing for channels-last inputs.

    ``taps``: inputs of an output position, in each dimension.
    """
    x, channels = args[0], args[0].shape[1]
    if x.dim() == 4 and sum(result.shape[2:]) <= _SMALL_OUTPUT:
        copies = copy_bytes(x, channels_last=True) + copy_bytes(result, channels_last=True)
        return copies if channels > 1 else 0
    if channels > 1 and suggests_channels_last(x):
        return 0
    return index_table(args, kwargs, result, taps=taps)


FORMULAS: dict[str, Formula] = {
    "aten.upsample_nearest1d.default": partial(index_table, taps=1),
    "aten._upsample_nearest_exact1d.default": partial(index_table, taps=1),
    "aten.upsample_linear1d.default": partial(index_table, taps=2),
    "aten.upsample_bicubic2d.default": partial(index_table, taps=4),
    **{
        f"aten.{name}.default": partial(index_table_or_copies, taps=1)
        for name in (
            "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"
        )
    },
    "aten.upsample_bilinear2d.default": partial(index_table_or_copies, taps=2),
    "aten.upsample_trilinear3d.default": partial(index_table_or_copies, taps=2),

}  # fmt: skip
