"""Questions to cuDNN about a convolution, and its answers, as plain values."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Literal

Kind = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True, slots=True)
class Question:
    """A convolution as torch describes it to cuDNN. Source: native/cudnn/Conv_v8.cpp.

    ``x``, ``w`` and ``y`` are the sizes of input, weight and output of the forward convolution. Transposed convolutions
    and gradients have their operands and result in these roles. All three are dense, so sizes and memory format
    determine the strides. The number of groups follows from the channels.
    """

    kind: Kind
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    channels_last: bool
    dtype: str
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    alignments: tuple[int, int, int]
    """Alignment of the addresses of x, w and y in bytes, at most 32."""
    tf32: bool
    """Whether float32 may be computed in TF32; always True for other types, for which it has no effect."""
    deterministic: bool

    @property
    def key(self) -> str:
        """The question as JSON text, equal for equal questions."""
        return json.dumps(astuple(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """An engine with which cuDNN can run a convolution, and its workspace."""

    engine: str
    """cuDNN's own name: ``eng`` and a number."""
    workspace: int
    """In bytes."""


Plans = tuple[ExecutionPlan, ...]
"""In the order in which torch tries them."""


def stairs(plans: Plans) -> Plans:
    """Return the plans that torch can end up with: each whose workspace is smaller than those of all plans before it.

    If a workspace cannot be allocated, torch tries the next plan, so a plan that takes more would fail as well.

    Example:
        >>> stairs((ExecutionPlan("eng1", 8), ExecutionPlan("eng2", 9), ExecutionPlan("eng3", 0)))
        (ExecutionPlan(engine='eng1', workspace=8), ExecutionPlan(engine='eng3', workspace=0))
    """
    smaller: list[ExecutionPlan] = []
    for plan in plans:
        if not smaller or plan.workspace < smaller[-1].workspace:
            smaller.append(plan)
    return tuple(smaller)
