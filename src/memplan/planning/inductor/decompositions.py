"""The ops of a planned step that are not torch's, in terms of torch's: what Inductor can fuse.

Each computes what the kernel of that name computes (memplan.planning.ops.piecewise), but for rounding. What packs bits
is not among them: it runs as it is.
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
    """Return the functions that replace memplan's ops, by op, when a step is traced.

    ``on_card``: whether it runs on a CUDA card. Which pools are left to torch was measured on CPUs alone.
    """
    ops: Any = torch.ops.memplan
    return {
        **({} if on_card else max_pool.decompositions()),
        **_corrected(),
        **{op: _norm(op) for op in _NORMS},
        **{op: function for lever in LEVERS for op, function in lever.lowered().items()},
        ops.dropout.default: lambda x, mask, scale: x * mask * scale,
        ops.cross_entropy_backward.default: _cross_entropy_backward,
    }


def _norm(op: Any) -> Callable[..., Any]:
    """Return a norm as Inductor has it. In mixed precision the CPU's kernels give statistics in the parameters' dtype;
    torch's decompositions round them to that of the input, whatever has been made for the backward pass."""

    def norm(x: Tensor, *rest: Any) -> Any:
        traced = inductor.decomposition(op)
        if traced is None:
            return NotImplemented
        like = next((one for one in rest if isinstance(one, Tensor)), x)
        if like.dtype == x.dtype:
            return traced(x, *rest)
        result, *statistics = traced(x.to(like.dtype), *rest)  # they compute in that anyway
        return result.to(x.dtype), *statistics

    return norm


def _cross_entropy_backward(
    grad_output: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    """Softmax less one at the target, scaled sample by sample: no buffer for the gradient in between."""
    counts = target != ignore
    at = torch.where(counts, target, 0)
    scale = torch.where(counts, 1.0 if weight is None else weight[at], 0.0).to(log_probs.dtype)
    scale = scale * (grad_output / total_weight if reduction == 1 else grad_output)
    classes = torch.arange(log_probs.shape[1], device=log_probs.device)
    classes = classes.view(-1, *[1] * (log_probs.dim() - 2))
    hit = classes == at.unsqueeze(1)
    return (log_probs.exp() - hit.to(log_probs.dtype)) * scale.unsqueeze(1)


@cache
def _corrected() -> Mapping[Any, Callable[..., Any]]:
    """Return the functions that replace torch's ops, by op, when a step is traced."""
    return {op: _registered(op, name) for name in INSTEAD if (op := _torch.op_named(name)) is not None}


def _registered(torchs: Any, target: str) -> Callable[..., Any]:
    name = target.split(".")[1].strip("_")
    _, _, given = _torch.schema_of(torchs).partition("(")
    define(f"{name}({given}", lambda *args, **kwargs: INSTEAD[target](args, kwargs))(torchs)
    return overload(f"memplan.{name}.default")
