"""Ops whose results are other than fake tensors say, beside those that a recording knows.

Taken as a step is traced, so that what is made of such a result is right, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memplan.trace.semantics.cpu import results as recorded
from memplan.trace.semantics.result_strides import then

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

TRAINING_NORM = "aten._native_batch_norm_legit_functional.default"


def _with_statistics(args: Arguments, kwargs: Keywords, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return a norm's results: in mixed precision the statistics have the parameters' dtype.

    Source: aten/src/ATen/native/Normalization.cpp (`batch_norm_cpu_update_stats_template`), layer_norm.cpp and
    group_norm.cpp (`param_scalar_type`).
    """
    of = next((one for one in args[1:5] if isinstance(one, torch.Tensor)), None)
    if of is None or of.dtype == args[0].dtype:
        return tuple(results)
    return tuple(one.to(of.dtype) if at in (1, 2) else one for at, one in enumerate(results))


def _like_operands(args: Arguments, kwargs: Keywords, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return a group norm's gradients in mixed precision: the input's has its dtype, the parameters' have theirs.

    Source: aten/src/ATen/native/group_norm.cpp, `native_group_norm_backward`.
    """
    of_input, *others = results
    return of_input if of_input is None else of_input.to(args[1].dtype), *others


def _resized(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Columns put together to an image: made as large as the columns, then resized, which gives nothing back.

    Source: aten/src/ATen/native/Col2Im.cpp.
    """
    columns = args[0]
    if columns.numel() <= result.numel():
        return result
    return result.new_empty(columns.numel()).as_strided(result.shape, result.stride())


_IN_MIXED_PRECISION = {
    TRAINING_NORM: _with_statistics,
    "aten._native_batch_norm_legit.no_stats": _with_statistics,
    "aten.native_layer_norm.default": _with_statistics,
    "aten.native_group_norm.default": _with_statistics,
    "aten.native_group_norm_backward.default": _like_operands,
}
RESULTS: Mapping[str, Callable[[Arguments, Keywords, Any], Any]] = {
    **recorded.RESULTS,
    **{name: then(recorded.RESULTS[name], correction) for name, correction in _IN_MIXED_PRECISION.items()},
    "aten.col2im.default": _resized,
}
INSTEAD = recorded.INSTEAD


def eager_arguments(target: str, args: Arguments, like: Any) -> Arguments:
    """Return the arguments with which a kernel gives what eager mode gives on the CPU: there dropout multiplies by a
    mask of the tensor's own dtype, so its scale is rounded to that.

    Args:
        target: the op.
        args: its arguments.
        like: its result.
    """
    if target != "aten.native_dropout_backward.default" or like.device.type not in (
        "cpu",
        "meta",
    ):  # meta: stands for the CPU
        return args
    return (*args[:2], torch.tensor(args[2], dtype=like.dtype).item(), *args[3:])
