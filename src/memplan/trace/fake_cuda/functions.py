"""Emulation of `torch.cuda` and `torch.accelerator` during a recording; functions that need a GPU raise an error."""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from memplan import _torch
from memplan.devices import Device, catalogue
from memplan.errors import StepError
from memplan.trace.fake_cuda.graphs import Graphs
from memplan.trace.fake_cuda.residence import Card, card_of_rank
from memplan.trace.fake_cuda.streams import Event, OnDevice, Streams
from memplan.trace.recording.place import format_frame, user_frame

Answer = Callable[..., Any]

_NO_OPS = (
    "init", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_device", "set_rng_state",
    "set_rng_state_all", "set_per_process_memory_fraction", "set_sync_debug_mode", "reset_max_memory_cached",
    "reset_accumulated_memory_stats", "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
)  # fmt: skip
"""Functions without effect on a recording: they return None."""

_UNCHANGED = frozenset(
    {"amp", "nvtx", "check_error", "classproperty", "cudaStatus", "lru_cache", "cast", "is_initialized"}
)
"""Not replaced: plain Python without a GPU, or replaced separately below."""


def emulated_functions(card: Card, device: Device, differing: set[str]) -> dict[str, Answer]:
    """Return name -> emulated function of `torch.cuda`. Cards of the catalogue for which a called function would return
    something else are added to ``differing``."""
    return {
        **dict.fromkeys(_NO_OPS, _no_op),
        **{name: _compared(name, card, device, differing) for name in _properties(card, device)},
        **_memory(card),
        **_streams(card),
        **Graphs(card).functions(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: _torch.current_rank().local_world,
        "current_device": lambda: card_of_rank().index,
        "device": OnDevice,
        "device_of": OnDevice,
        "get_rng_state": lambda device=None: _random_state(),
        "get_rng_state_all": lambda: [_random_state()],
        "initial_seed": lambda: 0,
        "can_device_access_peer": lambda *_: False,
        "get_sync_debug_mode": lambda: 0,
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
    }


def _no_op(*_: Any, **__: Any) -> None:
    return None


def _random_state() -> torch.Tensor:
    """Return the state of a card's generator, in host memory: a seed and an offset of 8 bytes each
    (CUDAGeneratorImpl::get_state)."""
    return torch.frombuffer(bytearray(16), dtype=torch.uint8)


def _compared(name: str, card: Card, device: Device, differing: set[str]) -> Answer:
    """Return the function ``name`` of `_properties` for ``device``. Each call adds to ``differing`` the names of the
    catalogue's cards for which the function returns something else."""
    answers = {other.name: _properties(card, other)[name] for other in catalogue()}
    own = _properties(card, device)[name]

    def answer(*args: Any, **kwargs: Any) -> Any:
        """Return the result for ``device``, and compare it with those for the catalogue's cards."""
        result = own(*args, **kwargs)
        differing.update(other for other, its in answers.items() if its(*args, **kwargs) != result)
        return result

    return answer


def _properties(card: Card, device: Device) -> dict[str, Answer]:
    """Return name -> function of `torch.cuda` that returns a property of ``device``, or the free memory of ``card``."""
    major, minor = device.architecture
    properties = SimpleNamespace(
        name=device.title, major=major, minor=minor, total_memory=device.capacity, is_integrated=0,
        multi_processor_count=device.multiprocessors, warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, gcnArchName="", is_multi_gpu_board=0,
    )  # fmt: skip
    return {
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "mem_get_info": lambda device_=None: (device.capacity - card.ledger.level, device.capacity),
        "get_memory_info": lambda device_=None: (device.capacity - card.ledger.level, device.capacity),
    }


def _memory(card: Card) -> dict[str, Answer]:
    """Return name -> memory function. All count the bytes of live tensors, since reserved bytes are only known after a
    simulation."""
    ledger = card.ledger

    def current(device: Any = None) -> int:
        """Emulate `torch.cuda.memory_allocated`. There is only one card: its functions ignore ``device``."""
        return ledger.level

    def peak(device: Any = None) -> int:
        return ledger.peak

    def reset_peak(device: Any = None) -> None:
        ledger.peak = ledger.level

    def stats(device: Any = None) -> dict[str, int]:
        """Emulate `torch.cuda.memory_stats`: counters other than bytes are 0."""
        counts: dict[str, int] = defaultdict(int)
        for kind in ("allocated", "reserved", "active", "requested"):
            counts[f"{kind}_bytes.all.current"], counts[f"{kind}_bytes.all.peak"] = current(), peak()
        return counts

    return {
        "memory_allocated": current, "memory_reserved": current, "memory_cached": current,
        "max_memory_allocated": peak, "max_memory_reserved": peak, "max_memory_cached": peak,
        "reset_peak_memory_stats": reset_peak, "reset_max_memory_allocated": reset_peak,
        "memory_stats": stats, "memory_summary": lambda *_, **__: "(recorded without a GPU)",
        "empty_cache": lambda: card.call("empty_cache"),
        "synchronize": lambda device=None: card.call("synchronize"),
    }  # fmt: skip


def _streams(card: Card) -> dict[str, Answer]:
    """Return name -> function or class of streams and events."""
    streams = Streams(card)
    return {
        "Stream": streams.Stream,
        "Event": Event,
        "stream": streams.StreamContext,
        "StreamContext": streams.StreamContext,
        "set_stream": streams.set,
        "current_stream": streams.current,
        "default_stream": lambda device=None: streams.default,
    }


@contextmanager
def installed(card: Card, device: Device, differing: set[str]) -> Iterator[None]:
    """Replace the public functions of `torch.cuda` and `torch.accelerator`, and other queries for a GPU, by emulations
    or by errors that name the function. ``differing``: see `emulated_functions`."""
    known = emulated_functions(card, device, differing)
    accelerator = known | {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": known["current_device"], "current_device_idx": known["current_device"],
        "set_device_index": _no_op, "set_device_idx": _no_op, "device_index": OnDevice,
        "empty_host_cache": _no_op,
    }  # fmt: skip
    with ExitStack() as stack:
        for module, emulated in ((torch.cuda, known), (torch.accelerator, accelerator)):
            stack.enter_context(_torch.patched(module, **_replacements(module, emulated)))
        for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.graphs):
            own = {name: answer for name, answer in known.items() if name in vars(module)}
            stack.enter_context(_torch.patched(module, **own))
        ranges = dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), _no_op)
        within = lambda *_, **__: nullcontext()  # noqa: E731
        stack.enter_context(_torch.patched(torch.cuda.nvtx, **ranges, range=within))
        # torch caches the stream on which graphs are captured, which would be a stream of this recording
        stack.enter_context(_torch.patched(torch.cuda.graphs.graph, default_capture_stream=None))
        stack.enter_context(_torch.patched(torch.backends.cuda, is_built=lambda: True))
        # weights of recurrent networks are not flattened: they are assumed to be one buffer already, of the same bytes
        no = lambda tensor: False  # noqa: E731
        stack.enter_context(_torch.patched(torch.backends.cudnn, is_available=lambda: True, is_acceptable=no))
        stack.enter_context(_torch.checkpoints_for_cuda())
        stack.enter_context(_torch.histories_replaced(lambda name: _refusal(torch.cuda.memory, name)))
        stack.enter_context(_torch.patched(torch, Generator=_Generator))
        # libraries look up a card's generator by index
        generators = tuple(_CardGenerator("cpu") for _ in range(torch.cuda.device_count()))
        stack.enter_context(_torch.patched(torch.cuda, default_generators=generators))
        stack.enter_context(_torch.raw_streams_of_cuda())
        stack.enter_context(_torch.accelerator_is_cuda())
        stack.enter_context(_torch.patched(torch.nn.DataParallel, scatter=_scatter))
        stack.enter_context(_buckets_on_card(card))
        if torch.version.cuda is None:
            stack.enter_context(_torch.patched(torch.version, cuda="12.8"))
        yield


class _CardGenerator(torch.Generator):
    """Default generator of a card, whose state has the size of a card's. Nothing is drawn during a recording."""

    def get_state(self) -> torch.Tensor:
        return _random_state()

    def set_state(self, new_state: torch.Tensor) -> _CardGenerator:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self


class _Generator(torch.Generator):
    """Replaces `torch.Generator`, which cannot create a generator for a card without a GPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _HOST_GENERATOR("cpu")


_HOST_GENERATOR = torch.Generator


def _scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
    """Replace `torch.nn.DataParallel.scatter` for a single card: move all inputs to the card."""
    to_card = lambda leaf: leaf.to("cuda") if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return (_torch.tree_map(to_card, tuple(inputs)),), (_torch.tree_map(to_card, dict(kwargs or {})),)


def _buckets_on_card(card: Card) -> AbstractContextManager[None]:
    """Return a context in which `DistributedDataParallel` allocates its buckets on the device of its parameters: it
    allocates them in C++, without an argument that names the device."""
    parallel = torch.nn.parallel.DistributedDataParallel
    begin = parallel.__init__

    def begin_on_card(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Replace `DistributedDataParallel.__init__`."""
        first = next(module.parameters(), None)
        with card.placing(torch.device("cpu") if first is None else first.device):
            begin(self, module, *args, **kwargs)

    return _torch.patched(parallel, __init__=begin_on_card)


def _replacements(module: types.ModuleType, emulated: dict[str, Answer]) -> dict[str, Any]:
    """Return name -> replacement for each public function and class of a module: that in ``emulated``, or a function
    that raises an error."""
    replacements: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in emulated:
            replacements[name] = emulated[name]
        elif name.startswith("_") or name in _UNCHANGED:
            continue
        elif not getattr(value, "__module__", "").startswith(module.__name__):
            continue  # imported into it
        elif inspect.isclass(value):
            if not issubclass(value, (BaseException, tuple)) and not name.endswith(("Storage", "Tensor")):
                replacements[name] = type(name, (), {"__init__": _refusal(module, name)})
        elif callable(value):
            replacements[name] = _refusal(module, name)
    return replacements


def _refusal(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """Return a replacement for a function that needs a GPU: it raises an error that names the function."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise StepError(
            f"{module.__name__}.{name} needs a GPU, and a recording has none",
            expected="of torch.cuda only what can be answered without one: devices, memory queries, streams, events",
            do="Leave the call out of build and step while they are recorded",
            where=format_frame(user_frame()),
        )

    return refuse
