"""Facts about ops and tensors: overloads, argument names, element sizes, layouts."""

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
    """Return whether a tensor is contiguous, by its shape and strides."""
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
    "memplan.is_not_zero.default": ("self",),
    "memplan.dropout.default": ("self", "mask", "scale"),
}
"""The engine's own ops that a graph can contain (see `memplan.planning.passes`), and their argument names. They are
listed here because planning does not import the modules that register them."""


def overload(target: str) -> Any:
    """Return the op of a target such as ``aten.relu.default``."""
    namespace, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)


@cache
def _argument_names(target: str) -> tuple[str, ...]:
    return OWN.get(target) or tuple(argument.name for argument in _torch.arguments(overload(target)))


def arguments_of(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the op's schema. Omitted arguments are missing."""
    by_name = {**dict(zip(_argument_names(target), args, strict=False)), **kwargs}
    return {name: by_name[name] for name in _argument_names(target) if name in by_name}


NUMBERS = 128
"""Most bytes of the 0-d tensors in which torch wraps the numbers that kernels are called with."""


def short(target: str) -> str:
    """Return the bare name of an op: ``relu`` of ``aten.relu.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target
