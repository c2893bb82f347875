"""Run convolutions on tensors in channels last: the layout that oneDNN computes in, so that it need not reorder.

What a fused step computes may be rounded otherwise, so it may be laid out otherwise, too. A step is captured anew with
the first operand of every convolution of images or volumes in channels last; what follows takes that over, as eager
mode has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by number of dimensions."""
_CONVOLUTIONS = frozenset([torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d])


class ChannelsLast(TorchFunctionMode):
    """Hands convolutions their first operand in channels last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            if args:
                args = (channels_last(args[0]), *args[1:])
            else:
                kwargs = {**kwargs, "input": channels_last(kwargs["input"])}
        return func(*args, **kwargs)


def channels_last(tensor: Tensor) -> Tensor:
    """Return the tensor in channels last, where it has channels."""
    known = _FORMATS.get(tensor.dim())
    return tensor if known is None else tensor.contiguous(memory_format=known)


def in_order(tensor: Tensor) -> Tensor:
    """Return a result in the order that callers expect."""
    known = _FORMATS.get(tensor.dim())
    return tensor if known is None or not tensor.is_contiguous(memory_format=known) else tensor.contiguous()
