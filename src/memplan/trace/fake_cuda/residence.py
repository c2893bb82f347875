"""Which storages are on the card, during a recording on fake CPU tensors."""

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
"""The devices of a node's cards by index; each is always the same object."""


OnCard = Literal["unknown", "named", "everything"]
"""Whether the step names CUDA, as far as known before a recording: unknown; it does; it does not, so all of its tensors
are on the card."""


class Card:
    """The devices of storages, and the step's calls to the card's allocator.

    Until the build ends, only tensors whose device is CUDA are on the card. If the build names no CUDA device, all
    tensors are, unless ``on_card`` is "named": the step will name CUDA. "everything" puts all tensors on the card.
    """

    def __init__(
        self, ledger: Ledger, inside: Callable[[], bool], is_own: Callable[[torch.Tensor], bool], on_card: OnCard
    ) -> None:
        """``on_card``: whether the step names CUDA, as far as known before the recording: "unknown"; "named": it does;
        "everything": it does not, so all its tensors are on the card."""
        self.ledger = ledger
        self._inside = inside
        """Returns whether an op is dispatched, to which ``tensor.device`` is the CPU."""
        self._is_own = is_own
        """Returns whether a tensor is of this recording."""
        self.within_compiled = False
        """Whether a compiled function runs: ``.device`` of its tensors is the CPU, for which it is compiled; ops
        decompose and are cast as on the card."""
        self._thread = threading.get_ident()
        """Id of the recording's thread."""
        self.everything = on_card == "everything"
        """Whether all tensors are on the card."""
        self.named = on_card == "named"
        """Whether the step has named CUDA, or will."""
        self.calls: list[Call] = []
        """The step's calls to the allocator so far."""
        self.names_cuda_late = False
        """Whether CUDA was first named in a step, after all tensors had been assumed to be on the card."""
        self._destination: str | None = None
        """As for `destination`."""
        self._may_guess = on_card == "unknown"
        """Whether `end_build` assumes the devices of tensors, which a later naming of CUDA can contradict."""
        if self.everything:
            ledger.device = ON_CARD

    @property
    def destination(self) -> str | None:
        """Device of the results of the running op, or None if the op's caller named none."""
        return self._destination

    def inside(self) -> bool:
        """Return whether ``tensor.device`` is the real device, the CPU: while an op is dispatched, and in other
        threads."""
        return self._inside() or threading.get_ident() != self._thread

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage (for a wrapper subclass, that of an inner tensor) is recorded as on the
        card; False in other threads than the recording's."""
        if threading.get_ident() != self._thread:
            return False
        tensor = next(iter(_torch.inner_tensors(tensor).values()), tensor)
        if self.within_compiled and not self._is_own(tensor):  # a fake tensor of the compiler
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
        """Whether it is certain that the step names CUDA, or that all tensors are on the card."""
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
        """Within this context, new tensors are on ``device``, or on the card if all of the step's tensors are."""
        return self.placing_only(CUDA if self.everything else device)

    @contextmanager
    def placing_only(self, device: torch.device) -> Iterator[None]:
        """Within this context, new tensors are on ``device``, even if all of the step's tensors are on the card."""
        before = self._destination
        self._destination = ON_CARD if device.type == "cuda" else HOST
        try:
            yield
        finally:
            self._destination = before

    def placing_as_named(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context of `placing` for a CUDA device that the step itself names, and note that it does."""
        target = device_of_argument(device)
        self.note_cuda_named()
        return self.placing(target)

    @contextmanager
    def in_compiled(self, *, within: bool = True) -> Iterator[None]:
        """Within this context, set `within_compiled`: a compiled function runs or is compiled, or not (a nested
        function that is not compiled)."""
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
    """Return the ``.device`` of tensors on the card, always the same object: ``cuda:N`` for the Nth rank of a node,
    ``cuda:0`` without ranks."""
    index = _torch.current_rank().local_rank
    while len(_NODE) <= index:
        _NODE.append(torch.device("cuda", len(_NODE)))
    return _NODE[index]


def device_of_argument(device: Any) -> torch.device:
    """Return the `torch.device` of a device argument ("cuda", 0, a device); an integer is a CUDA index. Raises
    DeviceError: another card than the recorded rank's."""
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
