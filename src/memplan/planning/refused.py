"""Ops that fake tensors refuse and the CPU runs, in fused steps: torch's own kernels, under names of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from memplan import _torch
from memplan.planning.forms import overload
from memplan.planning.ops import define
from memplan.planning.results import INSTEAD


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By torch's op, what stands for it when a step is traced."""
    return {op: _registered(op, name) for name in INSTEAD if (op := _torch.op_named(name)) is not None}


def _registered(torchs: Any, target: str) -> Callable[..., Any]:
    name = target.split(".")[1].strip("_")
    _, _, given = _torch.schema_of(torchs).partition("(")
    define(f"{name}({given}", lambda *args, **kwargs: INSTEAD[target](args, kwargs))(torchs)
    return overload(f"memplan.{name}.default")
