"""Blocks of the caching allocator: handed out, or given back and still waiting for other streams."""

from __future__ import annotations

from memplan.errors import UsageError
from memplan.simulation.allocator.device_memory import Device
from memplan.simulation.allocator.free_lists import FREE, LIVE, PENDING, Chunk
from memplan.simulation.timeline import Action, AllocatorEvent


class BlockTable:
    """The blocks that are not free, by address, and the bytes in them."""

    def __init__(self, capacity: int | None) -> None:
        self.allocated = 0
        """Bytes in blocks that are handed out."""
        self.active = 0
        """The same, and those of blocks given back that still wait for other streams."""
        self.requested = 0
        """Bytes as asked for, of the active blocks."""
        self._device = Device(capacity)
        self.log: list[AllocatorEvent] = self._device.log
        """Every action, in torch's order and words."""
        self._live: dict[int, Chunk] = {}
        self._pending: dict[int, Chunk] = {}

    def free(self, address: int, *, tick: int = 0) -> None:
        """Give a block back: free at once, or once the other streams that it was used on are done with it.

        Raises:
            UsageError: no block handed out begins there.
        """
        if address == 0:
            return
        chunk = self._live.pop(address, None)
        if chunk is None:
            raise _no_block(address, "handed out")
        self._device.tick = tick
        self.allocated -= chunk.size
        self._log_block("free_requested", chunk)
        if chunk.uses is None:
            self._complete(chunk)
        else:
            chunk.uses = None
            chunk.state = PENDING
            self._pending[address] = chunk

    def record_stream(self, address: int, stream: int) -> None:
        """Note that a block is used on another stream than its own: giving it back will wait for that one.

        Raises:
            UsageError: no block handed out begins there.
        """
        if address == 0:
            return
        chunk = self._live.get(address)
        if chunk is None:
            raise _no_block(address, "handed out")
        if stream != chunk.stream:
            chunk.uses = {stream} if chunk.uses is None else chunk.uses | {stream}

    def complete(self, address: int, *, tick: int = 0) -> None:
        """Free a block that was given back: the other streams are done with it.

        Raises:
            UsageError: no such block begins there.
        """
        chunk = self._pending.pop(address, None)
        if chunk is None:
            raise _no_block(address, "given back and waiting")
        self._device.tick = tick
        self._complete(chunk)

    def synchronize(self, *, tick: int = 0) -> None:
        """Free every block that waits for a stream, in the order in which they were given back."""
        self._device.tick = tick
        self._synchronize()

    def _complete(self, chunk: Chunk) -> None:
        """Put a block into its pool, merged with its free neighbours."""
        self._log_block("free_completed", chunk)
        self.active -= chunk.size
        self.requested -= chunk.requested
        chunk.requested = 0
        chunk.owner = None
        chunk.state = FREE
        pool, left, right = chunk.pool, chunk.left, chunk.right
        if right is not None and right.state == FREE and right.mapped:
            pool.remove(right)
            chunk.absorb_right()
        if left is not None and left.state == FREE and left.mapped:
            pool.remove(left)
            left.absorb_right()
            chunk = left
        pool.add(chunk)

    def _synchronize(self) -> None:
        waiting = list(self._pending.values())
        self._pending.clear()
        for chunk in waiting:
            self._complete(chunk)

    def _adopt(self, chunk: Chunk) -> None:
        """Count a restored chunk."""
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
    return UsageError(f"no block that is {state} begins at address {address:#x}")
