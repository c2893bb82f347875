"""Decompositions of memplan's ops into torch's ops, which Inductor can fuse.

Each computes the same as its kernel in memplan.planning.ops.piecewise, up to rounding. Ops that pack bits have no
decomposition and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memplan import _torch
from memplan._torch import inductor
from memplan.planning.graph.op_schema import overload
from memplan.planning.inductor import max_pool
from memplan.planning.levers.registry import LEVERS
from memplan.planning.ops import piecewise  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the ops
from memplan.planning.ops.custom_ops import define
from memplan.trace.semantics.traced_results import INSTEAD

_aten: Any = torch.ops.aten
_NORMS = (
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten.native_layer_norm.default,
    _aten.native_group_norm.default,
)


def decompositions(on_card: bool = False) -> Mapping[Any, Callable[..., Any]]:
    """Return the functions that replace ops when a step is traced, by op.

    ``on_card``: whether the step runs on a CUDA card. Only on the CPU some max pools run as torch's kernels instead of
    generated code (`max_pool`), since only there were both timed.
    """
    ops: Any = torch.ops.memplan
    return {
        **({} if on_card else max_pool.decompositions()),
        **_with_fake_kernels(),
        **{op: _norm(op) for op in _NORMS},
        **{op: function for lever in LEVERS for op, function in lever.lowered().items()},
        ops.dropout.default: lambda x, mask, scale: x * mask * scale,
        ops.cross_entropy_backward.default: _cross_entropy_backward,
    }


def _norm(op: Any) -> Callable[..., Any]:
    """Return Inductor's decomposition of a norm, changed so that in mixed precision statistics have the parameters'
    dtype, as the CPU's kernels return them. torch's decompositions round them to the input's dtype."""

    def norm(x: Tensor, *arguments: Any) -> Any:
        """Compute the norm of x; its parameters are the first tensors among the other arguments."""
        decomposition = inductor.decomposition(op)
        if decomposition is None:
            return NotImplemented  # the op is then traced as it is
        parameter = next((argument for argument in arguments if isinstance(argument, Tensor)), x)
        if parameter.dtype == x.dtype:
            return decomposition(x, *arguments)
        result, *statistics = decomposition(x.to(parameter.dtype), *arguments)  # it computes in this dtype anyway
        return result.to(x.dtype), *statistics

    return norm


def _cross_entropy_backward(
    grad_output: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    """Return (softmax - one_hot(target)) * scale of the sample, the gradient of a cross-entropy's input.

    The gradient of the log-probabilities, which torch computes first, needs no buffer. ``ignore``: the target whose
    samples do not count; the other arguments are those of ``nll_loss_backward``.
    """
    is_counted = target != ignore
    index = torch.where(is_counted, target, 0)  # an ignored target need not be a valid index
    scale = torch.where(is_counted, 1.0 if weight is None else weight[index], 0.0).to(log_probs.dtype)
    is_mean = reduction == 1  # ATen's number for it: 0 is "none", 2 is "sum"
    scale = scale * (grad_output / total_weight if is_mean else grad_output)
    classes = torch.arange(log_probs.shape[1], device=log_probs.device)
    spatial_dims = log_probs.dim() - 2  # (samples, classes, *spatial)
    classes = classes.view(-1, *[1] * spatial_dims)
    one_hot = classes == index.unsqueeze(1)
    return (log_probs.exp() - one_hot.to(log_probs.dtype)) * scale.unsqueeze(1)


@cache
def _with_fake_kernels() -> Mapping[Any, Callable[..., Any]]:
    """Return replacements for torch's ops that fake tensors refuse although the CPU runs them (`INSTEAD`).

    Each is an op of memplan with torch's own kernel, whose fake kernel is the function in `INSTEAD`.
    """
    replacements = dict[Any, Callable[..., Any]]()
    for target, results in INSTEAD.items():
        aten_op = _torch.op_named(target)
        if aten_op is not None:  # None: this torch has no such op
            name = target.split(".")[1].strip("_")
            _, _, signature = _torch.schema_of(aten_op).partition("(")
            # memplan::NAME with `results` as its fake kernel, then torch's op as its kernel
            register = define(f"{name}({signature}", lambda *args, results=results, **kwargs: results(args, kwargs))
            register(aten_op)
            replacements[aten_op] = overload(f"memplan.{name}.default")
    return replacements
