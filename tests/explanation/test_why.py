"""Verdicts about published messages, each worked out by hand from its figures, and sums that close."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.explanation.why import Why, why
from memplan.simulation.oom_message import OutOfMemoryMessage

GIB, MIB = 1 << 30, 1 << 20


def cuda(asked: str, total: str, free: str, rest: str) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is "
        f"free. {rest} is reserved by PyTorch but unallocated."
    )


CASES = {
    # 235.06 MiB free + 330.42 MiB unallocated = 565.48 MiB >= 496 MiB
    "https://github.com/FoundationVision/GenerateU/issues/10": (
        cuda("496.00 MiB", "14.75 GiB", "235.06 MiB", "Process 20398 has 14.52 GiB memory in use. Of the allocated "
             "memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB"),
        "fragmentation", 496 - 235.06 - 330.42,
    ),
    # 11.06 + 194.87 MiB would serve 22 MiB
    "https://github.com/pytorch/pytorch/issues/16417, 2024-03-13": (
        cuda("22.00 MiB", "23.65 GiB", "11.06 MiB", "Including non-PyTorch memory, this process has 23.60 GiB memory "
             "in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB"),
        "fragmentation", 22 - 11.06 - 194.87,
    ),
    # 12.73 + 9.35 GiB do not serve 22.78 GiB
    "https://github.com/murong-xu/CADS/issues/4": (
        cuda("22.78 GiB", "31.47 GiB", "12.73 GiB", "Including non-PyTorch memory, this process has 18.73 GiB memory "
             "in use. Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB"),
        "need", (22.78 - 12.73 - 9.35) * 1024,
    ),
    "https://github.com/wxian3/NeuroLens/issues/2": (
        cuda("55.57 GiB", "12.00 GiB", "9.02 GiB", "Of the allocated memory 984.52 MiB is allocated by PyTorch, and "
             "463.48 MiB"),
        "too large", (55.57 - 12) * 1024,
    ),
    "https://github.com/levihsu/OOTDiffusion/issues/167": (
        cuda("2.00 GiB", "4.00 GiB", "2.80 GiB", "Of the allocated memory 0 bytes is allocated by PyTorch, and "
             "0 bytes"),
        "refused", (2 - 2.8) * 1024,
    ),
    # another process holds 14.26 GiB; 1.16 GiB - 471.69 MiB - 1 MiB are missing
    "two processes": (
        cuda("1.16 GiB", "31.36 GiB", "471.69 MiB", "Including non-PyTorch memory, this process has 16.63 GiB memory "
             "in use. Process 19239 has 14.26 GiB memory in use. Of the allocated memory 15.03 GiB is allocated by "
             "PyTorch, and 1.00 MiB"),
        "others", 1.16 * 1024 - 471.69 - 1,
    ),
    "https://github.com/ROCm/TheRock/issues/2118, less unallocated": (
        "HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 255.69 GiB of which 252.82 GiB "
        "is free. 1.20 GiB allowed; Of the allocated memory 1.14 GiB is allocated by PyTorch, with 17.00 MiB allocated "
        "in private pools (e.g., HIP Graphs), and 18.63 MiB is reserved by PyTorch but unallocated.",
        "limit", 76 - (1.20 * 1024 - 1.14 * 1024 - 18.63) - 18.63,
    ),
    "https://github.com/lllyasviel/Fooocus/issues/1139 (MPS)": (
        "MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: 172.98 MB, max allowed: 9.07 GB). Tried "
        "to allocate 26.25 MB on private pool.",
        "others", 26.25 - (9.07 - 8.89) * 1024 + 172.98,
    ),
    "a kernel, or the context": ("RuntimeError: CUDA error: out of memory", "no figures", None),
}  # fmt: skip


@pytest.mark.parametrize("where", CASES)
def test_verdicts(where: str) -> None:
    text, verdict, lack = CASES[where]
    found = memplan.why(text)
    assert found.verdict == verdict
    assert (found.lack is None) == (lack is None)
    if lack is not None and found.lack is not None:
        assert found.lack == pytest.approx(lack * MIB, abs=2)


def test_in_a_container_the_process_finds_itself() -> None:
    found = why(CASES["https://github.com/FoundationVision/GenerateU/issues/10"][0])
    names = {part.name: part.bytes for part in found.parts}
    assert "process 20398" not in names
    beside = names["this process beside PyTorch's allocator (context, libraries)"]
    assert beside == round(14.52 * GIB) - round(14.06 * GIB) - round(330.42 * MIB)


def test_advice_is_of_the_verdict() -> None:
    says = {name: " ".join(why(text).advice) for name, (text, _, _) in CASES.items()}
    assert "expandable_segments:True" in says["https://github.com/FoundationVision/GenerateU/issues/10"]
    assert "expandable_segments" not in says["https://github.com/murong-xu/CADS/issues/4"]
    assert "memplan fit" in says["https://github.com/murong-xu/CADS/issues/4"]
    assert "19239" in says["two processes"]
    assert "set_per_process_memory_fraction" in says["https://github.com/ROCm/TheRock/issues/2118, less unallocated"]
    assert "_dump_snapshot" in says["a kernel, or the context"]
    assert "snapshot" not in says["https://github.com/lllyasviel/Fooocus/issues/1139 (MPS)"]


sizes = st.integers(0, 1 << 45)
messages = st.builds(
    lambda total, asked, free, allocated, pools, unallocated, own, others: (total, asked, free, allocated,
        min(pools, allocated), unallocated, own, others),
    sizes, sizes, sizes, sizes, sizes, sizes, st.none() | sizes, st.lists(sizes, max_size=3),
)  # fmt: skip


@settings(deadline=None)  # the first call imports
@given(messages)
def test_the_parts_add_up_to_the_device(figures: tuple[int, int, int, int, int, int, int | None, list[int]]) -> None:
    total, asked, free, allocated, pools, unallocated, own, others = figures
    rest = "".join(f"Process {number} has {size} bytes memory in use. " for number, size in enumerate(others, 1))
    rest += "" if own is None else f"Including non-PyTorch memory, this process has {own} bytes memory in use. "
    rest += (
        f"Of the allocated memory {allocated} bytes is allocated by PyTorch, with {pools} bytes allocated in private "
    )
    found = why(
        cuda(f"{asked} bytes", f"{total} bytes", f"{free} bytes", f"{rest}private pools, and {unallocated} bytes")
    )
    assert sum(part.bytes for part in found.parts) == total
    assert found.message.processes == tuple((number, size) for number, size in enumerate(others, 1) if size)
    assert str(found)  # shares of a device of 0 bytes are not divided


def test_it_round_trips_as_plain_data() -> None:
    found = why(CASES["two processes"][0])
    plain = found.to_dict()
    assert OutOfMemoryMessage(**plain["message"] | {"processes": ((19239, round(14.26 * GIB)),)}) == found.message
    assert isinstance(found, Why)
    assert [part["name"] for part in plain["parts"]] == [part.name for part in found.parts]


@pytest.mark.parametrize(("unallocated", "nearly_full"), [("700.00 MiB", True), ("2.50 GiB", False)])
def test_a_device_that_is_nearly_full_of_tensors_has_to_need_less_too(unallocated: str, nearly_full: bool) -> None:
    """Of 24 GiB: 13 + 700 - 20 MiB are 2.8 %, 13 MiB + 2.5 GiB - 20 MiB are 10.4 %."""
    text = "Of the allocated memory 20.00 GiB is allocated by PyTorch, and " + unallocated
    found = why(cuda("20.00 MiB", "24.00 GiB", "13.00 MiB", text))
    assert found.verdict == "fragmentation"
    assert ("693.00 MiB would be left" in found.reason) == nearly_full
    assert any("memplan fit" in one for one in found.advice) == nearly_full
