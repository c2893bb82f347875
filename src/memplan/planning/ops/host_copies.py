"""Copies to pinned host memory and back, beside the ops: what programs with offloaded values call.

Each direction has a stream of its own on each card. A copy begins once all that was asked of the card before it is
done, so that memory that it reads is complete, and memory that it writes to is nobody else's any more. Whoever waits
for a copy lets all that is asked of the card later wait for it, and no one else: the processor runs ahead. So what was
copied may be freed after the wait, and what comes back may be read. All memory on the card is taken and freed in the
order of the ops, as any other: torch's allocator needs to know of no other stream.

Tensors on the CPU are copied at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CAME_FROM = "memplan_came_from"
"""Attribute of a copy in host memory: the device that it goes back to."""
_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was begun."""

    device: torch.device
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let what comes next on the card wait until the copy is done."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)


def store(value: torch.Tensor) -> tuple[torch.Tensor, Copy]:
    """Begin to copy a tensor to host memory. Until the copy was waited for, neither may change or be freed."""
    host = torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device="cpu", pin_memory=value.device.type == "cuda"
    )
    setattr(host, _CAME_FROM, value.device)
    return host, _copied(value, host, value.device, "out")


def fetch(host: torch.Tensor) -> tuple[torch.Tensor, Copy]:
    """Begin to copy back what `store` copied, into new memory. It may be read once the copy was waited for."""
    device = getattr(host, _CAME_FROM)
    value = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return value, _copied(host, value, device, "back")


def _copied(source: torch.Tensor, target: torch.Tensor, device: torch.device, direction: str) -> Copy:
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
