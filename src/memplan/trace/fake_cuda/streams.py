"""Streams and events that only say which stream's pool an allocation comes from: a recording has no time."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.fake_cuda.residence import CUDA, Card


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        type(self).made += 1
        self.stream_id = self.cuda_stream = type(self).made
        self.device, self.device_index, self.device_type, self.priority = CUDA, 0, 1, priority

    def wait_event(self, event: Any) -> None:
        """Do nothing: no time passes."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: no time passes."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event if event is not None else Event()

    def query(self) -> bool:
        """Return whether all is done: it is."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured."""
        return False

    def synchronize(self) -> None:
        """Do nothing: no time passes."""


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    def record(self, stream: Any = None) -> None:
        """Do nothing: no time passes."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: no time passes."""

    def query(self) -> bool:
        """Return whether it has passed: it has."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return milliseconds; none are known, and 1 divides safely."""
        return 1.0

    def synchronize(self) -> None:
        """Do nothing: no time passes."""


class Streams:
    """Which stream is the current one."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._waiting: list[int] = []

        streams = self

        class OfThisRecording(Stream):
            """Numbers begin anew with every recording."""

            def __enter__(self) -> Any:
                self._within = _Within(streams, self)
                self._within.__enter__()
                return self

            def __exit__(self, *_: object) -> None:
                self._within.__exit__()

        self.Stream = OfThisRecording
        self.default = OfThisRecording()
        self.default.stream_id = self.default.cuda_stream = OfThisRecording.made = 0
        self._current: Any = self.default

    def current(self, device: Any = None) -> Any:
        """`torch.cuda.current_stream`."""
        return self._current

    def set(self, stream: Any) -> None:
        """`torch.cuda.set_stream`."""
        self._current = stream
        self._card.ledger.stream = stream.stream_id

    def context(self, stream: Any) -> Any:
        """`torch.cuda.stream`."""
        return _Within(self, stream)


class _Within:
    def __init__(self, streams: Streams, stream: Any) -> None:
        self._streams, self.stream = streams, stream

    def __enter__(self) -> Any:
        self._before = self._streams.current()
        if self.stream is not None:
            self._streams.set(self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.set(self._before)


class OnDevice:
    """Stands in for `torch.cuda.device` and `torch.cuda.device_of`: there is one."""

    def __init__(self, device: Any = None) -> None:
        if not isinstance(device, torch.Tensor) and device is not None:
            from memplan.trace.fake_cuda.residence import wanted

            wanted(device)
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: object) -> bool:
        return False
