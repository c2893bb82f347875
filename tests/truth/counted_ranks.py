"""What real ranks of gloo take, counted by an allocator of our own on all threads."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.sharded_steps import step_of
from torch.multiprocessing.spawn import spawn

_INIT = dist.init_process_group
SOURCE = Path(__file__).with_name("counting_allocator.cpp")


def counted_peaks(ways: list[tuple[str, int]], folder: Path) -> dict[tuple[str, int], list[int]]:
    """Bytes at the peak of build and two steps of `models.sharded_steps`, on each rank, by (way, world)."""
    library = folder / "counting.so"
    root = Path(torch.__file__).parent
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root / 'include'}", str(SOURCE),
         "-o", str(library), f"-L{root / 'lib'}", "-lc10"], check=True,
    )  # fmt: skip
    peaks: dict[tuple[str, int], list[int]] = {}
    for world in sorted({world for _, world in ways}):
        names = [way for way, size in ways if size == world]
        spawn(_count, (world, names, str(library), str(folder)), nprocs=world)
        for way in names:
            peaks[way, world] = [int((folder / f"{way}.{world}.{rank}").read_text()) for rank in range(world)]
    return peaks


def _count(rank: int, world: int, ways: list[str], library: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    counter: Any = ctypes.CDLL(library)
    for name in ("highest_bytes", "live_bytes"):
        getattr(counter, name).restype = ctypes.c_int64
    counter.start_counting()
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
