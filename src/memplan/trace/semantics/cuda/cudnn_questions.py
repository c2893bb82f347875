"""The queries for workspaces that torch sends to cuDNN for a convolution and its gradients.

Source: native/Convolution.cpp, _convolution and convolution_backward; native/cudnn/ConvShared.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.cudnn.questions import Kind, Question
from memplan.trace.semantics.cuda.cudnn_convolution import allows_tf32, copied_operand, in_channels_last
from memplan.trace.semantics.layout import Arguments

_DTYPES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip
_MAX_ALIGNMENT = 32


def questions(args: Arguments, result: Any, *, backward: bool) -> list[tuple[int, Question]]:
    """Return the queries that torch sends to cuDNN for a convolution: (position of a result, query) for each result."""
    if backward:
        y, x, weight = args[:3]
        stride, padding, dilation, transposed, mask = *args[4:8], args[10]
    else:
        x, weight, y = args[0], args[1], result
        stride, padding, dilation, transposed = args[3:7]
        mask = (True, False)
    if x.dtype not in _DTYPES:
        return []
    # a transposed convolution is the input gradient of a convolution, and the other way round
    own, swapped = ("input gradient", "forward") if transposed else ("forward", "input gradient")
    kinds: tuple[Kind, Kind] = (swapped if backward else own, "weight gradient")
    call = _Call(x, weight, y, (padding, stride, dilation), transposed)
    return [(position, call.question(kind)) for position, kind in enumerate(kinds) if mask[position]]


class _Call:
    """A convolution with its options. ``x`` and ``y`` are the images; a transposed convolution swaps their roles."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        options: tuple[Sequence[int], ...],
        transposed: bool,
    ) -> None:
        """``options``: padding, stride and dilation, each with a number for all dimensions of space or one for each."""
        self._channels_last = in_channels_last(x, weight)
        self._dtype = x.dtype
        self._tensors = (y, weight, x) if transposed else (x, weight, y)
        """In the roles of cuDNN's convolution: its images, filter and result."""
        self._is_1d = x.dim() == 3  # computed in 2d, with a height of 1
        expanded = [tuple(option) * (x.dim() - 2 if len(option) == 1 else 1) for option in options]
        of_height = (0, 1, 1)  # of the height that is added in 1d: no padding, a stride and a dilation of 1
        self._options = [
            (added, *option) if self._is_1d else option for added, option in zip(of_height, expanded, strict=True)
        ]
        """Padding, stride and dilation, by dimension of space."""

    def question(self, kind: Kind) -> Question:
        """The query for the result or a gradient."""
        x, w, y = (self._sizes(tensor) for tensor in self._tensors)
        alignments = [self._alignment(tensor) for tensor in self._tensors]
        alignments[{"input gradient": 0, "weight gradient": 1, "forward": 2}[kind]] = _MAX_ALIGNMENT  # newly allocated
        x_alignment, w_alignment, y_alignment = alignments
        padding, stride, dilation = self._options
        cudnn = torch.backends.cudnn
        return Question(
            kind, x, w, y, self._channels_last, _DTYPES[self._dtype], padding, stride, dilation,
            (x_alignment, w_alignment, y_alignment),
            tf32=self._dtype is not torch.float32 or allows_tf32(),
            deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    def _sizes(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The sizes of a tensor as cuDNN gets them: in 2d with a height of 1 if the convolution is in 1d."""
        sizes = tuple(int(size) for size in tensor.shape)
        return (*sizes[:2], 1, *sizes[2:]) if self._is_1d else sizes

    def _alignment(self, tensor: torch.Tensor) -> int:
        """Alignment of a tensor's address in bytes (native/cudnn/Conv_v8.cpp, getAlignment).

        Blocks of the allocator and copies are aligned, so only an offset in the storage matters.
        """
        offset = int(tensor.storage_offset()) * tensor.element_size()
        if not offset or copied_operand(tensor, self._channels_last):
            return _MAX_ALIGNMENT
        return min(_MAX_ALIGNMENT, offset & -offset)  # the largest power of two that divides the offset
