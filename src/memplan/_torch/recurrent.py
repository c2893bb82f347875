"""Replace the functions that nn.LSTM and nn.GRU call. Seen in torch 2.11 and 2.13: ``torch._VF.lstm`` and ``gru``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplan._torch.patches import patched


def recurrent_replaced(lstm: Callable[..., Any], gru: Callable[..., Any]) -> AbstractContextManager[None]:
    """Within this context nn.LSTM and nn.GRU call these functions for padded inputs.

    Each takes the arguments of torch's, and returns NotImplemented to call that.
    """
    vf: Any = torch._VF
    return patched(vf, lstm=_or(lstm, vf.lstm), gru=_or(gru, vf.gru))


def _or(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        is_packed = not isinstance(args[3], bool)
        result = NotImplemented if is_packed else function(*args)
        return original(*args) if result is NotImplemented else result

    return call
