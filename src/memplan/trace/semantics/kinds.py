"""Storages that a kernel takes and no tensor shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from memplan.cudnn.questions import Question

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """What cuDNN is asked for a workspace when the recording is over, and which of its plans runs.

    ``first``: the first one whose workspace can be allocated. ``largest``: all are tried, in one workspace. ``any``:
    the fastest of those that were tried before, which nobody knows without the card.
    """

    question: Question
    plan: Literal["first", "largest", "any"]


@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes of one allocation beyond an op's results. By default it is freed when the op is over."""

    bytes: int
    low: int | None = None
    """Where nobody can say how much it takes: the least; ``bytes`` are the most."""
    owner: torch.Tensor | None = None
    """The result that it lives with: a reserve that the backward needs."""
    held: bool = False
    """It is never freed."""
    first: bool = False
    """It is made before the results, not after."""
    followed: int | None = None
    """It is freed as soon as so many more were made after it; None: when the op is over."""
    workspace: bool = False
    """A library's workspace, rather than a kernel's temporary."""
    asked: Asked | None = None
    after: int | None = None
    """Number of the result after which it is made; without ``until`` it is freed before the next one."""
    until: int | None = None
    """Number of the result before which it is freed."""


@dataclass(frozen=True, slots=True)
class Semantics:
    """What a device's kernels do beyond what a fake tensor tells.

    ``extras(name, args, kwargs, result, in_backward)``: the storages that a kernel takes for itself.
    ``results``: for an op by name, ``(args, kwargs, result) -> result`` with the sizes that the device gives.
    ``instead``: for an op that fake tensors refuse, or take long for, ``(args, kwargs) -> result``; NotImplemented: as
    they say.
    ``order``: of an op by name, the positions of its results in the order in which its kernel makes them, where that is
    another one; those that are left out are in the host's memory.
    ``assumed``: of ``(name, args, result, answered)``, what was taken for granted of a result; None where it is
    certain. ``answered``: ``instead`` gave it.
    """

    extras: Callable[[str, Arguments, Keywords, Any, bool], Sequence[Extra]]
    results: Mapping[str, Callable[[Arguments, Keywords, Any], Any]]
    instead: Mapping[str, Callable[[Arguments, Keywords], Any]]
    assumed: Callable[[str, Arguments, Any, bool], str | None] = lambda name, args, result, answered: None
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


NONE = Semantics(lambda name, args, kwargs, result, in_backward: (), {}, {})
"""Of the host's memory, where a step for a card is recorded: it does not count."""
