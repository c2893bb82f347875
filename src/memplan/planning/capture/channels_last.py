"""Convert the inputs of convolutions to channels last, the layout in which oneDNN computes without reordering.

Fused steps may round differently from eager mode, so they may use other layouts, too. Ops after a convolution inherit
its layout, as in eager mode.
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
    """Converts the first operand of convolutions to channels last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            if args:
                args = (channels_last(args[0]), *args[1:])
            else:
                kwargs = {**kwargs, "input": channels_last(kwargs["input"])}
        return func(*args, **kwargs)


def channels_last(tensor: Tensor) -> Tensor:
    """Return the tensor in channels last if it is a batch of images or volumes."""
    memory_format = _FORMATS.get(tensor.dim())
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def contiguous_if_channels_last(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous if it is in channels last."""
    memory_format = _FORMATS.get(tensor.dim())
    is_last = memory_format is not None and tensor.is_contiguous(memory_format=memory_format)
    return tensor.contiguous() if is_last else tensor
