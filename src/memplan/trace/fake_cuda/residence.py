"""Which storages lie on the card, during a recording on fake CPU tensors."""

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
_NODE = [CUDA]
"""The cards of a node, by their number: as objects that stay the same."""


OnCard = Literal["unknown", "named", "everything"]
"""What is known before a recording: nothing; the step names CUDA; it does not, so all its tensors are on the card."""


class Card:
    """Where storages lie, and the step's calls to the card's allocator.

    Until the build ends, only tensors whose device is CUDA lie on the card. If the build named no CUDA device, all
    tensors do, unless ``on_card`` says that the step will name it ("named"). "everything" puts all tensors on the card,
    named or not.
    """

    def __init__(
        self, ledger: Ledger, inside: Callable[[], bool], is_own: Callable[[torch.Tensor], bool], on_card: OnCard
    ) -> None:
        self.ledger = ledger
        self._inside = inside
        self._is_own = is_own
        self.within_compiled = False
        """Whether a compiled function runs: its tensors show as the CPU's, for which it is compiled, and decompose and
        are cast as on the card."""
        self._thread = threading.get_ident()
        self.everything = on_card == "everything"
        self.named = on_card == "named"
        self.calls: list[Call] = []
        self.names_cuda_late = False
        """CUDA was named for the first time in a step, after all tensors had been assumed to lie on the card."""
        self._destination: str | None = None
        self._may_guess = on_card == "unknown"
        """Whether `end_build` decides where tensors lie, which a later naming of CUDA can contradict."""
        if self.everything:
            ledger.device = ON_CARD

    @property
    def destination(self) -> str | None:
        """Device of the results of the running op; None if it was not set."""
        return self._destination

    def inside(self) -> bool:
        """Whether tensors show their real device, the CPU: while an op is dispatched, and in other threads."""
        return self._inside() or threading.get_ident() != self._thread

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage, or that of a tensor inside of it, is recorded as on the card; never in another
        thread than the recording's."""
        if threading.get_ident() != self._thread:
            return False
        tensor = next(iter(_torch.inner_tensors(tensor).values()), tensor)
        if self.within_compiled and not self._is_own(tensor):
            return True
        try:
            entry = self.ledger.find(tensor)
        except (RuntimeError, NotImplementedError):  # a wrapper without a storage, as of vmap
            entry = self.ledger.find(_torch.unwrapped(tensor))
        if self.everything and (entry is None or entry.op is None):
            return True
        # the step may have moved it to the host, or an op allocated it there (batch sizes of packed sequences)
        return entry is not None and entry.device == ON_CARD

    @property
    def fixed_precision(self) -> bool:
        """Whether it is decided that the step names CUDA, or that all tensors lie on the card."""
        return self.named or self.everything

    def end_build(self) -> None:
        """If the build named no CUDA device, move all its tensors to the card."""
        if not self.fixed_precision:
            self.everything = True
            self.ledger.move_all(ON_CARD)

    def note_cuda_named(self) -> None:
        """Record that the step names CUDA."""
        self.names_cuda_late |= self.everything and self._may_guess
        self.named = True

    def placing(self, device: torch.device) -> AbstractContextManager[None]:
        """Within this context, new tensors lie on ``device``, or on the card if the step's tensors all do."""
        return self.placing_only(CUDA if self.everything else device)

    @contextmanager
    def placing_only(self, device: torch.device) -> Iterator[None]:
        """Within this context, new tensors lie on ``device``, even if the step's tensors all lie on the card."""
        before = self._destination
        self._destination = ON_CARD if device.type == "cuda" else HOST
        try:
            yield
        finally:
            self._destination = before

    def placing_as_named(self, device: torch.device) -> AbstractContextManager[None]:
        """As `placing`, for a CUDA device that the step itself names, which is noted."""
        target = device_of_argument(device)
        self.note_cuda_named()
        return self.placing(target)

    @contextmanager
    def in_compiled(self, *, within: bool = True) -> Iterator[None]:
        """Within this context, a compiled function runs, or is compiled; or not, inside of that (``within``)."""
        before, self.within_compiled = self.within_compiled, within
        try:
            yield
        finally:
            self.within_compiled = before

    def call(self, kind: Any) -> None:
        """Record a call of the allocator (such as ``empty_cache``) as an event."""
        self.ledger.clock += 1
        self.calls.append(Call(self.ledger.clock, kind))


def card_of_rank() -> torch.device:
    """Return the device that tensors on the card show: ``cuda:N`` of the Nth rank of a node, ``cuda:0`` without ranks.
    It is the same object each time."""
    index = _torch.current_rank().local_rank
    while len(_NODE) <= index:
        _NODE.append(torch.device("cuda", len(_NODE)))
    return _NODE[index]


def device_of_argument(device: Any) -> torch.device:
    """The `torch.device` that a device argument names ("cuda", 0, a device); an integer is a CUDA index.

    Raises:
        DeviceError: another card than the recorded rank's.
    """
    target = CUDA if isinstance(device, int) and not isinstance(device, bool) else torch.device(device)
    index = device if isinstance(device, int) else target.index
    own = card_of_rank().index
    if target.type == "cuda" and index not in (None, own):
        raise DeviceError(
            f"device cuda:{index}",
            expected=f"one card, cuda:{own}: a recording knows one",
            do="Record the part of the step that runs on each card by itself",
        )
    return target
