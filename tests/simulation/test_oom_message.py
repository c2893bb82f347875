"""torch's out-of-memory messages: those that people published, and any that torch's own format could write."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import InputError
from memplan.simulation.oom_message import OutOfMemoryMessage, read_message

GIB, MIB = 1 << 30, 1 << 20
PYTORCH = "https://github.com/pytorch/pytorch/issues/"


def gib(number: float) -> int:
    return round(number * GIB)


def mib(number: float) -> int:
    return round(number * MIB)


# Where it stands, the message (without the advice behind it), its figures.
PUBLISHED: dict[str, tuple[str, OutOfMemoryMessage]] = {
    f"{PYTORCH}16417 (torch 1.0)": (
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
        "already allocated; 9.28 GiB free; 4.68 MiB cached)",
        OutOfMemoryMessage("CUDA", mib(12.5), 0, gib(10.92), gib(9.28), allocated=mib(8.57), unallocated=mib(4.68)),
    ),
    f"{PYTORCH}59778": (
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already "
        "allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch) ",
        OutOfMemoryMessage(
            "CUDA", gib(2.26), 0, 6 * GIB, gib(3.03), allocated=mib(781.59), unallocated=gib(1.24) - mib(781.59)
        ),
    ),
    "https://github.com/YingqianWang/iPASSR/issues/9 (more than the card has)": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total "
        "capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch) If reserved "
        "memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        OutOfMemoryMessage("CUDA", gib(10.73), 0, 8 * GIB, 0, allocated=gib(17.2), unallocated=gib(19.15) - gib(17.2)),
    ),
    "https://github.com/wxian3/NeuroLens/issues/2 (torch 2.1)": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of "
        "12.00 GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 "
        "MiB is reserved by PyTorch but unallocated.",
        OutOfMemoryMessage("CUDA", gib(55.57), 0, 12 * GIB, gib(9.02), allocated=mib(984.52), unallocated=mib(463.48)),
    ),
    "https://github.com/FoundationVision/GenerateU/issues/10 (in a container)": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of "
        "14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory "
        "14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated.",
        OutOfMemoryMessage(
            "CUDA",
            496 * MIB,
            0,
            gib(14.75),
            mib(235.06),
            processes=((20398, gib(14.52)),),
            allocated=gib(14.06),
            unallocated=mib(330.42),
        ),
    ),
    "https://github.com/murong-xu/CADS/issues/4 (torch 2.5)": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 "
        "GiB of which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of "
        "the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated.",
        OutOfMemoryMessage(
            "CUDA",
            gib(22.78),
            0,
            gib(31.47),
            gib(12.73),
            this_process=gib(18.73),
            allocated=gib(9.08),
            unallocated=gib(9.35),
        ),
    ),
    "https://github.com/ROCm/TheRock/issues/2118 (held to a share; private pools)": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 "
        "GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by "
        "PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch "
        "but unallocated.",
        OutOfMemoryMessage(
            "HIP",
            2 * MIB,
            0,
            gib(255.98),
            gib(244.65),
            gib(1.05),
            allocated=mib(1017.01),
            private_pools=17 * MIB,
            unallocated=mib(54.99),
        ),
    ),
    f"{PYTORCH}175431 (GPU 7)": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 "
        "GiB of which 203.49 GiB is free. Of the allocated memory 68.63 GiB is allocated by PyTorch, and 14.93 GiB is "
        "reserved by PyTorch but unallocated.",
        OutOfMemoryMessage("HIP", 2 * MIB, 7, gib(287.98), gib(203.49), allocated=gib(68.63), unallocated=gib(14.93)),
    ),
    "https://github.com/intel/torch-xpu-ops/issues/3157": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 11.59 "
        "GiB of which 9.01 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is "
        "reserved by PyTorch but unallocated. Please use empty_cache to release all unoccupied cached memory.",
        OutOfMemoryMessage("XPU", 32 * GIB, 0, gib(11.59), gib(9.01), allocated=0, unallocated=0),
    ),
    f"{PYTORCH}96814 (MPS, torch 2.1)": (
        "MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 GB, max allowed: 32.00 GB). "
        "Tried to allocate 129.21 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit",
        OutOfMemoryMessage("MPS", mib(129.21), total=32 * GIB, allocated=gib(7.43), beside=gib(24.46)),
    ),
    "https://github.com/Comfy-Org/ComfyUI/issues/7440 (MPS, torch 2.6)": (
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). "
        "Tried to allocate 292.50 MiB on private pool.",
        OutOfMemoryMessage("MPS", mib(292.5), total=gib(27.2), allocated=gib(9.57), beside=gib(17.35)),
    ),
}


@pytest.mark.parametrize("where", PUBLISHED)
def test_published_messages(where: str) -> None:
    text, figures = PUBLISHED[where]
    assert read_message(text) == figures
    quoted = "\n".join(f"> {line}" for line in text.replace(". ", ".\n").splitlines())
    assert read_message(f"Traceback (most recent call last):\n  File 'a.py'\n{quoted}\n\nwhat now?") == figures


def test_the_last_message_with_figures_counts() -> None:
    first, second = (PUBLISHED[where][0] for where in list(PUBLISHED)[:2])
    figures = PUBLISHED[list(PUBLISHED)[1]][1]
    assert read_message(f"{first}\n{second}\nterminate called: CUDA error: out of memory") == figures
    assert read_message("RuntimeError: CUDA error: out of memory\nCUDA kernel errors ...") == OutOfMemoryMessage("CUDA")


def test_a_negative_figure_of_torchs_own_is_none() -> None:
    """As a user of WSL met it: 2**64 bytes less what the driver did not say."""
    text = "CUDA out of memory. Tried to allocate 3.98 GiB. GPU 0 has a total capacity of 31.84 GiB of which 16.30 GiB "
    text += "is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use."
    found = read_message(text)
    assert (found.this_process, found.free) == (None, gib(16.3))


def test_the_cpu_says_only_what_was_asked_for() -> None:
    text = (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    )
    assert read_message(text + "tried to allocate 400000000000 bytes.") == OutOfMemoryMessage("CPU", 400_000_000_000)


@pytest.mark.parametrize("text", ["", "CUDA", "out of memory", "Tried to allocate 2.00 GiB", "x" * 10_000_000])
def test_other_texts_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(InputError, match=r"^no message about memory in \d+ characters\. Expected what torch says"):
        read_message(text)


# Any message: written as c10 writes it, read back to half of the last decimal.

sizes = st.one_of(st.integers(0, 5000), st.integers(0, 1 << 32), st.integers(0, 1 << 45))


def written(size: int) -> str:
    """`format_size` of c10/cuda/CUDACachingAllocator.cpp, line by line."""
    if size <= 1024:
        return f"{size} bytes"
    if size <= 1048576:
        return f"{size / 1024.0:.2f} KiB"
    if size <= 1073741824:
        return f"{size / 1048576.0:.2f} MiB"
    return f"{size / 1073741824.0:.2f} GiB"


def off(size: int) -> int:
    """Bytes that a figure can be off by: half of its last decimal."""
    unit = 1 if size <= 1024 else 1024 if size <= MIB else MIB if size <= GIB else GIB
    return unit // 200 + 1


@dataclass
class Given:
    device: str
    requested: int
    gpu: int
    total: int
    free: int
    allocated: int
    unallocated: int
    allowed: int | None
    this_process: int | None
    processes: list[tuple[int, int]]
    private_pools: int


given_messages = st.builds(
    Given, st.sampled_from(["CUDA", "HIP"]), sizes, st.integers(0, 15), sizes, sizes, sizes, sizes, st.none() | sizes,
    st.none() | sizes, st.lists(st.tuples(st.integers(1, 1 << 22), sizes.filter(bool)), max_size=3), sizes,
)  # fmt: skip


def old_text(one: Given) -> str:
    """Torch 1.13 and 2.0."""
    allowed = "" if one.allowed is None else f"{written(one.allowed)} allowed; "
    return (
        f"{one.device} out of memory. Tried to allocate {written(one.requested)} (GPU {one.gpu}; {written(one.total)} "
        f"total capacity; {written(one.allocated)} already allocated; {written(one.free)} free; {allowed}"
        f"{written(one.allocated + one.unallocated)} reserved in total by PyTorch) If reserved memory is >> allocated"
    )


def new_text(one: Given, capacity: str, pools: bool) -> str:
    """From torch 2.1 on."""
    allowed = "" if one.allowed is None else f"{written(one.allowed)} allowed; "
    processes = "".join(f"Process {number} has {written(size)} memory in use. " for number, size in one.processes)
    if one.this_process is not None:
        own = written(one.this_process)
        processes += f"Including non-PyTorch memory, this process has {own} memory in use. "
    private = ""
    if pools:
        private = f"with {written(one.private_pools)} allocated in private pools (e.g., {one.device} Graphs), "
    return (
        f"{one.device} out of memory. Tried to allocate {written(one.requested)}. GPU {one.gpu} has a total {capacity} "
        f"of {written(one.total)} of which {written(one.free)} is free. {processes}{allowed}Of the allocated memory "
        f"{written(one.allocated)} is allocated by PyTorch, {private}and {written(one.unallocated)} is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    )


def near(found: int | None, size: int | None, more: int = 0) -> bool:
    return found is size is None or (found is not None and size is not None and abs(found - size) <= off(size) + more)


@given(given_messages)
def test_any_message_of_the_old_form(one: Given) -> None:
    found = read_message(old_text(one))
    assert (found.device, found.gpu, found.processes) == (one.device, one.gpu, ())
    for name in ("requested", "total", "free", "allocated", "allowed"):
        assert near(getattr(found, name), getattr(one, name)), name
    assert near(found.unallocated, one.unallocated, off(one.allocated) + off(one.allocated + one.unallocated))


@given(given_messages, st.sampled_from(["capacty", "capacity"]), st.booleans())
def test_any_message_of_the_new_form(one: Given, capacity: str, pools: bool) -> None:
    found = read_message(f"Traceback:\n{new_text(one, capacity, pools)}")
    assert (found.device, found.gpu) == (one.device, one.gpu)
    for name in ("requested", "total", "free", "allocated", "unallocated", "allowed", "this_process"):
        assert near(getattr(found, name), getattr(one, name)), name
    assert near(found.private_pools, one.private_pools if pools else None)
    assert [number for number, _ in found.processes] == [number for number, _ in one.processes]
    assert all(near(a, b) for (_, a), (_, b) in zip(found.processes, one.processes, strict=True))
