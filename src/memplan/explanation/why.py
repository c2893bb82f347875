"""Explain torch's out-of-memory message: the parts of the device's memory, the missing bytes, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from memplan._bytes import format_bytes_as_torch as shown
from memplan._display import Displayed
from memplan._json import Saved
from memplan.simulation.oom_message import OutOfMemoryMessage, read_message

Verdict = Literal["fragmentation", "need", "too large", "others", "limit", "refused", "no figures"]
"""``fragmentation``: the memory that torch has reserved but not allocated would be enough. ``need``: it would not, even
with all free memory. ``too large``: the request alone exceeds the device. ``others``: it would be enough without the
other processes. ``limit``: the process may not use more. ``refused``: the device had enough free memory and did not
give it. ``no figures``: the message has no sizes."""
_ROUNDING_ERROR = 1 << 27
"""Bytes by which sums of the message's sizes can be off, since they have two decimals: 5 MiB for each size in GiB."""
_NEARLY_FULL = 0.05
"""Below this free share of its memory a device counts as nearly full: the next activation may need as much."""
_OLD_VARIABLE = {
    "CUDA": " (up to torch 2.8: PYTORCH_CUDA_ALLOC_CONF)",
    "HIP": " (up to torch 2.8: PYTORCH_HIP_ALLOC_CONF)",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the device's memory, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Why(Saved, Displayed):
    """Why a request for memory failed. Bytes throughout.

    ``parts`` add up to the device's memory, if the message says how much that is.
    """

    FORMAT: ClassVar[str] = "memplan.why"

    message: OutOfMemoryMessage
    parts: tuple[Part, ...]
    verdict: Verdict
    lack: int | None
    """The request minus all free and unallocated memory; at most 0 if that is enough, None if not known."""
    reason: str
    """The verdict in a sentence."""
    advice: tuple[str, ...]


def why(text: str) -> Why:
    """Explain why memory ran out, from torch's out-of-memory message.

    Args:
        text: any text with the message in it, such as a traceback, of torch 1.1 to 2.13 on CUDA, ROCm, XPU, MPS or the
            CPU. The last message in it counts.

    Raises:
        InputError: the text has no such message.

    Example:
        >>> print(memplan.why(str(error)).reason)
        Need, not fragmentation: with all that is free and unallocated in one piece, 2.28 GiB are missing.
    """
    message = read_message(text)
    verdict, lack = _verdict(message)
    return Why(
        message, tuple(_parts(message)), verdict, lack, _reason(message, verdict, lack), _advice(message, verdict, lack)
    )


def headline(message: OutOfMemoryMessage) -> str:
    """Return a line with the device, the request and the free memory."""
    device = message.device if message.gpu is None else f"{message.device}, GPU {message.gpu}"
    text = f"out of memory ({device})"
    if message.requested is not None:
        text += f": {shown(message.requested)} asked for"
    free = _free(message)
    if free is not None and message.total is not None:
        text += f", {shown(free)} free of {shown(message.total)}"
    return text


def _free(message: OutOfMemoryMessage) -> int | None:
    """Return the free bytes of the device: as in the message, or on MPS the allowed minus the allocated bytes."""
    if message.free is not None:
        return message.free
    if message.device == "MPS" and message.total is not None:
        return max(message.total - (message.allocated or 0) - (message.beside or 0), 0)
    return None


def memory_by_process(message: OutOfMemoryMessage) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """Return the bytes of this process, or None, and (PID, bytes) of the other processes.

    In a container torch does not know its own PID and lists itself among the others. It is the process with the least
    memory that is at least what torch has reserved.
    """
    if message.this_process is not None or message.reserved is None:
        return message.this_process, message.processes
    candidates = [process for process in message.processes if process[1] + _ROUNDING_ERROR > message.reserved]
    if not candidates:
        return None, message.processes
    this_process = min(candidates, key=lambda process: process[1])
    return this_process[1], tuple(process for process in message.processes if process is not this_process)


def _parts(message: OutOfMemoryMessage) -> list[Part]:
    """Return the parts of the device's memory that the message lists, and the remainder."""
    allocated, unallocated, reserved = message.allocated, message.unallocated, message.reserved
    parts: list[Part] = []
    if allocated is not None:
        pools = message.private_pools or 0
        parts += [Part("allocated by PyTorch, in tensors", allocated - pools)]
        parts += [Part("allocated by PyTorch in private pools (CUDA graphs)", pools)] if pools else []
    if unallocated is not None:
        parts.append(Part("reserved by PyTorch, in no tensor", unallocated))
    this_process, others = memory_by_process(message)
    if this_process is not None and reserved is not None and this_process > reserved:
        outside_allocator = this_process - reserved
        parts.append(Part("this process beside PyTorch's allocator (context, libraries)", outside_allocator))
    parts += [Part(f"process {number}", size) for number, size in others]
    if message.beside is not None:
        parts.append(Part("others than PyTorch", message.beside))
    free = _free(message)
    unexplained = 0
    if message.total is not None:
        unexplained = message.total - sum(part.bytes for part in parts) - (free or 0)
    if unexplained > 0:
        named = this_process is not None or others or message.beside is not None
        name = "not named in the message" if named else "the context, libraries, other processes"
        parts.append(Part(name, unexplained))
    if free is not None:
        parts.append(Part("free", free))
    if unexplained < 0:
        parts.append(Part("beyond the device: in the host's memory, or rounding", unexplained))
    return parts


def _verdict(message: OutOfMemoryMessage) -> tuple[Verdict, int | None]:
    """Return the verdict, and the missing bytes (at most 0: none; None: unknown)."""
    requested, free = message.requested, _free(message)
    if requested is None or (free is None and message.total is None):
        return "no figures", None
    if message.total is not None and requested > message.total:
        return "too large", requested - message.total
    if free is None:
        return "no figures", None
    unallocated, reserved = message.unallocated or 0, message.reserved
    if message.allowed is not None and reserved is not None and free >= requested:  # the process has a limit
        lack = requested - max(message.allowed - reserved, 0) - unallocated
        return ("fragmentation" if lack <= 0 else "limit"), lack
    lack = requested - free - unallocated
    if free >= requested and message.device != "MPS":
        return "refused", lack
    if lack <= 0:
        return "fragmentation", lack
    by_others = sum(size for _, size in memory_by_process(message)[1]) + (message.beside or 0)
    return ("others" if by_others >= lack else "need"), lack


def _reason(message: OutOfMemoryMessage, verdict: Verdict, lack: int | None) -> str:
    """Return the verdict in a sentence; ``lack`` is the number of missing bytes."""
    requested, free, unallocated = message.requested or 0, _free(message) or 0, message.unallocated or 0
    missing = shown(max(lack or 0, 0))
    if verdict == "fragmentation":
        text = (
            f"Fragmentation: {shown(unallocated)} that PyTorch holds are in no tensor, and with what is free that is "
            f"enough for {shown(requested)}, but in no one piece."
        )
        if _is_nearly_full(message, lack):
            text += f" But no more than {shown(-(lack or 0))} would be left then: the device is nearly full of tensors."
        return text
    if verdict == "need":
        return f"Need, not fragmentation: with all that is free and unallocated in one piece, {missing} are missing."
    if verdict == "too large":
        return f"Need: {shown(requested)} in one request are {missing} more than the device has."
    if verdict == "others":
        return f"Others hold what is missing: {missing} more than is free and unallocated."
    if verdict == "limit":
        return (
            f"A limit of the process's own: it may hold {shown(message.allowed or 0)}, {missing} too little; the "
            f"device has {shown(free)} left."
        )
    if verdict == "refused":
        return (
            f"The device had {shown(free)} left and did not give {shown(requested)}: another process gave memory back "
            "since then, or the driver, the host or a pool has a limit of its own."
        )
    if message.requested is not None:
        return f"Too little for {shown(requested)}; the message does not say what was held."
    return "The message has no figures: memory ran out outside of PyTorch's allocator, or the rest of it is cut off."


def _is_nearly_full(message: OutOfMemoryMessage, lack: int | None) -> bool:
    """Check whether so little would be free without fragmentation that the next request may fail."""
    return message.total is not None and lack is not None and -lack < _NEARLY_FULL * message.total


def _advice(message: OutOfMemoryMessage, verdict: Verdict, lack: int | None) -> tuple[str, ...]:
    """Return advice to the user, the most specific first."""
    advice: list[str] = []
    if verdict == "others":
        numbers = ", ".join(str(number) for number, _ in memory_by_process(message)[1])
        advice.append(
            f"End the other processes, if they are yours: {numbers}" if numbers else "Close what else uses it"
        )
    if verdict == "limit":
        advice.append(
            "Raise the limit: torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in "
            "PYTORCH_ALLOC_CONF"
        )
    if verdict == "fragmentation" and message.device in ("CUDA", "HIP", "XPU"):
        older = _OLD_VARIABLE.get(message.device, "")
        advice.append(f"Set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts{older}")
    if verdict == "fragmentation" and message.private_pools:
        advice.append("Let CUDA graphs share one pool: torch.cuda.graph(..., pool=...)")
    if verdict in ("refused", "no figures") and message.device != "CPU":
        advice.append("See what else uses the device (nvidia-smi, rocm-smi), and how much memory the host has left")
    is_need = verdict not in ("fragmentation", "refused")
    if is_need or (verdict == "fragmentation" and _is_nearly_full(message, lack)):
        advice += [
            "See what the step needs, and of what: memplan run SCRIPT, or memplan explain TARGET --device CARD",
            "Find the largest batch that fits: memplan largest TARGET --device CARD",
            "Make the step fit with the same result: memplan fit TARGET --budget SIZE",
        ]
    if message.device in ("CUDA", "HIP"):
        advice.append(
            "For the lines that hold it, and the settings that would have helped, take a snapshot: call "
            "torch.cuda.memory._record_memory_history() at the start and "
            "torch.cuda.memory._dump_snapshot('oom.pickle') where it fails; then memplan replay oom.pickle"
        )
    return tuple(advice)
