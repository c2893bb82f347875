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
    """Return a norm's (output, mean, inverse deviation, ...) with the statistics in the parameters' dtype, as in mixed
    precision.

    Source: aten/src/ATen/native/Normalization.cpp (`batch_norm_cpu_update_stats_template`), layer_norm.cpp and
    group_norm.cpp (`param_scalar_type`).
    """
    # weight or bias, or a running statistic: all norms have them among these arguments
    parameter = next((arg for arg in args[1:5] if isinstance(arg, torch.Tensor)), None)
    if parameter is None or parameter.dtype == args[0].dtype:
        return tuple(results)
    output, mean, deviation, *others = results
    return output, mean.to(parameter.dtype), deviation.to(parameter.dtype), *others


def _like_operands(args: Arguments, kwargs: Keywords, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return a group norm's gradients in mixed precision: the input's gradient has the input's dtype.

    Source: aten/src/ATen/native/group_norm.cpp, `native_group_norm_backward`.
    """
    x, (grad_input, *parameter_gradients) = args[1], results
    return None if grad_input is None else grad_input.to(x.dtype), *parameter_gradients


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

    ``like``: its first result; None if the op does not compute it.
    """
    # a meta tensor stands for a tensor on the CPU
    if target != "aten.native_dropout_backward.default" or like.device.type not in ("cpu", "meta"):
        return args
    gradient, mask, scale, *others = args
    return gradient, mask, torch.tensor(scale, dtype=like.dtype).item(), *others
