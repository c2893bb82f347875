"""Emulated streams and events: a recording has no time, streams only select the memory pool."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.fake_cuda.residence import Card, card_of_rank


class Stream:
    """Replaces `torch.cuda.Stream`."""

    count = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        type(self).count += 1
        self.stream_id = self.cuda_stream = type(self).count
        """Its number among the streams of its class, from 1."""
        self.device_type, self.priority = 1, priority  # c10::DeviceType::CUDA

    @property
    def device(self) -> torch.device:
        """The recorded rank's card, looked up late: the default stream exists before the rank is known."""
        return card_of_rank()

    @property
    def device_index(self) -> int:
        """The index of the card."""
        return self.device.index

    def wait_event(self, event: Any) -> None:
        """Do nothing: no time passes."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: no time passes."""

    def record_event(self, event: Any = None) -> Any:
        """Return ``event``, or a new event."""
        return event if event is not None else Event()

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """False: no CUDA graph is captured."""
        return False

    def synchronize(self) -> None:
        """Do nothing: no time passes."""


class Event:
    """Replaces `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = card_of_rank()

    def record(self, stream: Any = None) -> None:
        """Do nothing: no time passes."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: no time passes."""

    def query(self) -> bool:
        """True: the event has passed."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds: 1, since none are known and callers divide by it."""
        return 1.0

    def synchronize(self) -> None:
        """Do nothing: no time passes."""


class Streams:
    """The current stream of a recording, and the functions of `torch.cuda` that set it."""

    def __init__(self, card: Card) -> None:
        """Make the classes `Stream` and `StreamContext`, whose instances set the current stream of this object."""
        self._card = card
        streams = self  # for the classes' methods

        class OfThisRecording(Stream):
            """Stream ids start again with every recording."""

            def __enter__(self) -> Any:
                self._context = _StreamContext(streams, self)
                self._context.__enter__()
                return self

            def __exit__(self, *_: object) -> None:
                self._context.__exit__()

        class ContextOfThisRecording(_StreamContext):
            """Replaces the class `torch.cuda.StreamContext`."""

            def __init__(self, stream: Any) -> None:
                super().__init__(streams, stream)

        self.Stream, self.StreamContext = OfThisRecording, ContextOfThisRecording
        self.default = OfThisRecording()
        # the default stream is number 0, the first that the step creates number 1
        self.default.stream_id = self.default.cuda_stream = OfThisRecording.count = 0
        self._current: Any = self.default

    def current(self, device: Any = None) -> Any:
        """Emulate `torch.cuda.current_stream`."""
        return self._current

    def set(self, stream: Any) -> None:
        """Emulate `torch.cuda.set_stream`."""
        self._current = stream
        self._card.ledger.stream = stream.stream_id


class _StreamContext:
    """Context manager that makes ``stream`` the current stream; no-op for None."""

    def __init__(self, streams: Streams, stream: Any) -> None:
        self._streams, self.stream = streams, stream

    def __enter__(self) -> Any:
        """Make the stream the current, and remember the current for the end."""
        self._previous = self._streams.current()
        if self.stream is not None:
            self._streams.set(self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.set(self._previous)


class OnDevice:
    """Replaces `torch.cuda.device` and `torch.cuda.device_of`: there is only one device."""

    def __init__(self, device: Any = None) -> None:
        """Accept the recording's card: an index, a name, a `torch.device`, a tensor on it, or None."""
        if not isinstance(device, torch.Tensor) and device is not None:
            from memplan.trace.fake_cuda.residence import device_of_argument

            device_of_argument(device)  # raises for a second card
        self.idx, self.prev_idx = 0, 0  # as `torch.cuda.device` has them

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: object) -> bool:
        return False
