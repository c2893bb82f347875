"""Types that describe the allocations of an op besides its results, and corrections of its results, per device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from memplan.cudnn.questions import Question
from memplan.cudnn.recurrent import RecurrentQuestion

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Formula = Callable[[Arguments, Keywords, Any], int]
"""(args, kwargs, result) of an op -> bytes of its kernel's temporaries."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A workspace size to query from cuDNN after the recording, and which of its plans runs.

    ``first``: the first plan whose workspace can be allocated. ``largest``: all are tried, in one workspace. ``any``:
    the fastest of those benchmarked earlier, which is unknown without the GPU. cuDNN names the workspace of a recurrent
    network on a card only: it is a measured or an expected one.
    """

    question: Question | RecurrentQuestion
    plan: Literal["first", "largest", "any"]


@dataclass(frozen=True, slots=True)
class Temporary:
    """One allocation of `bytes` bytes besides an op's results. By default it is freed when the op returns."""

    bytes: int
    low: int | None = None
    """Lower bound of the bytes, if they are not known exactly; ``bytes`` is the upper bound."""
    owner: torch.Tensor | None = None
    """The result it is freed with: a reserve space that the backward needs."""
    held: bool = False
    """Whether it is never freed."""
    first: bool = False
    """Whether it is allocated before the results, not after."""
    followed: int | None = None
    """Number of later allocations of the op after which it is freed; None: freed when the op returns."""
    workspace: bool = False
    """Whether it is a library's workspace rather than a kernel's temporary."""
    asked: Asked | None = None
    after: int | None = None
    """Index of the result after which it is allocated; without ``until`` it is freed before the next result."""
    until: int | None = None
    """Index of the result before which it is freed."""


@dataclass(frozen=True, slots=True)
class Semantics:
    """What a device's kernels do that fake tensors do not show.

    ``temporaries(name, args, kwargs, result, in_backward)``: the allocations of a kernel besides its results.
    ``results``: overload name -> ``(args, kwargs, result) -> result`` with the device's sizes and strides.
    ``instead``: for ops that fake tensors refuse or are slow at: overload name -> ``(args, kwargs) -> result``, or
    NotImplemented to use the fake tensors' result.
    ``order``: overload name -> the positions of the results in the order in which the kernel allocates them, if not in
    sequence; omitted results are in host memory.
    ``assumed(name, args, result, answered)``: the assumption behind a result, as text for the report, or None if it is
    exact. ``answered``: whether ``instead`` computed the result.
    """

    temporaries: Callable[[str, Arguments, Keywords, Any, bool], Sequence[Temporary]]
    results: Mapping[str, Callable[[Arguments, Keywords, Any], Any]]
    instead: Mapping[str, Callable[[Arguments, Keywords], Any]]
    assumed: Callable[[str, Arguments, Any, bool], str | None] = lambda name, args, result, answered: None
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


NONE = Semantics(lambda name, args, kwargs, result, in_backward: (), {}, {})
"""For host memory while a step on a GPU is recorded: nothing of it counts."""
