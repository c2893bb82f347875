"""What torch says when memory runs out, read back: the messages of torch 1.1 to 2.13, of CUDA, ROCm, XPU and MPS.

torch writes them in c10/cuda/CUDACachingAllocator.cpp (c10/xpu/XPUCachingAllocator.cpp, aten/src/ATen/mps/
MPSAllocator.mm), each figure with two decimals: what is read is off by up to half of the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.errors import InputError

LONGEST = 4 << 20
"""Characters of a text that are looked at: the last ones."""
_UNITS = {"bytes": 1, "B": 1} | {
    f"{prefix}{i}B": 1024**power for power, prefix in enumerate("KMGT", start=1) for i in ("", "i")
}
"""MPS calls 1024 bytes KB up to torch 2.6."""
_SIZE = r"(\d{1,20}(?:\.\d{1,9})?) ?(bytes|[KMGT]i?B)"
_HEAD = re.compile(
    r"(?P<device>CUDA|HIP|XPU|MPS backend)(?P<raw> error:)? out of memory|(?P<cpu>CPUAllocator: (?:can't|not enough))"
)
_QUOTE = re.compile(r"^[\s>#|]+", re.MULTILINE)
_NONSENSE = 1 << 50
"""Bytes from which a figure is a negative number of torch's, written without its sign."""
_PATTERNS = {
    "requested": rf"tried to allocate {_SIZE}",
    "total": rf"total capaci?ty of {_SIZE}|{_SIZE} total capaci?ty|max allowed: {_SIZE}",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free",
    "allowed": rf"(?<!max ){_SIZE} allowed;",
    "this_process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|MPS allocated: {_SIZE}",
    "private_pools": rf"with {_SIZE} allocated in private pools",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated|; {_SIZE} cached",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "beside": rf"other allocations: {_SIZE}",
}
_FIELDS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}
_GPU = re.compile(r"\bGPU (\d{1,4})(?: has|;)")
_PROCESS = re.compile(rf"\bProcess (\d{{1,20}}) has {_SIZE} memory in use")


@dataclass(frozen=True, slots=True)
class OutOfMemoryMessage:
    """Figures of one message, in bytes; None for what it does not say."""

    device: str
    """``CUDA``, ``HIP`` (ROCm), ``XPU``, ``MPS`` or ``CPU``."""
    requested: int | None = None
    """What torch wanted of the device: for a request of up to 1 MiB that is 2 MiB, of up to 10 MiB 20 MiB."""
    gpu: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    """What the process may hold, where it is held to a share (`torch.cuda.set_per_process_memory_fraction`)."""
    this_process: int | None = None
    """With what it holds beside torch's allocator: the context, libraries."""
    processes: tuple[tuple[int, int], ...] = ()
    """Number and bytes of each other process; in a container this process can be one of them."""
    allocated: int | None = None
    """In tensors, private pools included."""
    private_pools: int | None = None
    """Allocated in pools of CUDA graphs or of the user's."""
    unallocated: int | None = None
    """Held by torch's allocator, and in no tensor."""
    beside: int | None = None
    """On MPS: allocated by others than torch."""

    @property
    def reserved(self) -> int | None:
        """Bytes that torch's allocator holds."""
        if self.allocated is None:
            return None
        return self.allocated + (self.unallocated or 0)


def read_message(text: str) -> OutOfMemoryMessage:
    """Return the last message about memory in a text, such as a traceback or a log.

    Line breaks within it and quotation marks before its lines do not matter.

    Raises:
        InputError: there is none.

    Example:
        >>> read_message("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; ...").total
        8589934592
    """
    flat = " ".join(_QUOTE.sub("", text[-LONGEST:]).split())
    heads = list(_HEAD.finditer(flat))
    if not heads:
        raise InputError(
            f"no message about memory in {len(text)} characters",
            expected='what torch says: "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."',
            do="Paste the last lines of the traceback, or name a file that has them",
        )
    ends = [head.start() for head in heads[1:]] + [len(flat)]
    found = [_message(head, flat[head.start() : end]) for head, end in zip(heads, ends, strict=True)]
    return next((one for one in reversed(found) if one.requested is not None), found[-1])


def _message(head: re.Match[str], text: str) -> OutOfMemoryMessage:
    sizes = {name: _size(pattern.search(text)) for name, pattern in _FIELDS.items()}
    reserved = sizes.pop("reserved")
    if sizes["unallocated"] is None and reserved is not None and sizes["allocated"] is not None:
        sizes["unallocated"] = max(reserved - sizes["allocated"], 0)
    device = "CPU" if head["cpu"] else head["device"].partition(" ")[0]
    gpu = _GPU.search(text)
    processes = tuple((int(match[1]), size) for match in _PROCESS.finditer(text) if (size := _of(match.groups()[1:])))
    return OutOfMemoryMessage(device, gpu=None if gpu is None else int(gpu[1]), processes=processes, **sizes)


def _size(match: re.Match[str] | None) -> int | None:
    return None if match is None else _of([part for part in match.groups() if part is not None])


def _of(parts: Sequence[str]) -> int | None:
    number, unit = parts
    size = round(float(number) * _unit(unit))
    return size if size < _NONSENSE else None


def _unit(name: str) -> int:
    return next(size for unit, size in _UNITS.items() if unit.lower() == name.lower())
