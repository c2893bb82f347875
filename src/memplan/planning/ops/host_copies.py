"""Asynchronous copies to pinned host memory and back, for programs with offloaded values.

Each card has a stream for each direction. A copy begins after all work issued before it on the current stream, so that
the memory that it reads is complete, and the memory that it writes is no longer in use. `Copy.wait` makes later work on
the current stream wait for the copy, without blocking the CPU thread: then the source may be freed, and a fetched
tensor read. All memory on the card is allocated and freed in the order of the current stream, so that torch's
allocator does not need to know the other streams.

Tensors on the CPU are copied synchronously.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CAME_FROM = "memplan_came_from"
"""Attribute of a copy in host memory: the device of its source."""
_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy in progress."""

    device: torch.device
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make later work on the card's current stream wait until the copy is done."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)


def store(value: torch.Tensor) -> tuple[torch.Tensor, Copy]:
    """Begin to copy a tensor to host memory. Returns the copy and its progress. Before `Copy.wait`, neither tensor may
    change or be freed."""
    host = torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device="cpu", pin_memory=value.device.type == "cuda"
    )
    setattr(host, _CAME_FROM, value.device)
    return host, _begin_copy(value, host, value.device, "out")


def fetch(host: torch.Tensor) -> tuple[torch.Tensor, Copy]:
    """Begin to copy the result of `store` back to its device. Returns the tensor there and the copy's progress. The
    tensor may be read after `Copy.wait`."""
    device = getattr(host, _CAME_FROM)
    value = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return value, _begin_copy(host, value, device, "back")


def _begin_copy(source: torch.Tensor, target: torch.Tensor, device: torch.device, direction: str) -> Copy:
    """Begin to copy ``source`` to ``target`` on the stream of a device for a direction: ``out`` to the host, ``back``
    from it. On the CPU the copy is done at once."""
    if device.type != "cuda":
        target.copy_(source)
        return Copy(device)
    key = device, direction
    if key not in _STREAMS:
        _STREAMS[key] = torch.cuda.Stream(device)
    stream = _STREAMS[key]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
    return Copy(device, done)
