"""Corrections of op results while a graph is traced, besides those of a recording.

They are applied during tracing, so that ops that use such a result see its real sizes, dtypes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memplan.trace.semantics.cpu import results as recorded
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.result_strides import in_sequence

TRAINING_NORM = "aten._native_batch_norm_legit_functional.default"


def _with_statistics(args: Arguments, kwargs: Keywords, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return a norm's results with the statistics in the parameters' dtype, as in mixed precision.

    Source: aten/src/ATen/native/Normalization.cpp (`batch_norm_cpu_update_stats_template`), layer_norm.cpp and
    group_norm.cpp (`param_scalar_type`).
    """
    parameter = next((arg for arg in args[1:5] if isinstance(arg, torch.Tensor)), None)
    if parameter is None or parameter.dtype == args[0].dtype:
        return tuple(results)
    return tuple(result.to(parameter.dtype) if i in (1, 2) else result for i, result in enumerate(results))


def _like_operands(args: Arguments, kwargs: Keywords, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return a group norm's gradients in mixed precision: each has the dtype of its input or parameter.

    Source: aten/src/ATen/native/group_norm.cpp, `native_group_norm_backward`.
    """
    grad_input, *others = results
    return grad_input if grad_input is None else grad_input.to(args[1].dtype), *others


_IN_MIXED_PRECISION = {
    TRAINING_NORM: _with_statistics,
    "aten._native_batch_norm_legit.no_stats": _with_statistics,
    "aten.native_layer_norm.default": _with_statistics,
    "aten.native_group_norm.default": _with_statistics,
    "aten.native_group_norm_backward.default": _like_operands,
}
RESULTS: Mapping[str, Callable[[Arguments, Keywords, Any], Any]] = {
    **recorded.RESULTS,
    **{name: in_sequence(recorded.RESULTS[name], correction) for name, correction in _IN_MIXED_PRECISION.items()},
}
INSTEAD = recorded.INSTEAD


def eager_arguments(target: str, args: Arguments, like: Any) -> Arguments:
    """Return the arguments with which an op's kernel computes the same bits as eager mode on the CPU.

    In eager mode the dropout mask has the dtype of the tensor, so the scale is rounded to that dtype.

    Args:
        target: the op.
        args: its arguments.
        like: its first result; None if the op does not compute it.
    """
    if target != "aten.native_dropout_backward.default":
        return args
    if like.device.type not in ("cpu", "meta"):  # a meta tensor stands for a tensor on the CPU
        return args
    return (*args[:2], torch.tensor(args[2], dtype=like.dtype).item(), *args[3:])
