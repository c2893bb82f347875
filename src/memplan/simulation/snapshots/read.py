"""A snapshot of torch's CUDA memory as plain data: read from a pickle, from JSON or from a dict, trusting nothing.

What torch writes is `torch.cuda.memory._snapshot()`: the segments that the caching allocator holds with their blocks,
for each GPU the last of what it did, and its settings. Keys came and went with the versions of torch; a key that is
missing has the meaning it had before it was written.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from memplan._json import MOST_BYTES, parse
from memplan.errors import DeviceError, SnapshotFormatError, TargetError
from memplan.simulation.allocator.settings import AllocatorSettings, settings_of_snapshot
from memplan.simulation.snapshots.safe_pickle import DO, EXPECTED, load_plain, shown
from memplan.simulation.timeline import DEFAULT_POOL, Action, Block, BlockState, Pool, Segment

LARGEST_FILE = 2 << 30
"""Bytes, compressed or not, beyond which a file is not read."""
_PACKED = 200  # JSON of 20,000 events packs 25 times, stacks pack better; deflate reaches 1032 with zeros alone
_UNPACKED_AT_LEAST = 64 << 20
_LARGEST = 1 << 63
_DEVICES = 1024

_ACTIONS: dict[str, Action] = {
    action: action
    for action in (
        "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
        "oom",
    )
}  # fmt: skip
_STATES: dict[str, BlockState] = {
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",  # its name up to torch 2.0
    "inactive": "inactive",
}


class Frame(NamedTuple):
    """One line of a stack, the innermost first. Text from a stranger: clean it before printing."""

    filename: str
    line: int
    name: str


class Entry(NamedTuple):
    """One thing that the recorded allocator did. Bytes as requested for blocks, as mapped for segments."""

    action: Action
    address: int
    """Of "oom": what the card had left, in bytes, -1 where that was not written."""
    size: int
    stream: int
    pool: Pool | None
    """None where the version of torch did not write it."""
    stack: int
    """Index into `Snapshot.stacks`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one GPU's caching allocator held, and the last of what it did before."""

    source: str
    """The file, or what else it came from."""
    gpu: int
    segments: tuple[Segment, ...]
    """In order of address."""
    entries: tuple[Entry, ...]
    """In order of time; () where no history was recorded."""
    settings: AllocatorSettings
    stacks: tuple[tuple[Frame, ...], ...]
    """Every stack that occurs, once; the first one is empty."""
    block_stacks: Mapping[int, int]
    """Address of a live block -> the stack that it was allocated from, where one was recorded."""
    notes: tuple[str, ...] = ()


def read_snapshot(what: str | os.PathLike[str] | Mapping[str, Any], gpu: int | None = None) -> Snapshot:
    """Read a snapshot from a file (pickle or JSON, each also as .gz) or from what torch returned.

    Args:
        what: a path, or the dict of ``torch.cuda.memory._snapshot()``.
        gpu: whose part to read; needed where more than one GPU has any.

    Raises:
        TargetError: the file cannot be read.
        SnapshotFormatError: it is no snapshot, damaged, or a pickle with more than plain data in it.
        DeviceError: nothing of that GPU in it, or of several and none chosen.
    """
    if isinstance(what, Mapping):
        return _Reader("the snapshot", 1 << 40).read(what, gpu)
    if not isinstance(what, (str, os.PathLike)):
        raise SnapshotFormatError(f"a {type(what).__name__}", expected="a path, or a dict: " + EXPECTED)
    source = shown(str(what))
    packed = _bytes_of(Path(what), source)
    data = _unpacked(packed, source) if packed.startswith(b"\x1f\x8b") else packed
    return _Reader(source, len(data)).read(_parsed(data, source, len(packed)), gpu)


def _bytes_of(path: Path, source: str) -> bytes:
    """Return what stands in a file."""
    try:
        found = os.stat(path)
        is_file = stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)
        data = b""
        if is_file and found.st_size <= LARGEST_FILE:
            with open(path, "rb") as file:
                data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise TargetError(
            f"{source} cannot be read ({reason})", expected="the file of a snapshot", do="Check the path"
        ) from None
    if not is_file:
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise TargetError(f"{source} is {kind}", expected="the file of a snapshot", do="Check the path")
    if max(found.st_size, len(data)) > LARGEST_FILE:
        _refuse(source, f"is larger than {LARGEST_FILE >> 30} GiB", "Record fewer events (max_entries)")
    return data


def _unpacked(data: bytes, source: str) -> bytes:
    most = min(LARGEST_FILE, max(_UNPACKED_AT_LEAST, _PACKED * len(data)))
    parts: list[bytes] = []
    size = 0
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while part := file.read(1 << 20):
                parts.append(part)
                size += len(part)
                if size > most:
                    _refuse(source, f"unpacks to more than {most >> 20} MiB", "Unpack it yourself if you trust it")
    except (OSError, EOFError, zlib.error) as error:
        _refuse(source, f"is a damaged gzip file ({shown(str(error))})", DO)
    return b"".join(parts)


def _parsed(data: bytes, source: str, packed: int) -> Any:
    if data.startswith(b"\x80"):
        return load_plain(data, source, packed)
    if not data:
        _refuse(source, "is empty", DO)
    if data.startswith(b"PK\x03\x04"):
        _refuse(source, "is a zip file, as torch.save writes it", DO)
    if data.lstrip(b" \t\r\n")[:1] not in (b"{", b"["):
        _refuse(source, "is neither a pickle of protocol 2 to 5 nor JSON", DO)
    try:
        return parse(data.decode("utf-8"), packed=packed, longest=LARGEST_FILE)
    except ValueError as error:  # Unreadable, or no UTF-8
        _refuse(source, f"cannot be read: {shown(str(error))}", DO)


def _refuse(source: str, what: str, do: str) -> NoReturn:
    raise SnapshotFormatError(f"{source} {what}", expected=EXPECTED, do=do) from None


class _Reader:
    """Checks the type and the range of everything before it is used.

    A pickle can name one list many times, and so say more in all than its file could hold; ``left`` bounds that.
    """

    def __init__(self, source: str, left: int) -> None:
        self.source = source
        self.left = left
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self.seen_stacks: dict[int, int] = {}
        self.seen_frames: dict[int, Frame] = {}
        self.unknown: dict[str, int] = {}

    def read(self, data: Any, gpu: int | None) -> Snapshot:
        if isinstance(data, list):
            self.fail("holds a list, not a snapshot (torch.cuda.memory_snapshot() returns one, without the history)")
        if isinstance(data, Mapping) and str(data.get("format")).startswith("memplan."):
            self.fail(f"holds a {shown(str(data['format']))[:40]}, which memplan report and memplan compare read")
        if not isinstance(data, Mapping) or "segments" not in data:
            self.fail("holds no snapshot: there are no segments in it")
        made_by = data.get("memplan")
        if isinstance(made_by, Mapping) and made_by.get("device") == "cpu":
            raise SnapshotFormatError(
                f"{self.source} was written from a step on the CPU, which has no caching allocator",
                expected="a snapshot of a CUDA device",
                do="Open it in torch's memory_viz, or record the step for a card",
            )
        segments = self.items(data["segments"], "segments")
        raw_traces = data.get("device_traces")
        traces = [] if raw_traces is None else self.items(raw_traces, "device_traces")
        chosen = self.choose(segments, traces, gpu)
        block_stacks: dict[int, int] = {}
        held = [self.segment(raw, block_stacks) for raw in segments if raw.get("device", 0) == chosen]
        held.sort(key=lambda segment: segment.address)
        for one, other in pairwise(held):
            if one.address + one.size > other.address:
                self.fail(f"has segments that overlap, at {other.address:#x}")
        trace = self.items(traces[chosen], f"device_traces[{chosen}]") if chosen < len(traces) else []
        entries = [entry for raw in trace if (entry := self.entry(raw)) is not None]
        if sum(segment.size for segment in held) + sum(entry.size for entry in entries) > MOST_BYTES:
            self.fail(f"is damaged: its segments and events are of more than {MOST_BYTES} bytes")
        settings = settings_of_snapshot(self.settings(data.get("allocator_settings")))
        return Snapshot(
            self.source, chosen, tuple(held), tuple(entries), settings, tuple(self.stacks), block_stacks, self.notes()
        )

    def fail(self, what: str) -> NoReturn:
        _refuse(self.source, what, DO)

    def notes(self) -> tuple[str, ...]:
        return tuple(f"{count} events {shown(name)!r} were left out: unknown" for name, count in self.unknown.items())

    def items(self, value: Any, name: str) -> list[Any]:
        """Return a list, or a tuple as one; what is in it counts."""
        if not isinstance(value, (list, tuple)):
            self.fail(f"is damaged: {name} is {_kind(value)}, not a list")
        self.left -= len(value)
        if self.left < 0:
            self.fail("is damaged: it lists more than it has room for")
        return value if isinstance(value, list) else list(value)

    def number(self, row: Mapping[str, Any], name: str, least: int = 0, default: int | None = None) -> int:
        value = row.get(name, default)
        if type(value) is not int or not least <= value < _LARGEST:
            self.fail(f"is damaged: {name} is {_kind(value)}, not a number of {least} to 2**63")
        return value

    def stream(self, row: Mapping[str, Any]) -> int:
        value = row.get("stream", 0)
        if type(value) is not int or not -_LARGEST <= value < 2 * _LARGEST:
            self.fail(f"is damaged: stream is {_kind(value)}, not a number of 64 bits")
        return value

    def pool(self, value: Any) -> Pool:
        if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(part) is not int for part in value):
            self.fail(f"is damaged: the id of a pool is {_kind(value)}, not two numbers")
        if not all(0 <= part < 2 * _LARGEST for part in value):
            self.fail("is damaged: the id of a pool is out of range")
        return value[0], value[1]

    def choose(self, segments: Sequence[Any], traces: Sequence[Any], gpu: int | None) -> int:
        """Return the GPU to read: the one asked for, or the only one that has anything."""
        found: set[int] = set()
        for raw in segments:
            if not isinstance(raw, Mapping):
                self.fail(f"is damaged: a segment is {_kind(raw)}, not a dict")
            found.add(self.number(raw, "device", default=0))
        for device, trace in enumerate(traces):
            if any(
                isinstance(raw, Mapping) and raw.get("action") != "snapshot" for raw in self.items(trace, "a trace")
            ):
                found.add(device)
        if len(traces) > _DEVICES or max(found, default=0) >= _DEVICES:
            self.fail(f"is damaged: it is of more than {_DEVICES} GPUs")
        named = ", ".join(map(str, sorted(found)))
        if gpu is None and len(found) > 1:
            raise DeviceError(
                f"{self.source} holds the memory of GPUs {named}",
                expected="one of them",
                do="Choose it with gpu (--gpu)",
            )
        if gpu is not None and gpu not in found and found:
            raise DeviceError(
                f"{self.source} holds nothing of GPU {gpu}",
                expected=f"one of {named}" if len(found) > 1 else f"GPU {named}",
                do="Choose that with gpu (--gpu)",
            )
        return gpu if gpu is not None else min(found, default=0)

    def segment(self, row: Mapping[str, Any], block_stacks: dict[int, int]) -> Segment:
        start = self.number(row, "address", 1)
        size = self.number(row, "total_size", 1)
        blocks: list[Block] = []
        at = start
        for raw in self.items(row.get("blocks"), "blocks"):
            block, stack = self.block(raw, at)
            blocks.append(block)
            if stack and block.requested:
                block_stacks[at] = stack
            at += block.size
        if at != start + size:
            self.fail(f"is damaged: the blocks of the segment at {start:#x} hold {at - start} bytes, not {size}")
        kind = row.get("segment_type")
        if kind not in ("large", "small", None):
            self.fail(f"is damaged: segment_type is {_kind(kind)}, not large or small")
        small = kind == "small" if kind else size == 2 << 20
        pool = self.pool(row.get("segment_pool_id", DEFAULT_POOL))
        return Segment(start, size, self.stream(row), small, pool, row.get("is_expandable") is True, tuple(blocks))

    def block(self, row: Any, address: int) -> tuple[Block, int]:
        """Return a block and the index of its stack. Old versions kept both in a list of what the block had held."""
        if not isinstance(row, Mapping):
            self.fail(f"is damaged: a block is {_kind(row)}, not a dict")
        size = self.number(row, "size", 1)
        if row.get("address", address) != address:
            self.fail(f"is damaged: a block stands at {_kind(row['address'])}, not at {address:#x} behind the last one")
        state = row.get("state")
        if not isinstance(state, str) or state not in _STATES:
            self.fail(f"is damaged: the state of a block is {_kind(state)}, not one of {', '.join(_STATES)}")
        if state == "inactive":  # what it held before does not count
            return Block(address, size, 0, "inactive"), 0
        past = row.get("history")
        last = past[0] if isinstance(past, list) and past and isinstance(past[0], Mapping) else {}
        requested = self.number(row if "requested_size" in row else {"requested_size": last.get("real_size", size)},
                                "requested_size")  # fmt: skip
        if requested > size:
            self.fail(f"is damaged: the block at {address:#x} has {size} bytes for a request of {requested}")
        stack = self.stack(row.get("frames", last.get("frames")))
        return Block(address, size, requested or size, _STATES[state]), stack

    def entry(self, row: Any) -> Entry | None:
        """Return one thing that the allocator did; None for what changes nothing."""
        if not isinstance(row, Mapping):
            self.fail(f"is damaged: an event is {_kind(row)}, not a dict")
        name = row.get("action")
        if not isinstance(name, str):
            self.fail(f"is damaged: an action is {_kind(name)}, not a text")
        action = _ACTIONS.get(name)
        if action is None:
            if name != "snapshot":
                self.unknown[name] = self.unknown.get(name, 0) + 1
            return None
        if action == "oom":
            address = self.number(row, "device_free", default=-1, least=-1)
        else:
            address = self.number(row, "addr", 1)
        pool = row.get("pool_id")
        return Entry(
            action,
            address,
            self.number(row, "size", 0 if action == "oom" else 1),
            self.stream(row),
            None if pool is None else self.pool(pool),
            self.stack(row.get("frames")),
        )

    def stack(self, raw: Any) -> int:
        """Return the index of a stack; one that was met before, by identity or by what it says, is not stored again."""
        if not raw:
            return 0
        found = self.seen_stacks.get(id(raw))
        if found is None:
            frames = tuple(self.frame(frame) for frame in self.items(raw, "frames"))
            found = self.seen_stacks[id(raw)] = self.stacks.setdefault(frames, len(self.stacks))
        return found

    def frame(self, raw: Any) -> Frame:
        found = self.seen_frames.get(id(raw))
        if found is None:
            if not isinstance(raw, Mapping):
                self.fail(f"is damaged: a frame is {_kind(raw)}, not a dict")
            filename, name, line = raw.get("filename", ""), raw.get("name", ""), raw.get("line", 0)
            if not isinstance(filename, str) or not isinstance(name, str) or type(line) is not int:
                self.fail("is damaged: a frame has no file, line and name")
            found = self.seen_frames[id(raw)] = Frame(filename, line if abs(line) < 1 << 31 else 0, name)
        return found

    def settings(self, raw: Any) -> dict[str, Any]:
        """Return the recorded settings, of which only texts, numbers and tables of numbers are let through."""
        if raw is None:
            return {}
        if not isinstance(raw, Mapping):
            self.fail(f"is damaged: allocator_settings is {_kind(raw)}, not a dict")
        for name, value in raw.items():
            table = value.values() if isinstance(value, Mapping) else ()
            plain = isinstance(value, str) or _is_number(value) or isinstance(value, Mapping)
            if not isinstance(name, str) or not plain or not all(_is_number(part) for part in table):
                self.fail(f"is damaged: allocator setting {shown(str(name))} is {_kind(value)}")
        return dict(raw)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) < 2 * _LARGEST)


def _kind(value: object) -> str:
    """Return a value as an error may show it."""
    if isinstance(value, str):
        return repr(shown(value, 40))
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2 * _LARGEST):
        return str(value)
    return "missing" if value is None else f"of type {type(value).__name__}"
