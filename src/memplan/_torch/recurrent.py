"""Replace the functions that nn.LSTM, nn.GRU and nn.RNN call.

Seen in torch 2.11 and 2.13: ``torch._VF.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplan._torch.patches import patched


def recurrent_replaced(functions: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Within this context recurrent layers call the replacement of their kind ("lstm", "gru") for padded inputs.

    A replacement takes the arguments of torch's function; where it returns NotImplemented, torch's runs instead.
    """
    vf: Any = torch._VF

    def replaced(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``function``, and ``original`` for packed inputs or where it returns
        NotImplemented."""

        def call(*args: Any) -> Any:
            is_packed = not isinstance(args[3], bool)
            result = NotImplemented if is_packed else function(*args)
            return original(*args) if result is NotImplemented else result

        return call

    return patched(vf, **{name: replaced(function, getattr(vf, name)) for name, function in functions.items()})
