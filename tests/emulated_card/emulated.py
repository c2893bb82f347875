"""An emulated CUDA card: tensors say that they are on ``cuda:0``, lie in host memory, and the CPU computes them.

Built of card.cpp against the torch that is installed, which has to be a build without CUDA. `load` comes before torch
is imported, `install` after it: so they need a process of their own (see `tests.emulated_card.run`).
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.simulation.allocator.allocator import CachingAllocator

CAPACITY = 24_081 << 20
NAME, CAPABILITY, MULTIPROCESSORS = "NVIDIA GeForce RTX 4090", (8, 9), 128
_BLOCK = 512
_PIECE = 4096


def load(library: Path) -> ctypes.CDLL:
    """Register the card: torch asks for one when it is imported."""
    found = ctypes.CDLL(str(library))
    found.card_events.restype = ctypes.c_int64
    found.card_events.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    return found


class Memory:
    """What the card's allocator gave and got back: allocated as blocks of 512 bytes, reserved as memplan's caching
    allocator holds it from the card. On a real card allocated has what blocks keep unsplit, too."""

    def __init__(self, library: ctypes.CDLL, allocator: CachingAllocator) -> None:
        self._library, self._allocator, self._seen = library, allocator, 0
        self._blocks: dict[int, int] = {}
        """By address on the card: the simulated one."""
        self._allocated = self._most_allocated = self._most_reserved = 0
        self._requested = self._most_requested = self._allocations = 0
        """Bytes as they are asked for, the most of them, and how many blocks were allocated so far."""

    def allocated(self, *_: Any) -> int:
        """As `torch.cuda.memory_allocated`."""
        self._follow()
        return self._allocated

    def most_allocated(self, *_: Any) -> int:
        """As `torch.cuda.max_memory_allocated`."""
        self._follow()
        return self._most_allocated

    def reserved(self, *_: Any) -> int:
        """As `torch.cuda.memory_reserved`."""
        self._follow()
        return self._allocator.reserved

    def most_reserved(self, *_: Any) -> int:
        """As `torch.cuda.max_memory_reserved`."""
        self._follow()
        return self._most_reserved

    def stats(self, *_: Any) -> dict[str, int]:
        """As `torch.cuda.memory_stats`, of requests alone."""
        self._follow()
        return {
            "requested_bytes.all.current": self._requested, "requested_bytes.all.peak": self._most_requested,
            "allocation.all.current": len(self._blocks), "allocation.all.allocated": self._allocations,
        }  # fmt: skip

    def reset(self, *_: Any) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        self._follow()
        self._most_requested = self._requested
        self._most_allocated, self._most_reserved = self._allocated, self._allocator.reserved

    def empty_cache(self) -> None:
        """As `torch.cuda.empty_cache`."""
        self._follow()
        self._allocator.empty_cache()

    def free(self, *_: Any) -> tuple[int, int]:
        """As `torch.cuda.mem_get_info`."""
        self._follow()
        return CAPACITY - self._allocator.reserved, CAPACITY

    def _follow(self) -> None:
        piece = (ctypes.c_int64 * (2 * _PIECE))()
        while (count := min(self._library.card_events(self._seen, piece, _PIECE) - self._seen, _PIECE)) > 0:
            for at in range(count):
                self._one(piece[2 * at], piece[2 * at + 1])
            self._seen += count

    def _one(self, address: int, size: int) -> None:
        self._allocated += -(-size // _BLOCK) * _BLOCK if size > 0 else -(size // _BLOCK * -_BLOCK)
        self._requested += size
        if size > 0:
            self._allocations += 1
            self._blocks[address] = self._allocator.malloc(size)
        else:
            self._allocator.free(self._blocks.pop(address))
        self._most_allocated = max(self._most_allocated, self._allocated)
        self._most_reserved = max(self._most_reserved, self._allocator.reserved)
        self._most_requested = max(self._most_requested, self._requested)


class Stream:
    """Everything is done at once, in whatever stream."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """What was recorded is done."""
        assert event.recorded, "waits for what was never begun"


class Event:
    """Says that it was recorded."""

    def __init__(self, *_: Any) -> None:
        self.recorded = False

    def record(self, _: Stream) -> None:
        """Note it."""
        self.recorded = True


def install(library: ctypes.CDLL) -> Memory:
    """Have `torch.cuda` answer for the card, as far as memplan and torch ask."""
    import torch

    from memplan.simulation.allocator.allocator import CachingAllocator
    from memplan.simulation.allocator.settings import AllocatorSettings

    memory, cuda = Memory(library, CachingAllocator(AllocatorSettings())), torch.cuda
    properties = SimpleNamespace(
        name=NAME, total_memory=CAPACITY, major=CAPABILITY[0], minor=CAPABILITY[1],
        multi_processor_count=MULTIPROCESSORS, gcnArchName="",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: CAPABILITY,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "empty_cache": memory.empty_cache,
        "memory_allocated": memory.allocated,
        "max_memory_allocated": memory.most_allocated,
        "memory_reserved": memory.reserved,
        "max_memory_reserved": memory.most_reserved,
        "memory_stats": memory.stats,
        "reset_peak_memory_stats": memory.reset,
        "mem_get_info": memory.free,
        "memory_snapshot": list,  # its segments do not hold the addresses of its tensors
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: nullcontext(),
        # its numbers are drawn by the CPU's generator
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    return memory


def install_inductor() -> None:
    """Have Inductor write what it fuses for the card in C++, as it does for the CPU, whose memory it is."""
    import torch
    from torch._inductor import config, scheduler
    from torch._inductor.codegen.common import init_backend_registration, register_backend_for_device
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    from memplan._torch import inductor

    class Wrapper(PythonWrapperCodegen):
        """Its kernels take no stream."""

        def generate_kernel_call(self, *args: Any, device: Any = None, **more: Any) -> Any:
            return super().generate_kernel_call(*args, device=torch.device("cpu"), **more)

        @staticmethod
        def create(*args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            """As that of the class."""
            return Wrapper() if not args[0] else PythonWrapperCodegen.create(*args)

    init_backend_registration()
    register_backend_for_device("cuda", CppScheduling, Wrapper)

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    backend: Any = torch._C
    inductors: Any = scheduler
    config.cuda_backend = "cpp"
    inductors.is_gpu = lambda _: False  # or else it is fused as Triton can have it, and C++ cannot
    inductors.BaseSchedulerNode.is_cpu = lambda _: True
    inductor.has_triton = lambda: True
    backend._dynamo.guards._empty_strided_cuda = empty_strided
    backend._cuda_getCurrentRawStream = lambda _: 0
