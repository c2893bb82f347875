"""A card that is not there: which storages lie on it, and torch's functions that would ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from memplan.devices import Device
from memplan.trace.card import functions, tensors
from memplan.trace.card.residence import Card
from memplan.trace.semantics import autocast, replacements
from memplan.trace.semantics.replacements import Replacements


@contextmanager
def installed(card: Card, device: Device, chosen: Callable[[str, str], None]) -> Iterator[Replacements]:
    """A step that was written for CUDA runs on fake tensors of the CPU.

    ``chosen(op, reason)`` is told which kernel an op takes that could take several. Yields what a dispatch mode has to
    do itself.
    """
    with ExitStack() as stack:
        stack.enter_context(functions.installed(card, device))
        stack.enter_context(tensors.installed(card))
        stack.enter_context(autocast.installed(card.holds))
        yield stack.enter_context(replacements.installed(card.holds, device.architecture, chosen))
