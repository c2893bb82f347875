"""A card that is not there: which storages lie on it, and torch's functions that would ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from memplan.devices import Device, catalogue
from memplan.trace.fake_cuda import functions, tensors
from memplan.trace.fake_cuda.residence import Card
from memplan.trace.semantics.cuda import autocast, composites


@dataclass(frozen=True, slots=True)
class Composites:
    """What a dispatch mode has to do itself, in inference mode, where composite ops reach it whole."""

    instead: Mapping[Any, Callable[..., Any]]
    whole: frozenset[Any]
    taking_apart: Callable[[], AbstractContextManager[None]]
    differing: set[tuple[int, int]]
    """Compute capabilities on which an op takes another kernel; filled while the step runs."""


@contextmanager
def installed(card: Card, device: Device, chosen: Callable[[str, str], None]) -> Iterator[Composites]:
    """Run a step that was written for CUDA on fake tensors of the CPU.

    ``chosen(op, reason)`` is told which kernel an op takes that could take several.
    """
    others = frozenset(other.architecture for other in catalogue()) - {device.architecture}
    with ExitStack() as stack:
        stack.enter_context(functions.installed(card, device))
        stack.enter_context(tensors.installed(card))
        cast = stack.enter_context(autocast.installed(card.holds))
        replaced = stack.enter_context(composites.installed(card.holds, device.architecture, chosen, others))
        yield Composites(replaced.instead, replaced.whole, cast.taking_apart, replaced.differing)
