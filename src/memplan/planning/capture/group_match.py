"""A group of calls while it is recognized, and what its recognizers share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from memplan.planning.capture.call_log import CallLog, LoggedCall

CROSS_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
"""Arguments of ``F.cross_entropy``."""
_CASTS = frozenset(("to", "type", "type_as", "float", "half", "bfloat16", "double"))
_DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d"))


@dataclass
class Match:
    """A group while it is recognized."""

    kernel: str
    calls: list[LoggedCall]
    operands: dict[str, tuple[LoggedCall, int]]
    """Name of the kernel's operand -> (call that reads the tensor, the tensor's number in the log)."""
    options: dict[str, Any]
    """Numbers and flags of the kernel, by name."""
    reshapes: tuple[int, ...] = ()
    """Numbers of the calls that reshape the linear layer's result within the group."""
    last_call_in_place: bool = False
    """Whether the last call changes the result of an inner call in place."""
    in_place_inner_calls: Collection[int] = ()
    """Numbers of the inner calls that change the result of an inner call in place."""
    reason: str = ""
    """Why the kernel cannot replace the group; empty if it may."""


def is_cast(log: CallLog, call: LoggedCall, source: int, result: int) -> bool:
    """Return whether a call casts a tensor from one floating-point dtype to another."""
    before, after = log.tensors[source].like, log.tensors[result].like
    return (
        call.name in _CASTS
        and (before.shape, before.device) == (after.shape, after.device)
        and before.dtype.is_floating_point
        and after.dtype.is_floating_point
    )


def without_casts(log: CallLog, tensor: int) -> tuple[int, list[LoggedCall]]:
    """Return the tensor that a tensor was cast from, through any number of casts, and the casts from the last to the
    first. Without casts: itself and an empty list."""
    casts = list[LoggedCall]()
    while (
        (producer := log.producer_of(tensor)) is not None
        and producer.reads
        and is_cast(log, producer, producer.reads[0], tensor)
    ):
        casts.append(producer)
        tensor = producer.reads[0]
    return tensor, casts


def is_inactive_dropout(call: LoggedCall) -> bool:
    """Return whether a call is a dropout that returns its input (MONAI puts such dropouts after each norm)."""
    if call.name not in _DROPOUTS or call.in_place or len(call.reads) != 1 or len(call.results) != 1:
        return False
    named = call.named(("input", "p", "training"))
    trains = named.get("training", named.get("train"))  # as F.dropout and as torch.dropout name it
    return named.get("p") == 0 or trains is False


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
