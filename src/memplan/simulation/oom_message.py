"""Parse torch's out-of-memory messages: those of torch 1.1 to 2.13 on CUDA, ROCm, XPU, MPS and CPU.

torch writes them in c10/cuda/CUDACachingAllocator.cpp (c10/xpu/XPUCachingAllocator.cpp, aten/src/ATen/mps/
MPSAllocator.mm) with two decimals, so a parsed size is off by up to half of the last digit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memplan.errors import InputError

LONGEST = 4 << 20
"""Only so many characters at the end of a text are searched."""
_UNITS = {"bytes": 1, "B": 1} | {
    f"{prefix}{i}B": 1024**power for power, prefix in enumerate("KMGT", start=1) for i in ("", "i")
}
"""MPS calls 1024 bytes KB up to torch 2.6."""
_SIZE = r"(\d{1,20}(?:\.\d{1,9})?) ?(bytes|[KMGT]i?B)"
_HEAD = re.compile(
    r"(?P<device>CUDA|HIP|XPU|MPS backend)(?P<raw> error:)? out of memory|(?P<cpu>CPUAllocator: (?:can't|not enough))"
)
_QUOTE = re.compile(r"^[\s>#|]+", re.MULTILINE)
_MAX_SIZE = 1 << 50
"""Larger sizes are negative numbers that torch printed as unsigned."""
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
    """The sizes in a message, in bytes; None for sizes that the message does not mention."""

    device: str
    """``CUDA``, ``HIP`` (ROCm), ``XPU``, ``MPS`` or ``CPU``."""
    requested: int | None = None
    """The new memory that torch needed: for a request of up to 1 MiB that is 2 MiB, of up to 10 MiB 20 MiB."""
    gpu: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    """The limit of the process, if it has one (`torch.cuda.set_per_process_memory_fraction`)."""
    this_process: int | None = None
    """Bytes of the process, including the CUDA context and libraries, which torch's allocator does not manage."""
    processes: tuple[tuple[int, int], ...] = ()
    """(PID, bytes) of the other processes; in a container this process can be among them."""
    allocated: int | None = None
    """Bytes in tensors, private pools included."""
    private_pools: int | None = None
    """Allocated in pools of CUDA graphs or of the user's."""
    unallocated: int | None = None
    """Reserved by torch's allocator, and in no tensor."""
    beside: int | None = None
    """On MPS: allocated outside of torch."""

    @property
    def reserved(self) -> int | None:
        """Bytes reserved by torch's allocator, or None."""
        if self.allocated is None:
            return None
        return self.allocated + (self.unallocated or 0)


def read_message(text: str) -> OutOfMemoryMessage:
    """Parse the last out-of-memory message in a text, such as a traceback or a log.

    The message may be wrapped, and its lines may begin with quotation marks. Raises InputError if the text has no such
    message.

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
    messages = [_message(head, flat[head.start() : end]) for head, end in zip(heads, ends, strict=True)]
    with_request = [message for message in messages if message.requested is not None]
    return (with_request or messages)[-1]


def _message(head: re.Match[str], text: str) -> OutOfMemoryMessage:
    """Parse a single message, whose first words are ``head``."""
    sizes = {name: _size(pattern.search(text)) for name, pattern in _FIELDS.items()}
    reserved = sizes.pop("reserved")
    if sizes["unallocated"] is None and reserved is not None and sizes["allocated"] is not None:
        sizes["unallocated"] = max(reserved - sizes["allocated"], 0)
    device = "CPU" if head["cpu"] else head["device"].partition(" ")[0]
    gpu = _GPU.search(text)
    processes: list[tuple[int, int]] = []
    for process, number, unit in _PROCESS.findall(text):
        size = _bytes(number, unit)
        if size:
            processes.append((int(process), size))
    return OutOfMemoryMessage(device, gpu=None if gpu is None else int(gpu[1]), processes=tuple(processes), **sizes)


def _size(match: re.Match[str] | None) -> int | None:
    """Return the bytes of a match of `_FIELDS`, whose only groups that matched are number and unit; None for None."""
    return None if match is None else _bytes(*(part for part in match.groups() if part is not None))


def _bytes(number: str, unit: str) -> int | None:
    """Return a size in bytes; None if it is a negative number that torch printed as unsigned."""
    factor = next(factor for name, factor in _UNITS.items() if name.lower() == unit.lower())
    size = round(float(number) * factor)
    return size if size < _MAX_SIZE else None
