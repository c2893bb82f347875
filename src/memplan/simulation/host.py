"""Memory of the host over time: tensors, pinned and shared memory, and the processes of data loaders."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, get_args

from memplan.trace.live_bytes import peak_live_bytes
from memplan.trace.records import HOST, LoaderUse, Storage
from memplan.trace.trace import Trace

HostTerm = Literal["tensors", "pinned", "shared", "loading", "cached", "arrays", "workers", "python"]
"""Tensors of torch's CPU allocator; blocks of pinned memory; shared memory (``/dev/shm``); samples that a worker loads
and collates into a batch; freed samples of earlier batches, which malloc caches in the other workers; numpy's arrays in
data sets; the worker processes' own memory; the main process with torch imported."""
TERMS: tuple[HostTerm, ...] = get_args(HostTerm)

PYTHON = 146_660 << 10
"""Anonymous memory of a process that has imported torch (2.13.0+cpu, Python 3.11, x86-64): ``Pss_Anon`` of
/proc/PID/smaps_rollup, measured by benchmarks/host_memory.py. Other imports take more."""
CUDA_BUILD = 128_400 << 10
"""Additional anonymous memory of a CUDA build (2.11.0+cu130, importing torch alone), without CUDA's context on the
host."""
_OPTIMIZER = 70_150 << 10
"""Additional anonymous memory once a `torch.optim.Optimizer` exists: the first instance imports ``torch._dynamo``."""
_WORKERS = {"fork": 11_660 << 10, "spawn": 148_220 << 10, "forkserver": 147_730 << 10}
"""Anonymous memory of a loader's worker, by start method. A fork shares its parent's pages until either writes to them,
as reference counts do. Other methods import torch again."""
_HELPERS = {"fork": 0, "spawn": 5_870 << 10, "forkserver": 11_730 << 10}
"""Anonymous memory of the processes that start workers and track their resources, once a loader."""
_PAGE = 4096
_MALLOC_RETURNS = 32 << 20
"""Bytes from which glibc's malloc returns a freed block to the system at once: M_MMAP_THRESHOLD grows to the size of
freed blocks, up to DEFAULT_MMAP_THRESHOLD_MAX on 64 bits (man 3 mallopt)."""


@dataclass(frozen=True)
class HostPeak:
    """The peak of the host's memory, in bytes, and its tick."""

    bytes: int
    tick: int
    terms: dict[HostTerm, int]
    """They add up to ``bytes``; terms of 0 bytes are left out."""


@dataclass(frozen=True)
class HostUse:
    """The host's memory while a step or a run is built and runs, in bytes."""

    peak: HostPeak
    build: HostPeak
    steps: tuple[HostPeak, ...]
    """Peaks before the first step, and of each step; ``peak`` is the largest."""
    shared: int
    """Peak bytes in ``/dev/shm``."""
    pinned_tensors: int
    """Peak bytes of tensors in pinned memory; their blocks, which are larger, are the term ``pinned``."""
    exceeded: int | None = None
    """The first tick at which the host's memory exceeds the budget."""


def pinned_block(size: int) -> int:
    """Return the bytes of the block that torch's allocator of pinned memory allocates for a request of ``size`` bytes.

    Requests are rounded up to powers of two (`CachingHostAllocator.h`, under the default
    ``pinned_max_round_threshold_mb``).

    Example:
        >>> pinned_block(573_000_000)
        1073741824
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


def prefetched_batches(use: LoaderUse) -> int:
    """Return the number of batches that a loader's workers prefetch, without the batch in use."""
    most = use.workers * use.prefetch
    return most if use.length is None else max(min(most, use.length - 1), 0)


@dataclass(frozen=True)
class _Change:
    """A change of the bytes of a term; of ``pinned``, the requested bytes of a block (negative: freed)."""

    tick: int
    term: HostTerm
    size: int


def host_use(trace: Trace, budget: int | None = None) -> HostUse:
    """Return the host's memory over a step or a run: peaks, and their terms.

    Freed pinned blocks stay cached and are reused. A block whose tensor was freed counts as free, though copies to the
    card may still read it. Prefetched batches count as loaded all the time: the step takes longer than loading.
    """
    # frees first: a tensor that moves to another term at a tick is not counted twice
    changes = sorted((*_of_storages(trace), *_of_loaders(trace)), key=lambda change: (change.tick, change.size > 0))
    total = PYTHON + _cuda_build(trace)
    if any(op.phase == "optimizer" for op in trace.ops):
        total += _OPTIMIZER
    levels: dict[HostTerm, int] = {**dict.fromkeys(TERMS, 0), "python": total}
    exceeded = 0 if budget is not None and total > budget else None
    cache = _PinnedCache()
    pinned = most_pinned = most_shared = 0
    peaks = list[HostPeak]()
    index = 0  # of the next change
    for start, end in pairwise((0, *trace.steps, trace.end + 1)):
        highest, tick, terms = total, start, dict(levels)
        while index < len(changes) and changes[index].tick < end:
            change = changes[index]
            index += 1
            size = change.size
            if change.term == "pinned":  # freed blocks stay in torch's cache of pinned memory
                pinned += size
                size = cache.growth(size)
            levels[change.term] += size
            total += size
            most_pinned, most_shared = max(most_pinned, pinned), max(most_shared, levels["shared"])
            if budget is not None and exceeded is None and total > budget:
                exceeded = change.tick
            if total > highest:
                highest, tick, terms = total, change.tick, dict(levels)
        peaks.append(HostPeak(highest, tick, {name: size for name, size in terms.items() if size}))
    return HostUse(
        max(peaks, key=lambda peak: peak.bytes), peaks[0], tuple(peaks[1:]), most_shared, most_pinned, exceeded
    )


class _PinnedCache:
    """Counts the blocks of pinned memory, which stay cached for requests of the same block size once they are free."""

    def __init__(self) -> None:
        self._used = Counter[int]()
        """Block size -> number of blocks in use."""
        self._allocated = Counter[int]()
        """Block size -> number of blocks in use or cached."""

    def growth(self, size: int) -> int:
        """Return the bytes that are newly allocated for a request of ``size`` bytes; 0 if a cached block serves it, and
        if ``size`` is negative, for a block that is freed."""
        block = pinned_block(abs(size))
        self._used[block] += 1 if size > 0 else -1
        if self._used[block] <= self._allocated[block]:
            return 0
        self._allocated[block] = self._used[block]
        return block


def _cuda_build(trace: Trace) -> int:
    """Return the additional bytes of importing torch's CUDA build; 0 for a step on the CPU."""
    return 0 if trace.device == HOST else CUDA_BUILD


def _of_storages(trace: Trace) -> Iterator[_Change]:
    """Yield allocations and frees of storages on the host, except for those allocated within workers."""
    kinds: dict[int, HostTerm] = {entry.storage: entry.kind for entry in trace.host}
    with_workers = [use for use in trace.loaders if use.workers]
    loads = sorted(load for use in with_workers for load in use.loads)
    births = sorted(storage.born for storage in trace.storages)
    moves = _moved_to_shared(trace)
    forks = [use for use in with_workers if use.start_method == "fork"]
    writes = _writes(trace) if forks else {}
    for storage in _on_host(trace):
        term, born = kinds.get(storage.id, "tensors"), storage.born
        load = _load_at(loads, born)
        if load is not None:  # allocated within a worker, except for the batch that it sends
            if term == "tensors":
                continue
            # a worker loads into the memory of this batch once the loop has freed the previous batch
            next_birth = bisect_right(births, load[1])
            born = births[next_birth] if next_birth < len(births) else trace.end
            if storage.died is not None and storage.died <= born:
                continue
        moved = moves.get(storage.id)
        if term == "shared":
            yield from _live("shared", _pages(storage.bytes), born, storage.died)
        elif term == "pinned":
            yield from _live("pinned", storage.bytes, born, storage.died)
        elif moved is not None:
            yield from _live("tensors", storage.bytes, born, moved)
            yield from _live("shared", _pages(storage.bytes), moved, storage.died)
        else:
            yield from _live("tensors", storage.bytes, born, storage.died)
            for start, end in _copied_on_write(storage, forks, writes.get(storage.id, [])).items():
                yield from _live("workers", storage.bytes, start, end)


def _live(term: HostTerm, size: int, start: int, end: int | None) -> Iterator[_Change]:
    """Yield the changes of a term for ``size`` bytes that live from tick ``start`` to ``end`` (None: to the end)."""
    if size and start != end:
        yield _Change(start, term, size)
        if end is not None:
            yield _Change(end, term, -size)


def _moved_to_shared(trace: Trace) -> dict[int, int]:
    """Return storage -> tick at which a data set's tensor moves to shared memory, to be sent to workers that are not
    forked."""
    moves = dict[int, int]()
    for use in trace.loaders:
        if use.start_method not in ("", "fork"):
            for storage in use.tensors:
                moves.setdefault(storage, use.start)
    return moves


def _writes(trace: Trace) -> dict[int, list[int]]:
    """Return storage -> ticks at which ops write to it in place, in order."""
    writes = dict[int, list[int]]()
    for op in trace.ops:
        if op.name.split(".")[1].endswith("_"):
            for storage in op.writes:
                writes.setdefault(storage, []).append(op.start)
    return writes


def _copied_on_write(storage: Storage, forks: list[LoaderUse], writes: list[int]) -> dict[int, int | None]:
    """Return start -> end (None: of the trace) of the times at which only forked workers own a storage's old pages.

    They begin when the main process frees the storage or writes to it, which copies the pages; they end with the
    workers.

    ``forks``: loaders with forked workers. ``writes``: ticks at which ops write to the storage, in order.
    """
    lifetimes = dict[int, int | None]()
    for use in forks:
        is_live = storage.born <= use.start and (storage.died is None or storage.died > use.start)
        next_write = bisect_right(writes, use.start)
        changes = [tick for tick in (storage.died, *writes[next_write : next_write + 1]) if tick is not None]
        if not is_live or not changes or (use.end is not None and use.end <= min(changes)):
            continue
        start = min(changes)
        other_end = lifetimes.get(start, use.end)  # of another loader's workers, which share the pages
        lifetimes[start] = None if use.end is None or other_end is None else max(use.end, other_end)
    return lifetimes


def _of_loaders(trace: Trace) -> Iterator[_Change]:
    """Yield the memory of loaders, their workers and data sets that is in no recorded storage.

    ``arrays`` are data sets, ``workers`` the processes, ``loading`` the samples of batches that are loaded, ``cached``
    what malloc holds of these in workers while no batch is loaded.
    """
    data_sets = set[int]()
    on_host = sorted(_on_host(trace), key=lambda storage: storage.born)
    pinned_or_shared = {entry.storage for entry in trace.host}
    for use in trace.loaders:
        if use.data_set not in data_sets:
            data_sets.add(use.data_set)
            yield from _live("arrays", use.arrays, use.start, end=None)
        if use.workers:
            worker = _WORKERS[use.start_method]
            if use.start_method != "fork":  # workers get copies of the arrays, and import torch
                yield from _live("arrays", use.workers * use.arrays, use.start, use.end)
                worker += _cuda_build(trace)
            processes = use.workers * worker + _HELPERS[use.start_method]
            yield from _live("workers", processes, use.start, use.end)
        samples = _peak_of_samples(use, on_host, pinned_or_shared)
        # what malloc caches in a worker after a batch was loaded, instead of returning it to the system
        cached = _peak_of_samples(use, on_host, pinned_or_shared, _MALLOC_RETURNS)
        idle = use.start  # tick from which the workers wait for a pass over the data
        for _, loads in groupby(use.loads, key=lambda load: bisect_right(use.exhausted, load[0])):
            start, first = next(loads)  # of the pass's first batch: begins to load, has arrived
            end = next((tick for tick in use.exhausted if tick >= first), use.end)
            yield from _live("cached", use.workers * cached, idle, start)
            yield from _queue(use, start, first, end)
            if use.workers:
                yield from _live("loading", use.workers * samples, start, first)
                yield from _live("loading", samples, first, end)
                yield from _live("cached", (use.workers - 1) * cached, first, end)
            if end is None:
                break
            idle = end
        else:  # workers wait for another pass
            yield from _live("cached", use.workers * cached, idle, use.end)


def _queue(use: LoaderUse, start: int, first: int, end: int | None) -> Iterator[_Change]:
    """Yield the prefetched batches of a pass over the data from ``start`` to ``end`` whose first batch arrives at
    ``first``. Workers have prefetched all of them before the first is pinned; later, a batch is in shared memory while
    it is copied to its pinned block."""
    batches = prefetched_batches(use)
    batch = sum(map(_pages, use.batch))  # bytes
    if not use.pinned:
        yield from _live("shared", batches * batch, start, end)
        return
    if use.workers:
        yield from _live("shared", max(batches, 1) * batch, start, first)
        yield from _live("shared", batch, first, end)
    for size in use.batch:
        for _ in range(batches):
            yield from _live("pinned", size, first, end)


def _peak_of_samples(use: LoaderUse, on_host: list[Storage], pinned_or_shared: set[int], below: int = 1 << 62) -> int:
    """Return the peak bytes of samples while a batch is loaded, without the batch itself if it is pinned.

    Args:
        use: the loader.
        on_host: storages on the host in order of their allocation.
        pinned_or_shared: ids of storages in pinned or shared memory, which do not count.
        below: only storages of less than this number of bytes count.
    """
    peaks = [0]
    for start, end in use.loads:
        first = bisect_right(on_host, start, key=lambda storage: storage.born)
        last = bisect_right(on_host, end, key=lambda storage: storage.born)
        samples = (s for s in on_host[first:last] if s.id not in pinned_or_shared and s.bytes < below)
        peaks.append(peak_live_bytes(samples))
    batch = sum(size for size in use.batch if size < below) if use.pinned else 0
    return max(max(peaks) - batch, 0)


def _on_host(trace: Trace) -> Iterable[Storage]:
    """Return the storages in host memory."""
    if trace.device == HOST:
        return trace.storages
    return [storage for storage in trace.storages if storage.device == HOST]


def _load_at(loads: list[tuple[int, int]], tick: int) -> tuple[int, int] | None:
    """Return the (start, end) of the load with ``start < tick <= end``, or None; ``loads`` are sorted."""
    last = bisect_right(loads, (tick - 1, 1 << 62)) - 1  # the last load that starts before the tick; 1 << 62: any end
    return loads[last] if last >= 0 and tick <= loads[last][1] else None


def _pages(size: int) -> int:
    """Return ``size`` rounded up to whole pages."""
    return -(-size // _PAGE) * _PAGE
