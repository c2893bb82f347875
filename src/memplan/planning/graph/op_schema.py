"""Overloads of ops, their arguments' names, and the bytes of an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from memplan import _torch
from memplan.planning.graph.joint_graph import Value


def is_dense(value: Value) -> bool:
    """Return whether its elements follow one another in memory in some order of its dimensions, without gap or
    overlap."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride, value.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_contiguous(value: Value) -> bool:
    """Return whether its elements follow one another in memory in the order of its dimensions."""
    expected = 1
    for stride, size in zip(reversed(value.stride), reversed(value.shape), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    return getattr(torch, dtype).itemsize


CROSS_ENTROPY = "memplan.cross_entropy_backward.default"


BATCH_NORM_AGAIN = "memplan.batch_norm_again.default"


CHUNKED = "memplan.convolution_chunks.default"


OWN: Mapping[str, tuple[str, ...]] = {
    BATCH_NORM_AGAIN: ("self", "weight", "bias", "mean", "invstd"),
    CROSS_ENTROPY: ("grad_output", "log_probs", "target", "weight", "reduction", "ignore_index", "total_weight"),
    CHUNKED: (
        "input",
        "weight",
        "bias",
        "stride",
        "padding",
        "dilation",
        "transposed",
        "output_padding",
        "groups",
        "pieces",
    ),
    "memplan.dropout_mask.default": ("self", "p", "generator"),
    "memplan.dropout.default": ("self", "mask", "scale"),
}
"""Ops of the engine's own that a graph can have (see `memplan.planning.passes`), and their arguments: what plans does
not load what registers them."""


def overload(target: str) -> Any:
    """Return the op that a target names: ``aten.relu.default``."""
    namespace, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)


@cache
def _names(target: str) -> tuple[str, ...]:
    return OWN.get(target) or tuple(argument.name for argument in _torch.arguments(overload(target)))


def arguments_of(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the op's schema; those left out are missing."""
    given = {**dict(zip(_names(target), args, strict=False)), **kwargs}
    return {name: given[name] for name in _names(target) if name in given}


NUMBERS = 128
"""Bytes in which torch wraps the numbers that its kernels are called with, at most."""


def short(target: str) -> str:
    """Return the name of an op alone: ``relu`` of ``aten.relu.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target
