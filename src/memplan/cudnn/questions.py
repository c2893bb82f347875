"""What torch asks cuDNN before a convolution, and what cuDNN answers: plain values."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Literal

Kind = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True, slots=True)
class Question:
    """A convolution as torch describes it to cuDNN. Source: native/cudnn/Conv_v8.cpp.

    ``x``, ``w`` and ``y`` are the sizes of images, weight and result of the plain convolution: of a transposed one, and
    of gradients, its operands and result in these roles. All three are dense, so that sizes and memory format say the
    strides. The number of groups follows from the channels.
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
    """Of the addresses of x, w and y in bytes, 32 at most."""
    tf32: bool
    """Whether products in float32 may be rounded to TF32; True for other types, where it changes nothing."""
    deterministic: bool

    @property
    def key(self) -> str:
        """Return the question as text, equal for equal questions."""
        return json.dumps(astuple(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A way in which cuDNN can run a convolution."""

    engine: str
    """cuDNN's own name: ``eng`` and a number."""
    workspace: int
    """Bytes."""


Plans = tuple[ExecutionPlan, ...]
"""In the order in which torch tries them."""


def stairs(plans: Plans) -> Plans:
    """Return the first plan, and of the others those that take less than all before: where a workspace cannot be
    allocated, torch tries the next plan, so that only these can follow.

    Example:
        >>> stairs((ExecutionPlan("eng1", 8), ExecutionPlan("eng2", 9), ExecutionPlan("eng3", 0)))
        (ExecutionPlan(engine='eng1', workspace=8), ExecutionPlan(engine='eng3', workspace=0))
    """
    found: list[ExecutionPlan] = []
    for plan in plans:
        if not found or plan.workspace < found[-1].workspace:
            found.append(plan)
    return tuple(found)
