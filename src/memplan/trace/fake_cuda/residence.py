"""Which storages lie on the card, while a step for one is recorded on fake tensors of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from memplan import _torch
from memplan.errors import DeviceError
from memplan.trace.recording.ledger import Ledger
from memplan.trace.records import HOST, ON_CARD, Call

CUDA = torch.device(ON_CARD)
CPU = torch.device(HOST)


OnCard = Literal["unknown", "named", "everything"]
"""What is known of a step before it is recorded: nothing; that it names CUDA; that all of it lies on the card."""


class Card:
    """Where storages lie, and what the step asked of the card's allocator.

    Until building ends, only what names CUDA lies on the card. If nothing did by then, everything does, unless
    ``on_card`` says that the step will name it ("named"), or that it does not matter if it does ("everything").
    """

    def __init__(self, ledger: Ledger, inside: Callable[[], bool], on_card: OnCard) -> None:
        self.ledger = ledger
        self._inside = inside
        self._thread = threading.get_ident()
        self.everything = on_card == "everything"
        self.named = on_card == "named"
        self.calls: list[Call] = []
        self.named_late = False
        """CUDA was named for the first time inside of a step, after everything had been taken to lie on the card."""
        self._destination: str | None = None
        self._guessed = on_card == "unknown"
        if self.everything:
            ledger.device = ON_CARD

    @property
    def destination(self) -> str | None:
        """Return where the results of the running op go, if that was said."""
        return self._destination

    def inside(self) -> bool:
        """Return whether a tensor is what it is, on the CPU: while an op is dispatched, and to any other thread."""
        return self._inside() or threading.get_ident() != self._thread

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage lies on the card."""
        if threading.get_ident() != self._thread:
            return False
        try:
            entry = self.ledger.find(tensor)
        except (RuntimeError, NotImplementedError):  # a wrapper without a storage, as vmap makes them
            entry = self.ledger.find(_torch.unwrapped(tensor))
        if self.everything:  # but what the step moved, or an op made for C++ to read: how many sequences have a step
            return entry is None or entry.op is None or entry.device == ON_CARD
        return entry is not None and entry.device == ON_CARD

    @property
    def settled(self) -> bool:
        """Return whether it is known that the step names CUDA, or that everything lies on the card."""
        return self.named or self.everything

    def end_build(self) -> None:
        """End building: if nothing named CUDA so far, everything lies on the card."""
        if not self.settled:
            self.everything = True
            self.ledger.take_to(ON_CARD)

    def name(self) -> None:
        """Note that the step names CUDA."""
        self.named_late |= self.everything and self._guessed
        self.named = True

    def going(self, device: torch.device) -> AbstractContextManager[None]:
        """Put whatever is made inside on ``device``, or on the card, if everything lies there."""
        return self.moving(CUDA if self.everything else device)

    @contextmanager
    def moving(self, device: torch.device) -> Iterator[None]:
        """Put whatever is made inside on ``device``."""
        before = self._destination
        self._destination = ON_CARD if device.type == "cuda" else HOST
        try:
            yield
        finally:
            self._destination = before

    def going_where_named(self, device: torch.device) -> AbstractContextManager[None]:
        """Enter `going`, where the step itself names the device."""
        found = wanted(device)
        self.name()
        return self.going(found)

    def call(self, kind: Any) -> None:
        """Note a call that matters to the allocator, as an event of its own."""
        self.ledger.clock += 1
        self.calls.append(Call(self.ledger.clock, kind))


def wanted(device: Any) -> torch.device:
    """Return the device that an argument asks for; a number is a CUDA device.

    Raises:
        DeviceError: a second card.
    """
    found = CUDA if isinstance(device, int) and not isinstance(device, bool) else torch.device(device)
    index = device if isinstance(device, int) else found.index
    if found.type == "cuda" and index:
        raise DeviceError(
            f"device cuda:{index}",
            expected="one card, cuda:0: a recording knows one",
            do="Record the part of the step that runs on each card by itself",
        )
    return found
