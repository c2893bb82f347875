"""An emulated CUDA device for recordings without a GPU: which storages lie on it, and `torch.cuda` functions."""

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
    """The composite ops that a dispatch mode must decompose itself, in inference mode, where they reach it whole."""

    instead: Mapping[Any, Callable[..., Any]]
    whole: frozenset[Any]
    taking_apart: Callable[[], AbstractContextManager[None]]
    differing: set[tuple[int, int]]
    """Compute capabilities on which an op runs another kernel; filled while the step runs."""


@contextmanager
def installed(card: Card, device: Device, chosen: Callable[[str, str], None]) -> Iterator[Composites]:
    """Within this context, a step that was written for CUDA runs on fake CPU tensors: `torch.cuda` answers for
    ``device``, tensors say where they would be, and ops are cast and decomposed as on the card.

    ``chosen(op, reason)`` is called with the kernel choice of an op that could run several.
    """
    others = frozenset(other.architecture for other in catalogue()) - {device.architecture}
    with ExitStack() as stack:
        stack.enter_context(functions.installed(card, device))
        stack.enter_context(tensors.installed(card))
        cast = stack.enter_context(autocast.installed(card.holds))
        replaced = stack.enter_context(composites.installed(card.holds, device.architecture, chosen, others))
        yield Composites(replaced.instead, replaced.whole, cast.taking_apart, replaced.differing)
