"""`torch.compile`: Dynamo's graph breaks, AOTAutograd's memory budget for saved activations, and the memory of
autotuning Inductor's kernels.

Seen in torch 2.11, 2.13 and 2.15: the attribute ``compile_subgraph_reason`` of Dynamo's graph modules, with
``graph_break``, ``reason`` and ``user_stack``; ``torch._functorch.config.activation_memory_budget``, and ``patch`` of
that module; ``bench`` and ``optimize_mem`` of ``CachingAutotuner`` in ``torch._inductor.runtime.triton_heuristics``;
``benchmarker`` in ``torch._inductor.runtime.benchmarking``, and its ``L2_cache_size``. Seen in 2.13:
``callback_handler`` of ``torch._dynamo.callback``, and ``_compile`` of ``torch._dynamo.convert_frame`` with
the arguments ``code``, ``globals``, ``locals`` and ``closure``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memplan._frames import callers
from memplan._torch.patches import only_in_this_thread, patched


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why and where a graph ends before the user's function does."""

    reason: str
    path: str
    line: int


def graph_break(graph: Any) -> GraphBreak | None:
    """Return the graph break at which Dynamo ended a graph; None where the graph reaches the function's end."""
    end = getattr(graph, "compile_subgraph_reason", None)
    if end is None or not end.graph_break or not end.user_stack:
        return None
    frame = end.user_stack[-1]
    return GraphBreak(str(end.reason).strip().split("\n")[0], frame.filename, frame.lineno or 0)


def before_compiling(notify: Callable[[str, list[nn.Module]], None]) -> Callable[[], None]:
    """Call ``notify(name, modules)`` before Dynamo compiles a function: its name, and the modules that it can reach
    through arguments, closure and globals. Returns a function that unregisters ``notify``."""
    from torch._dynamo.callback import callback_handler  # Dynamo is imported already by a capture

    def notify_of_function(_: Any) -> None:
        """Look up the function that Dynamo begins to compile on the stack, and notify of it."""
        for frame in callers():
            if (frame.f_code.co_name, frame.f_globals.get("__name__")) == _COMPILE:
                code, globals, locals, closure = (frame.f_locals[name] for name in _ARGUMENTS)
                notify(code.co_qualname, _reachable_modules(code, globals, locals, closure))
                return

    def unregister() -> None:
        with suppress(ValueError):  # torch.compiler.reset() unregistered it already
            callback_handler.remove_start_callback(notify_of_function)

    callback_handler.register_start_callback(notify_of_function)
    return unregister


_COMPILE = "_compile", "torch._dynamo.convert_frame"
"""Name and module of the function by which Dynamo compiles a function."""
_ARGUMENTS = "code", "globals", "locals", "closure"
"""Its arguments that describe that function."""


def _reachable_modules(code: Any, globals: Any, locals: Any, closure: Any) -> list[nn.Module]:
    """Return the modules among a function's locals, the globals that its code names, and its closure."""
    values = [*locals.values(), *(globals.get(name) for name in code.co_names)]
    for cell in closure or ():
        with suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    return [value for value in values if isinstance(value, nn.Module)]


def is_jit_tracing() -> bool:
    """Return whether `torch.jit.trace` is tracing in this thread."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def memory_budget(share: float) -> Iterator[None]:
    """Within this context, compile with this share of the default bytes saved for backward (AOTAutograd's
    ``activation_memory_budget``; 1: no limit)."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=share):
        yield


_tuning_lock = threading.RLock()
"""Held while functions of torch are patched for one benchmark."""
_SEGMENT = 20 << 20
"""Bytes that the allocator reserves for a request of 1 to 10 MiB (kLargeBuffer in c10/core/AllocatorConfig.h)."""


def tune_in_reserved_memory(module: Any) -> None:
    """Tune the kernels of a module that Inductor wrote without reserving more of the card than before.

    A kernel with several configurations is tuned in its first call, in the middle of a step. Meanwhile Inductor
    allocates a buffer as large as the card's L2 cache, to flush the cache, and in a forward pass copies of the tensors
    that the kernel writes.
    """
    for kernel in list(vars(module).values()):
        bench = getattr(type(kernel), "bench", None)
        if bench is not None and hasattr(kernel, "optimize_mem"):
            kernel.optimize_mem = True  # copies go to the host where there is no room
            kernel.bench = partial(_benchmark_in_reserved, bench, kernel)


def _benchmark_in_reserved(bench: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    """Time a configuration of a kernel by ``bench``, without exceeding the process's peak of reserved bytes. If the
    buffer that flushes the L2 cache does not fit, the cache is not flushed."""
    from torch._inductor.runtime.benchmarking import benchmarker

    with _tuning_lock:
        free = max(0, torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved() - _SEGMENT)
        cache = torch.cuda.get_device_properties().L2_cache_size
        flushed = cache if cache <= free else 0
        peak = torch.cuda.memory_allocated() + free - flushed
        # Inductor copies tensors on the card only as long as this peak is not exceeded
        max_allocated = only_in_this_thread(lambda *_: peak, torch.cuda.max_memory_allocated)
        with patched(benchmarker, L2_cache_size=flushed), patched(torch.cuda, max_memory_allocated=max_allocated):
            return bench(*args, **kwargs)
