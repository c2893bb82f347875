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
class WorkspaceQuery:
    """A workspace size to query from cuDNN after the recording, and which of cuDNN's plans runs.

    ``first``: the first plan whose workspace can be allocated. ``largest``: all plans are tried, in a single workspace.
    ``any``: the fastest plan of an earlier benchmark, which is unknown without the GPU. For a recurrent network cuDNN
    returns the workspace on a card only, so a measured or an expected size is used.
    """

    question: Question | RecurrentQuestion
    plan: Literal["first", "largest", "any"]


@dataclass(frozen=True, slots=True)
class Temporary:
    """An allocation of ``bytes`` bytes besides an op's results. By default it is freed when the op returns."""

    bytes: int
    low: int | None = None
    """Lower bound of the bytes, if they are not known exactly; ``bytes`` is the upper bound."""
    owner: torch.Tensor | None = None
    """The result with which it is freed: a reserve space that the backward needs."""
    permanent: bool = False
    """Whether it is never freed."""
    first: bool = False
    """Whether it is allocated before the results instead of after."""
    followed: int | None = None
    """Number of the op's later allocations after which it is freed; None: freed when the op returns."""
    workspace: bool = False
    """Whether it is a library's workspace rather than a kernel's temporary."""
    query: WorkspaceQuery | None = None
    after: int | None = None
    """Index of the result after which it is allocated; without ``until`` it is freed before the next result."""
    until: int | None = None
    """Index of the result before which it is freed."""


@dataclass(frozen=True, slots=True)
class Semantics:
    """How a device's kernels differ from the fake implementations of ops, by overload name."""

    temporaries: Callable[[str, Arguments, Keywords, Any, bool], Sequence[Temporary]]
    """``(name, args, kwargs, result, in_backward)`` -> allocations of the kernel besides its results."""
    results: Mapping[str, Callable[[Arguments, Keywords, Any], Any]]
    """Name -> ``(args, kwargs, result) -> result`` with the device's sizes and strides."""
    instead: Mapping[str, Callable[[Arguments, Keywords], Any]]
    """For ops that fail or are slow on fake tensors: name -> ``(args, kwargs) -> result``, or NotImplemented to use the
    fake implementation."""
    assumed: Callable[[str, Arguments, Any, bool], str | None] = lambda name, args, result, replaced: None
    """``(name, args, result, whether instead computed the result)`` -> the assumption behind the result, as text for
    the report; None if the result is exact."""
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Name -> positions of the results in the order in which the kernel allocates them, if not in sequence; omitted
    results are in host memory."""


NONE = Semantics(lambda name, args, kwargs, result, in_backward: (), {}, {})
"""For ops on host memory while a step on a card is recorded: host memory does not count."""
