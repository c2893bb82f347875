"""What torch asks cuDNN for a convolution and for its gradients.

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
_ALIGNED = 32


def questions(args: Arguments, result: Any, *, backward: bool) -> list[tuple[int, Question]]:
    """Return the questions of ``aten.convolution`` or ``aten.convolution_backward``, which cuDNN takes.

    Args:
        args: as dispatched.
        result: the op's result.
        backward: whether ``args`` are those of ``convolution_backward``.

    Returns:
        With each, the position among the op's results of the one that it computes.
    """
    if backward:
        y, x, weight = args[:3]
        stride, padding, dilation, transposed, mask = *args[4:8], args[10]
    else:
        x, weight, y = args[0], args[1], result
        stride, padding, dilation, transposed = args[3:7]
        mask = (True, False)
    if x.dtype not in _DTYPES:
        return []
    call = _Call(x, weight, y, (padding, stride, dilation), transposed)
    forward: Kind = "input gradient" if transposed else "forward"
    if not backward:
        return [(0, call.question(forward))]
    into: Kind = "forward" if transposed else "input gradient"
    both: tuple[Kind, ...] = (into, "weight gradient")
    return [(number, call.question(kind)) for number, kind in enumerate(both) if mask[number]]


class _Call:
    """A convolution with its options, the images of which are ``x`` and ``y``: of a transposed one, turned round."""

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, options: tuple[Sequence[int], ...], turned: bool
    ) -> None:
        self._last = in_channels_last(x, weight)
        self._dtype = x.dtype
        self._tensors = (y, weight, x) if turned else (x, weight, y)
        self._flat = x.dim() == 3  # computed in two dimensions, of which the first is 1
        given = [tuple(option) * (x.dim() - 2 if len(option) == 1 else 1) for option in options]
        self._options = [
            (first, *option) if self._flat else option for first, option in zip((0, 1, 1), given, strict=True)
        ]

    def question(self, kind: Kind) -> Question:
        """Return what is asked for the result or a gradient: each is made anew, so that it is aligned."""
        x, w, y = (self._sizes(tensor) for tensor in self._tensors)
        alignments = tuple(self._alignment(tensor) for tensor in self._tensors)
        made = {"forward": 2, "input gradient": 0, "weight gradient": 1}[kind]
        first, second, third = (_ALIGNED if number == made else found for number, found in enumerate(alignments))
        padding, stride, dilation = self._options
        cudnn = torch.backends.cudnn
        return Question(
            kind, x, w, y, self._last, _DTYPES[self._dtype], padding, stride, dilation, (first, second, third),
            tf32=self._dtype is not torch.float32 or allows_tf32(),
            deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    def _sizes(self, tensor: torch.Tensor) -> tuple[int, ...]:
        sizes = tuple(int(size) for size in tensor.shape)
        return (*sizes[:2], 1, *sizes[2:]) if self._flat else sizes

    def _alignment(self, tensor: torch.Tensor) -> int:
        """native/cudnn/Conv_v8.cpp, getAlignment: of the address in bytes; blocks and copies are aligned."""
        offset = int(tensor.storage_offset()) * tensor.element_size()
        if not offset or copied_operand(tensor, self._last):
            return _ALIGNED
        return min(_ALIGNED, offset & -offset)
