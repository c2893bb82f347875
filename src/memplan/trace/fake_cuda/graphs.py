"""Emulated CUDA graphs: a captured region runs once, and allocates from the private memory pool of its graph.

A replay allocates nothing. Sources: c10/cuda/CUDACachingAllocator.cpp, beginAllocateToPool, and
aten/src/ATen/cuda/CUDAGraph.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.errors import UsageError
from memplan.trace.fake_cuda.residence import Card
from memplan.trace.records import ON_CARD

_NUMBER = 8
"""Bytes of an int64."""
Handle = tuple[int, int]
"""Id of a memory pool in torch: (number, 0) for a graph's own pool, (0, number) for one of `graph_pool_handle`."""


class Graphs:
    """The running capture, and the emulated `torch.cuda.CUDAGraph`."""

    def __init__(self, card: Card) -> None:
        """Make the class `Graph`, whose instances set the pool of the card's ledger while they capture."""
        self._card = card
        self._pools = dict[Handle, int]()
        """Number of each pool that a capture allocated from, as in the ledger."""
        self._handle_count = 0
        """How many ids of memory pools were given out."""
        self._keeps_random_state = False
        """Whether seed and offset of the random numbers are allocated."""
        self.is_capturing = False
        graphs = self  # for the methods of `Graph`, whose `self` is a graph

        class Graph:
            """`torch.cuda.CUDAGraph` of this recording."""

            def __init__(self, keep_graph: bool = False) -> None:
                self._pool: Handle | None = None

            def capture_begin(self, pool: Handle | None = None, *_: Any, **__: Any) -> None:
                """Begin to allocate from a private pool."""
                graphs.keep_random_state()
                self._pool = pool or graphs.handle(own=True)
                graphs.begin(self._pool)

            def capture_end(self) -> None:
                """Stop allocating from the private pool."""
                graphs.end()

            def pool(self) -> Handle:
                """Return the id of the graph's memory pool."""
                if self._pool is None:
                    raise UsageError(
                        "pool() of a CUDA graph that captured nothing", expected="a capture before", do="Capture first"
                    )
                return self._pool

            def replay(self) -> None:
                """Do nothing: kernels and their memory are those of the capture."""

            reset = instantiate = enable_debug_mode = replay

            def debug_dump(self, debug_path: str) -> None:
                """Do nothing: there is no graph."""

        self.Graph = Graph

    def handle(self, *, own: bool = False) -> Handle:
        """Return the id of a new memory pool: of `torch.cuda.graph_pool_handle`, or of a graph's own."""
        self._handle_count += 1
        return (self._handle_count, 0) if own else (0, self._handle_count)

    def begin(self, pool: Handle) -> None:
        """Begin a capture into a pool; pools are numbered by first use."""
        self._card.ledger.pool = self._pools.setdefault(pool, len(self._pools) + 1)
        self.is_capturing = True

    def end(self) -> None:
        """End the capture."""
        self._card.ledger.pool = 0
        self.is_capturing = False

    def keep_random_state(self) -> None:
        """Allocate seed and offset of the random numbers, which captured kernels read, at the first capture."""
        if self._keeps_random_state:
            return
        self._keeps_random_state = True
        ledger = self._card.ledger
        before, ledger.device = ledger.device, ON_CARD
        for _ in range(2):
            ledger.allocate_hidden(_NUMBER, op=None)
        ledger.device = before

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return name -> function or class of `torch.cuda.graphs`: emulated, or torch's own if it works on emulated
        ones."""
        return {
            "CUDAGraph": self.Graph,
            "graph_pool_handle": self.handle,
            "is_current_stream_capturing": lambda: self.is_capturing,
            "graph": torch.cuda.graphs.graph,
            "make_graphed_callables": torch.cuda.graphs.make_graphed_callables,
        }
