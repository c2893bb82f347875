"""Peak and time of a step: bytes by the CPU allocator's own events, seconds in alternating pairs.

Nothing of memplan is used here: what it predicts is held against these numbers.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._profiler import _EventType  # the profiler's raw events have no public reader

Step = Callable[[], None]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that these tensors look into, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def live_bytes() -> int:
    """Bytes of the storages of every real tensor that Python can reach: grows by what an engine keeps for itself."""
    gc.collect()
    kinds = (Tensor, torch.nn.Parameter)  # by type, as a fake tensor has no memory
    return storage_bytes(
        item for item in gc.get_objects() if type(item) in kinds and item.device.type == "cpu" and not item.is_sparse
    )


def peak_above(prepare: Step, step: Step, steps: int = 2) -> int:
    """Most bytes that `steps` steps hold above what is there after the first `prepare`, which comes before each."""
    prepare()
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        for _ in range(steps):
            prepare()
            step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    pending: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())
    changes: list[tuple[int, int]] = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, cast(Any, event.extra_fields).alloc_size))
    level = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        level += size
        peak = max(peak, level)
    return peak


def seconds_of(prepare: Step, step: Step) -> float:
    """Seconds of one step, without its preparation."""
    prepare()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


MOST = 99
"""Pairs, at the most."""


def pairs_of(
    reference: tuple[Step, Step], candidate: tuple[Step, Step], pairs: int, seconds: float = 0.0
) -> dict[str, Any]:
    """Medians over pairs of (prepare, step), the one and the other first by turns, after a warm-up of each.

    ``ratio`` is the median of candidate / reference over the pairs, ``quartiles`` its spread.

    Args:
        reference, candidate: what is timed.
        pairs: how many, at least.
        seconds: and as many more as go into so many seconds: of a short step, a few pairs say little.
    """
    for prepare, step in (reference, candidate):
        seconds_of(prepare, step)
    taken: list[tuple[float, float]] = []
    while len(taken) < pairs or (len(taken) < MOST and sum(map(sum, taken)) < seconds):
        number = len(taken)
        gc.collect()
        gc.disable()
        if number % 2:
            second = seconds_of(*candidate)
            first = seconds_of(*reference)
        else:
            first = seconds_of(*reference)
            second = seconds_of(*candidate)
        gc.enable()
        taken.append((first, second))
    ratios = [second / first for first, second in taken]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "pairs": len(ratios),
        "eager_seconds": round(statistics.median(first for first, _ in taken), 5),
        "seconds": round(statistics.median(second for _, second in taken), 5),
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
