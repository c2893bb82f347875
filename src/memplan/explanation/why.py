"""Why memory ran out, out of torch's own message: where the device's memory was, what was missing, what helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memplan._bytes import format_bytes_as_torch as shown
from memplan._display import Displayed
from memplan._json import to_plain
from memplan.simulation.oom_message import OutOfMemoryMessage, read_message

Verdict = Literal["fragmentation", "need", "too large", "others", "limit", "refused", "no figures"]
"""``fragmentation``: what torch holds unallocated would have been enough. ``need``: all memory that is left would not.
``too large``: the request alone exceeds the device. ``others``: it would have been enough without other processes.
``limit``: the process is held to less than the device has. ``refused``: the device had enough left, and did not give
it. ``no figures``: the message has none."""
_ROUNDED = 1 << 27
"""Bytes by which sums of figures with two decimals can be off: 5 MiB for each in GiB."""
_LITTLE = 0.05
"""Share of a device that is little to be left over: one more activation takes it."""
_OLDER = {"CUDA": " (up to torch 2.8: PYTORCH_CUDA_ALLOC_CONF)", "HIP": " (up to torch 2.8: PYTORCH_HIP_ALLOC_CONF)"}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the device's memory, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Why(Displayed):
    """Why a request for memory failed. Bytes throughout.

    ``parts`` add up to the device's memory, where the message says how much that is.
    """

    message: OutOfMemoryMessage
    parts: tuple[Part, ...]
    verdict: Verdict
    lack: int | None
    """What was missing, with all that is free and unallocated taken together; 0 or less: nothing. None: not known."""
    reason: str
    """The verdict in a sentence."""
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return to_plain(self)

    def __str__(self) -> str:
        rows = [f"  {part.name}: {shown(part.bytes)}" for part in self.parts]
        return "\n".join([headline(self.message), *rows, self.reason, *(f"- {one}" for one in self.advice)])


def why(text: str) -> Why:
    """Say why memory ran out, from what torch said: any text with the message in it, such as a traceback.

    Args:
        text: the message of any torch from 1.1 to 2.13, of CUDA, ROCm, XPU, MPS or the CPU. Of several the last counts.

    Raises:
        InputError: no such message in it.

    Example:
        >>> print(memplan.why(str(error)).reason)
        Need, not fragmentation: with all that is free and unallocated in one piece, 2.28 GiB are missing.
    """
    message = read_message(text)
    verdict, lack = _judged(message)
    return Why(
        message, tuple(_parts(message)), verdict, lack, _reason(message, verdict, lack), _advice(message, verdict, lack)
    )


def headline(message: OutOfMemoryMessage) -> str:
    """Return what was asked for, where, and what was left."""
    place = message.device if message.gpu is None else f"{message.device}, GPU {message.gpu}"
    text = f"out of memory ({place})"
    if message.requested is not None:
        text += f": {shown(message.requested)} asked for"
    left = message.free if message.free is not None else _left(message)
    if left is not None and message.total is not None:
        text += f", {shown(left)} free of {shown(message.total)}"
    return text


def _left(message: OutOfMemoryMessage) -> int | None:
    """Return what is free: of MPS, where the message does not say it, what is allowed less what is held."""
    if message.free is not None:
        return message.free
    if message.device == "MPS" and message.total is not None:
        return max(message.total - (message.allocated or 0) - (message.beside or 0), 0)
    return None


def _own(message: OutOfMemoryMessage) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """Return what this process holds, and the other processes.

    In a container torch does not know its own number and lists itself among the others: it is the one that holds what
    torch has reserved, and not much more.
    """
    if message.this_process is not None or message.reserved is None:
        return message.this_process, message.processes
    able = [one for one in message.processes if one[1] + _ROUNDED > message.reserved]
    if not able:
        return None, message.processes
    own = min(able, key=lambda one: one[1])
    return own[1], tuple(one for one in message.processes if one is not own)


def _parts(message: OutOfMemoryMessage) -> list[Part]:
    allocated, unallocated, reserved = message.allocated, message.unallocated, message.reserved
    parts: list[Part] = []
    if allocated is not None:
        pools = message.private_pools or 0
        parts += [Part("allocated by PyTorch, in tensors", allocated - pools)]
        parts += [Part("allocated by PyTorch in private pools (CUDA graphs)", pools)] if pools else []
    if unallocated is not None:
        parts.append(Part("reserved by PyTorch, in no tensor", unallocated))
    own, others = _own(message)
    if own is not None and reserved is not None and own > reserved:
        parts.append(Part("this process beside PyTorch's allocator (context, libraries)", own - reserved))
    parts += [Part(f"process {number}", size) for number, size in others]
    if message.beside is not None:
        parts.append(Part("others than PyTorch", message.beside))
    left = _left(message)
    if left is not None:
        parts.append(Part("free", left))
    if message.total is None:
        return parts
    rest = message.total - sum(part.bytes for part in parts)
    if rest < 0:
        return [*parts, Part("beyond the device: in the host's memory, or rounding", rest)]
    named = own is not None or others or message.beside is not None
    name = "not named in the message" if named else "the context, libraries, other processes"
    at = len(parts) - (left is not None)
    return [*parts[:at], Part(name, rest), *parts[at:]] if rest else parts


def _judged(message: OutOfMemoryMessage) -> tuple[Verdict, int | None]:
    """Return the verdict, and the bytes that were missing."""
    requested, left = message.requested, _left(message)
    if requested is None or (left is None and message.total is None):
        return "no figures", None
    if message.total is not None and requested > message.total:
        return "too large", requested - message.total
    if left is None:
        return "no figures", None
    unallocated, reserved = message.unallocated or 0, message.reserved
    if message.allowed is not None and reserved is not None and left >= requested:
        lack = requested - max(message.allowed - reserved, 0) - unallocated
        return ("fragmentation" if lack <= 0 else "limit"), lack
    lack = requested - left - unallocated
    if left >= requested and message.device != "MPS":
        return "refused", lack
    if lack <= 0:
        return "fragmentation", lack
    return ("others" if sum(size for _, size in _own(message)[1]) + (message.beside or 0) >= lack else "need"), lack


def _reason(message: OutOfMemoryMessage, verdict: Verdict, lack: int | None) -> str:
    requested, left, unallocated = message.requested or 0, _left(message) or 0, message.unallocated or 0
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
            f"device has {shown(left)} left."
        )
    if verdict == "refused":
        return (
            f"The device had {shown(left)} left and did not give {shown(requested)}: another process gave memory back "
            "since then, or the driver, the host or a pool has a limit of its own."
        )
    if message.requested is not None:
        return f"Too little for {shown(requested)}; the message does not say what was held."
    return "The message has no figures: memory ran out outside of PyTorch's allocator, or the rest of it is cut off."


def _is_nearly_full(message: OutOfMemoryMessage, lack: int | None) -> bool:
    """Return whether hardly anything would be left without fragments, so that the next request may fail."""
    return message.total is not None and lack is not None and -lack < _LITTLE * message.total


def _advice(message: OutOfMemoryMessage, verdict: Verdict, lack: int | None) -> tuple[str, ...]:
    found: list[str] = []
    if verdict == "others":
        numbers = ", ".join(str(number) for number, _ in _own(message)[1])
        found.append(f"End the other processes, if they are yours: {numbers}" if numbers else "Close what else uses it")
    if verdict == "limit":
        found.append(
            "Raise the limit: torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in "
            "PYTORCH_ALLOC_CONF"
        )
    if verdict == "fragmentation" and message.device in ("CUDA", "HIP", "XPU"):
        older = _OLDER.get(message.device, "")
        found.append(f"Set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts{older}")
    if verdict == "fragmentation" and message.private_pools:
        found.append("Let CUDA graphs share one pool: torch.cuda.graph(..., pool=...)")
    if verdict in ("refused", "no figures") and message.device != "CPU":
        found.append("See what else uses the device (nvidia-smi, rocm-smi), and how much memory the host has left")
    if verdict not in ("fragmentation", "refused") or (verdict == "fragmentation" and _is_nearly_full(message, lack)):
        found += [
            "See what the step needs, and of what: memplan run SCRIPT, or memplan explain TARGET --device CARD",
            "Find the largest batch that fits: memplan largest TARGET --device CARD",
            "Make the step fit with the same result: memplan fit TARGET --budget SIZE",
        ]
    if message.device in ("CUDA", "HIP"):
        found.append(
            "For the lines that hold it, and the settings that would have helped, take a snapshot: call "
            "torch.cuda.memory._record_memory_history() at the start and "
            "torch.cuda.memory._dump_snapshot('oom.pickle') where it fails; then memplan replay oom.pickle"
        )
    return tuple(found)
