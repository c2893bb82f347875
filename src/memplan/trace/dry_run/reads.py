"""Reads of values from the emulated card, reported as assumptions, since no kernel computed the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.recording.symbolic_scalars import branches
from memplan.trace.records import Assumption

_READS = ("item", "tolist", "__float__", "__int__", "__index__", "__bool__", "__complex__")
_BRANCH_READS = ("__bool__", "__index__")
_SIZED_BY_VALUE = {
    name: getattr(torch, name) for name in ("nonzero", "unique", "unique_consecutive", "masked_select", "bincount")
}
_NO_DATA = "no kernel of a dry run computes anything, and only what the host wrote is there"


class Reads:
    """Records a step's reads of values from the card, with their source lines."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, tuple[str, int] | None], int] = {}
        """Number of reads by (kind, text, line)."""
        self._inside = False
        """Whether a method that reads is running: the methods that it calls are no further reads."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within this context, record reads of values from the card, and ops whose result size depends on values."""
        methods = {name: self._noting_read(name, getattr(torch.Tensor, name)) for name in _READS}
        sized = {name: self._noting_selection(name, function) for name, function in _SIZED_BY_VALUE.items()}
        on_tensors = {
            name: self._noting_selection(name, getattr(torch.Tensor, name))
            for name in sized
            if hasattr(torch.Tensor, name)
        }
        with _torch.patched(torch.Tensor, **methods, **on_tensors), _torch.patched(torch, **sized):
            yield

    def assumptions(self) -> tuple[Assumption, ...]:
        """Return the reads as assumptions; first reads that decide a branch or a size."""
        rows = [
            Assumption(kind, text, format_frame(frame), count)  # pyright: ignore[reportArgumentType]  # kinds below
            for (kind, text, frame), count in self._counts.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.kind == "scalar"))

    def _noting_read(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a tensor's method that reads a value, with an assumption noted if the tensor is on the card."""

        def read_and_note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            """Return the value; if it is read from the card, note the assumption that it is a real value."""
            if self._inside or not tensor.is_cuda:  # these methods call each other
                return read(tensor, *args, **kwargs)
            self._inside = True
            try:
                value = read(tensor, *args, **kwargs)
            finally:
                self._inside = False
            shown = f"{value!r:.20}" if tensor.dim() == 0 else "a list"
            if name in _BRANCH_READS or branches(user_frame()):
                self._add("branch", f"a value was read as {shown}, and {_NO_DATA}: it DECIDES A BRANCH or a size here, "
                          "and the step may go another way on a real card")  # fmt: skip
            else:
                self._add("scalar", f"a value was read as {shown}: {_NO_DATA}")
            return value

        return read_and_note

    def _noting_selection(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that selects by value, with an assumption noted if its tensor is on the card."""

        def run_and_note(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._add("bound", f"{name} SELECTS BY VALUE: {_NO_DATA}, so its result is smaller than on a real card")
            return function(tensor, *args, **kwargs)

        return run_and_note

    def _add(self, kind: str, text: str) -> None:
        """Count a read, an `Assumption` of this kind and text, at the user's current line."""
        key = (kind, text, user_frame())
        self._counts[key] = self._counts.get(key, 0) + 1
