"""What real ranks of gloo take, counted by an allocator of our own on all threads."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import step_of
from torch.multiprocessing.spawn import spawn

_INIT = dist.init_process_group
SHARD = 1 << 20
"""Bytes of a rank's shard in `counted_collectives`."""
SOURCE = Path(__file__).with_name("counting_allocator.cpp")


def counted_peaks(ways: list[tuple[str, int]], folder: Path) -> dict[tuple[str, int], list[int]]:
    """Bytes at the peak of build and two steps of `models.sharded_steps`, on each rank, by (way, world)."""
    library = _compiled(folder)
    peaks: dict[tuple[str, int], list[int]] = {}
    for world in sorted({world for _, world in ways}):
        names = [way for way, size in ways if size == world]
        spawn(_count, (world, names, str(library), str(folder)), nprocs=world)
        for way in names:
            peaks[way, world] = [int((folder / f"{way}.{world}.{rank}").read_text()) for rank in range(world)]
    return peaks


def counted_collectives(world: int, folder: Path) -> dict[str, int]:
    """Bytes that gloo holds of its own during each collective of `world` ranks with shards of `SHARD` bytes."""
    spawn(_count_collectives, (world, str(_compiled(folder)), str(folder)), nprocs=world)
    return json.loads((folder / f"collectives.{world}").read_text())


def _compiled(folder: Path) -> Path:
    """The counting allocator, compiled as a library."""
    library = folder / "counting.so"
    root = Path(torch.__file__).parent
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root / 'include'}", str(SOURCE),
         "-o", str(library), f"-L{root / 'lib'}", "-lc10"], check=True,
    )  # fmt: skip
    return library


def _counter(library: str) -> Any:
    """The allocator, loaded and counting."""
    counter: Any = ctypes.CDLL(library)
    for name in ("highest_bytes", "live_bytes"):
        getattr(counter, name).restype = ctypes.c_int64
    counter.start_counting()
    return counter


def _count_collectives(rank: int, world: int, library: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counter = _counter(library)
    store = dist.FileStore(str(Path(folder, f"collectives.store.{world}")), world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    shard, whole, sent = (torch.ones(SHARD * times // 4) for times in (1, world, world))
    parts = [torch.ones(SHARD // 4) for _ in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "all_gather of a list": lambda: dist.all_gather(parts, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "reduce_scatter of a list": lambda: dist.reduce_scatter(shard, parts),
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(whole, sent),
    }
    taken = dict[str, int]()
    for name, call in calls.items():
        dist.barrier()
        before = counter.live_bytes()
        counter.restart_highest()
        call()
        dist.barrier()
        taken[name] = counter.highest_bytes() - before
    if rank == 0:
        Path(folder, f"collectives.{world}").write_text(json.dumps(taken))
    dist.destroy_process_group()


def _count(rank: int, world: int, ways: list[str], library: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    counter = _counter(library)
    for number, way in enumerate(ways):
        store = dist.FileStore(str(Path(folder, f"store.{world}.{number}")), world)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group = partial(_INIT, store=store, rank=rank, world_size=world)
        gc.collect()
        before = counter.live_bytes()
        counter.restart_highest()
        step = step_of(way)()
        for _ in range(2):
            step()
            gc.collect()
        Path(folder, f"{way}.{world}.{rank}").write_text(str(counter.highest_bytes() - before))
        del step
        dist.barrier()
        dist.destroy_process_group()
