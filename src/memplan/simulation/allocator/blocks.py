"""The blocks in use of the caching allocator: allocated, or freed and still waiting for other streams."""

from __future__ import annotations

from memplan.errors import UsageError
from memplan.simulation.allocator.device_memory import Device
from memplan.simulation.allocator.free_lists import FREE, LIVE, PENDING, Chunk
from memplan.simulation.timeline import Action, AllocatorEvent


class BlockTable:
    """The blocks in use by address, and the bytes in them."""

    def __init__(self, capacity: int | None) -> None:
        """``capacity``: bytes of the device; None: unlimited."""
        self.allocated = 0
        """Bytes in allocated blocks."""
        self.active = 0
        """``allocated`` plus the bytes of freed blocks that still wait for other streams."""
        self.requested = 0
        """Bytes requested for the active blocks, before rounding."""
        self._device = Device(capacity)
        self.log: list[AllocatorEvent] = self._device.log
        """All events, in the order and with the names of torch's memory snapshots."""
        self._live: dict[int, Chunk] = {}
        """Allocated blocks by address."""
        self._pending: dict[int, Chunk] = {}
        """Freed blocks that wait for other streams, by address, in the order in which they were freed."""

    def free(self, address: int, *, tick: int = 0) -> None:
        """Free a block: at once, or pending until the other streams that used it are done with it. Raises UsageError if
        no allocated block has this address."""
        if address == 0:  # of a request for no bytes
            return
        chunk = self._live.pop(address, None)
        if chunk is None:
            raise _no_block(address, "handed out")
        self._device.tick = tick
        self.allocated -= chunk.size
        self._log_block("free_requested", chunk)
        if chunk.other_streams is None:
            self._complete(chunk)
        else:
            chunk.other_streams = None
            chunk.state = PENDING
            self._pending[address] = chunk

    def record_stream(self, address: int, stream: int) -> None:
        """Record that ``stream`` uses a block, so that freeing it waits for that stream. Raises UsageError if no
        allocated block has this address."""
        if address == 0:
            return
        chunk = self._live.get(address)
        if chunk is None:
            raise _no_block(address, "handed out")
        if stream != chunk.stream:
            chunk.other_streams = {stream} if chunk.other_streams is None else chunk.other_streams | {stream}

    def complete(self, address: int, *, tick: int = 0) -> None:
        """Finish the free of a pending block: the other streams are done with it. Raises UsageError if no pending block
        has this address."""
        chunk = self._pending.pop(address, None)
        if chunk is None:
            raise _no_block(address, "given back and waiting")
        self._device.tick = tick
        self._complete(chunk)

    def synchronize(self, *, tick: int = 0) -> None:
        """Finish the free of all pending blocks, in the order in which they were freed."""
        self._device.tick = tick
        self._synchronize()

    def _complete(self, chunk: Chunk) -> None:
        """Return a block to its pool, merged with its free neighbors."""
        self._log_block("free_completed", chunk)
        self.active -= chunk.size
        self.requested -= chunk.requested
        chunk.requested = 0
        chunk.owner = None
        chunk.state = FREE
        chunk.pool.add_merged(chunk)

    def _synchronize(self) -> None:
        """Complete all frees that wait for other streams."""
        pending = list(self._pending.values())
        self._pending.clear()
        for chunk in pending:
            self._complete(chunk)

    def _adopt(self, chunk: Chunk) -> None:
        """Add a restored chunk to the tables and totals."""
        if not chunk.mapped:
            return
        self._device.reserved += chunk.size
        if chunk.state == FREE:
            chunk.pool.add(chunk)
            return
        self.active += chunk.size
        self.requested += chunk.requested
        if chunk.state == LIVE:
            self.allocated += chunk.size
            self._live[chunk.address] = chunk
        else:
            self._pending[chunk.address] = chunk

    def _log_block(self, action: Action, chunk: Chunk) -> None:
        pool, tick = chunk.pool.ident, self._device.tick
        self.log.append(AllocatorEvent(action, chunk.address, chunk.requested, chunk.stream, pool, chunk.owner, tick))


def _no_block(address: int, state: str) -> UsageError:
    """Return the error for an address at which no block in this state ("handed out") begins."""
    return UsageError(f"no block that is {state} begins at address {address:#x}")
