"""Read a snapshot of torch's CUDA memory from a pickle, JSON or a dict, and validate everything in it.

The format is that of `torch.cuda.memory._snapshot()`: the caching allocator's segments and blocks, its last events on
each GPU, and its settings. Versions of torch differ in the keys they write; a missing key gets the value that was
implied before torch wrote it.
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
from memplan.simulation.allocator.rounding import SMALL_SEGMENT
from memplan.simulation.allocator.settings import AllocatorSettings, settings_of_snapshot
from memplan.simulation.snapshots.safe_pickle import DO, EXPECTED, load_plain, shown
from memplan.simulation.timeline import DEFAULT_POOL, Action, Block, BlockState, Pool, Segment

LARGEST_FILE = 2 << 30
"""Bytes, compressed or not. Larger files are refused."""
_MAX_GZIP_RATIO = 200  # JSON of 20,000 events packs 25 times, stacks pack better; deflate reaches 1032 with zeros alone
_ALWAYS_UNPACKED = 64 << 20
_MAX_NUMBER = 1 << 63
_MAX_GPUS = 1024

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
    """A frame of a stack. The text is untrusted: pass it through `safe_pickle.shown` before printing."""

    filename: str
    line: int
    name: str


class Entry(NamedTuple):
    """A recorded event of the allocator. ``size`` is the requested bytes of a block, or the bytes of a segment."""

    action: Action
    address: int
    """For "oom": the free bytes of the card, -1 if not recorded."""
    size: int
    stream: int
    pool: Pool | None
    """None if this version of torch did not record it."""
    stack: int
    """Index into `Snapshot.stacks`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a GPU's caching allocator, and its last events before."""

    source: str
    """The name of the file, for messages."""
    gpu: int
    segments: tuple[Segment, ...]
    """In order of address."""
    entries: tuple[Entry, ...]
    """In order of time; () if no history was recorded."""
    settings: AllocatorSettings
    stacks: tuple[tuple[Frame, ...], ...]
    """The distinct stacks; the first is empty."""
    block_stacks: Mapping[int, int]
    """Address of a live block -> index of its allocation stack, if recorded."""
    notes: tuple[str, ...] = ()


def read_snapshot(what: str | os.PathLike[str] | Mapping[str, Any], gpu: int | None = None) -> Snapshot:
    """Read a snapshot from a file (pickle or JSON, each also as .gz) or a dict.

    Args:
        what: a path, or the dict of ``torch.cuda.memory._snapshot()``.
        gpu: the GPU to read; needed if the snapshot has more than one.

    Raises:
        TargetError: the file cannot be read.
        SnapshotFormatError: it is no snapshot, damaged, or a pickle with more than plain data in it.
        DeviceError: the snapshot has nothing of ``gpu``, or several GPUs and ``gpu`` is None.
    """
    if isinstance(what, Mapping):
        return _Reader("the snapshot", 1 << 40).read(what, gpu)  # no limit: it is in memory already
    if not isinstance(what, (str, os.PathLike)):
        raise SnapshotFormatError(f"a {type(what).__name__}", expected="a path, or a dict: " + EXPECTED)
    source = shown(str(what))
    content = _read_file(Path(what), source)
    data = _gunzip(content, source) if content.startswith(b"\x1f\x8b") else content
    return _Reader(source, len(data)).read(_parse(data, source, len(content)), gpu)


def _read_file(path: Path, source: str) -> bytes:
    """Return the content of a file or pipe; refuse folders, devices and files of more than `LARGEST_FILE` bytes."""
    try:
        status = os.stat(path)
        is_file = stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)
        data = b""
        if is_file and status.st_size <= LARGEST_FILE:
            with open(path, "rb") as file:
                data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise TargetError(
            f"{source} cannot be read ({reason})", expected="the file of a snapshot", do="Check the path"
        ) from None
    if not is_file:
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise TargetError(f"{source} is {kind}", expected="the file of a snapshot", do="Check the path")
    if max(status.st_size, len(data)) > LARGEST_FILE:
        _refuse(source, f"is larger than {LARGEST_FILE >> 30} GiB", "Record fewer events (max_entries)")
    return data


def _gunzip(data: bytes, source: str) -> bytes:
    """Unpack a gzip file; one that expands far more than any snapshot does is refused."""
    limit = min(LARGEST_FILE, max(_ALWAYS_UNPACKED, _MAX_GZIP_RATIO * len(data)))
    parts: list[bytes] = []
    size = 0
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while part := file.read(1 << 20):
                parts.append(part)
                size += len(part)
                if size > limit:
                    _refuse(source, f"unpacks to more than {limit >> 20} MiB", "Unpack it yourself if you trust it")
    except (OSError, EOFError, zlib.error) as error:
        _refuse(source, f"is a damaged gzip file ({shown(str(error))})", DO)
    return b"".join(parts)


def _parse(data: bytes, source: str, packed: int) -> Any:
    """Return the plain data in a pickle or JSON; ``packed`` is the size of the file, which may be compressed."""
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
    """Raise the error of a file (``source``) that is no snapshot; ``what`` completes the sentence that it begins."""
    raise SnapshotFormatError(f"{source} {what}", expected=EXPECTED, do=do) from None


class _Reader:
    """Checks the type and the range of each value before it is used.

    Args:
        source: the name of the snapshot in messages.
        item_budget: how many list items may be read in all. A pickle can refer to the same list many times and so
            expand to far more items than its file has bytes.
    """

    def __init__(self, source: str, item_budget: int) -> None:
        """``source``: the snapshot's name in messages; ``item_budget``: how many list items may be read in all."""
        self.source = source
        self.item_budget = item_budget
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}
        """Distinct stacks -> index, in order."""
        self.stack_by_id: dict[int, int] = {}
        """id() of a raw stack -> index."""
        self.frame_by_id: dict[int, Frame] = {}
        """id() of a raw frame -> the frame."""
        self.unknown: dict[str, int] = {}
        """Name of an unknown action -> how many events."""

    def read(self, data: Any, gpu: int | None) -> Snapshot:
        """Return the snapshot of one GPU in untrusted data."""
        fields = self.fields(data)
        segments = self.items(fields["segments"], "segments")
        traces = fields.get("device_traces")
        traces = [] if traces is None else self.items(traces, "device_traces")
        chosen = self.choose_gpu(segments, traces, gpu)
        block_stacks: dict[int, int] = {}
        checked = [self.segment(raw, block_stacks) for raw in segments if raw.get("device", 0) == chosen]
        checked.sort(key=lambda segment: segment.address)
        for segment, following in pairwise(checked):
            if segment.address + segment.size > following.address:
                self.fail(f"has segments that overlap, at {following.address:#x}")
        trace = self.items(traces[chosen], f"device_traces[{chosen}]") if chosen < len(traces) else []
        entries = [entry for entry in map(self.entry, trace) if entry is not None]
        if sum(segment.size for segment in checked) + sum(entry.size for entry in entries) > MOST_BYTES:
            self.fail(f"is damaged: its segments and events are of more than {MOST_BYTES} bytes")
        settings = settings_of_snapshot(self.settings(fields.get("allocator_settings")))
        return Snapshot(
            self.source,
            chosen,
            segments=tuple(checked),
            entries=tuple(entries),
            settings=settings,
            stacks=tuple(self.stacks),
            block_stacks=block_stacks,
            notes=self.notes(),
        )

    def fields(self, data: Any) -> Mapping[str, Any]:
        """Return the dict of a snapshot; refuse other data, and what memplan wrote from a step on the CPU."""
        if isinstance(data, list):
            self.fail("holds a list, not a snapshot (torch.cuda.memory_snapshot() returns one, without the history)")
        if isinstance(data, Mapping) and str(data.get("format")).startswith("memplan."):
            self.fail(f"holds a {shown(str(data['format']))[:40]}, which memplan report and memplan compare read")
        if not isinstance(data, Mapping) or "segments" not in data:
            self.fail("holds no snapshot: there are no segments in it")
        memplan = data.get("memplan")
        if isinstance(memplan, Mapping) and memplan.get("device") == "cpu":
            raise SnapshotFormatError(
                f"{self.source} was written from a step on the CPU, which has no caching allocator",
                expected="a snapshot of a CUDA device",
                do="Open it in torch's memory_viz, or record the step for a card",
            )
        return data

    def fail(self, what: str) -> NoReturn:
        _refuse(self.source, what, DO)

    def notes(self) -> tuple[str, ...]:
        return tuple(f"{count} events {shown(name)!r} were left out: unknown" for name, count in self.unknown.items())

    def items(self, value: Any, name: str) -> list[Any]:
        """Return ``value`` as a list if it is a list or tuple. Its items count against the budget."""
        if not isinstance(value, (list, tuple)):
            self.fail(f"is damaged: {name} is {_repr(value)}, not a list")
        self.item_budget -= len(value)
        if self.item_budget < 0:
            self.fail("is damaged: it lists more than it has room for")
        return value if isinstance(value, list) else list(value)

    def number(self, row: Mapping[str, Any], name: str, minimum: int = 0, default: int | None = None) -> int:
        """Return the whole number of this name in a dict of the snapshot; anything else, or a number out of range, is
        refused."""
        value = row.get(name, default)
        if type(value) is not int or not minimum <= value < _MAX_NUMBER:
            self.fail(f"is damaged: {name} is {_repr(value)}, not a number of {minimum} to 2**63")
        return value

    def stream(self, row: Mapping[str, Any]) -> int:
        """Return the stream of an event or segment: an address, as a number of 64 bits with or without sign."""
        value = row.get("stream", 0)
        if type(value) is not int or not -_MAX_NUMBER <= value < 2 * _MAX_NUMBER:
            self.fail(f"is damaged: stream is {_repr(value)}, not a number of 64 bits")
        return value

    def pool(self, value: Any) -> Pool:
        """Return the id of a memory pool: two unsigned numbers of 64 bits."""
        if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(part) is not int for part in value):
            self.fail(f"is damaged: the id of a pool is {_repr(value)}, not two numbers")
        if not all(0 <= part < 2 * _MAX_NUMBER for part in value):
            self.fail("is damaged: the id of a pool is out of range")
        return value[0], value[1]

    def choose_gpu(self, segments: Sequence[Any], traces: Sequence[Any], gpu: int | None) -> int:
        """Return ``gpu``, or the only GPU that has segments or events; 0 if none has any."""
        gpus: set[int] = set()
        for raw in segments:
            if not isinstance(raw, Mapping):
                self.fail(f"is damaged: a segment is {_repr(raw)}, not a dict")
            gpus.add(self.number(raw, "device", default=0))
        for device, trace in enumerate(traces):
            events = [raw for raw in self.items(trace, "a trace") if isinstance(raw, Mapping)]
            if any(event.get("action") != "snapshot" for event in events):  # which does not change the allocator
                gpus.add(device)
        if len(traces) > _MAX_GPUS or max(gpus, default=0) >= _MAX_GPUS:
            self.fail(f"is damaged: it is of more than {_MAX_GPUS} GPUs")
        listed = ", ".join(map(str, sorted(gpus)))
        if gpu is None and len(gpus) > 1:
            raise DeviceError(
                f"{self.source} holds the memory of GPUs {listed}",
                expected="one of them",
                do="Choose it with gpu (--gpu)",
            )
        if gpu is not None and gpu not in gpus and gpus:
            raise DeviceError(
                f"{self.source} holds nothing of GPU {gpu}",
                expected=f"one of {listed}" if len(gpus) > 1 else f"GPU {listed}",
                do="Choose that with gpu (--gpu)",
            )
        return gpu if gpu is not None else min(gpus, default=0)

    def segment(self, row: Mapping[str, Any], block_stacks: dict[int, int]) -> Segment:
        """Return a segment of the snapshot (``row``) with its blocks, and add the stacks of its live blocks to
        ``block_stacks``: address -> index in ``stacks``."""
        start = self.number(row, "address", minimum=1)
        size = self.number(row, "total_size", minimum=1)
        blocks: list[Block] = []
        end = start
        for raw in self.items(row.get("blocks"), "blocks"):
            block, stack = self.block(raw, end)
            blocks.append(block)
            if stack and block.requested:
                block_stacks[block.address] = stack
            end += block.size
        if end != start + size:
            self.fail(f"is damaged: the blocks of the segment at {start:#x} hold {end - start} bytes, not {size}")
        kind = row.get("segment_type")
        if kind not in ("large", "small", None):
            self.fail(f"is damaged: segment_type is {_repr(kind)}, not large or small")
        small = kind == "small" if kind else size == SMALL_SEGMENT
        pool = self.pool(row.get("segment_pool_id", DEFAULT_POOL))
        return Segment(start, size, self.stream(row), small, pool, row.get("is_expandable") is True, tuple(blocks))

    def block(self, row: Any, address: int) -> tuple[Block, int]:
        """Return a block and the index of its stack in ``stacks``. ``address``: the end of the block before it.

        Old versions of torch wrote requested size and stack into a "history" of the block.
        """
        if not isinstance(row, Mapping):
            self.fail(f"is damaged: a block is {_repr(row)}, not a dict")
        size = self.number(row, "size", minimum=1)
        if row.get("address", address) != address:
            self.fail(f"is damaged: a block stands at {_repr(row['address'])}, not at {address:#x} behind the last one")
        state = row.get("state")
        if not isinstance(state, str) or state not in _STATES:
            self.fail(f"is damaged: the state of a block is {_repr(state)}, not one of {', '.join(_STATES)}")
        if state == "inactive":  # its size and stack are of an earlier request
            return Block(address, size, requested=0, state="inactive"), 0
        history = row.get("history")
        last = history[0] if isinstance(history, list) and history and isinstance(history[0], Mapping) else {}
        if "requested_size" not in row:
            row = {**row, "requested_size": last.get("real_size", size)}
        requested = self.number(row, "requested_size")
        if requested > size:
            self.fail(f"is damaged: the block at {address:#x} has {size} bytes for a request of {requested}")
        stack = self.stack(row.get("frames", last.get("frames")))
        return Block(address, size, requested or size, _STATES[state]), stack

    def entry(self, row: Any) -> Entry | None:
        """Return an event, or None for an action that does not change the allocator or is unknown."""
        if not isinstance(row, Mapping):
            self.fail(f"is damaged: an event is {_repr(row)}, not a dict")
        name = row.get("action")
        if not isinstance(name, str):
            self.fail(f"is damaged: an action is {_repr(name)}, not a text")
        action = _ACTIONS.get(name)
        if action is None:
            if name != "snapshot":
                self.unknown[name] = self.unknown.get(name, 0) + 1
            return None
        if action == "oom":
            address = self.number(row, "device_free", default=-1, minimum=-1)
        else:
            address = self.number(row, "addr", minimum=1)
        pool = row.get("pool_id")
        return Entry(
            action,
            address,
            self.number(row, "size", minimum=0 if action == "oom" else 1),
            self.stream(row),
            None if pool is None else self.pool(pool),
            self.stack(row.get("frames")),
        )

    def stack(self, raw: Any) -> int:
        """Return the index of a stack in ``stacks``, adding it if it is new."""
        if not raw:
            return 0
        index = self.stack_by_id.get(id(raw))
        if index is None:
            frames = tuple(self.frame(frame) for frame in self.items(raw, "frames"))
            index = self.stack_by_id[id(raw)] = self.stacks.setdefault(frames, len(self.stacks))
        return index

    def frame(self, raw: Any) -> Frame:
        """Return a frame of a stack. Snapshots refer to the same dict again and again: each is checked once."""
        frame = self.frame_by_id.get(id(raw))
        if frame is None:
            if not isinstance(raw, Mapping):
                self.fail(f"is damaged: a frame is {_repr(raw)}, not a dict")
            filename, name, line = raw.get("filename", ""), raw.get("name", ""), raw.get("line", 0)
            if not isinstance(filename, str) or not isinstance(name, str) or type(line) is not int:
                self.fail("is damaged: a frame has no file, line and name")
            frame = self.frame_by_id[id(raw)] = Frame(filename, line if abs(line) < 1 << 31 else 0, name)
        return frame

    def settings(self, raw: Any) -> dict[str, Any]:
        """Return the recorded settings; only strings, numbers and tables of numbers are accepted."""
        if raw is None:
            return {}
        if not isinstance(raw, Mapping):
            self.fail(f"is damaged: allocator_settings is {_repr(raw)}, not a dict")
        for name, value in raw.items():
            if isinstance(value, Mapping):
                is_plain = all(map(_is_number, value.values()))
            else:
                is_plain = isinstance(value, str) or _is_number(value)
            if not isinstance(name, str) or not is_plain:
                self.fail(f"is damaged: allocator setting {shown(str(name))} is {_repr(value)}")
        return dict(raw)


def _is_number(value: object) -> bool:
    """Return whether a setting's value is a finite number, of at most 64 bits, or None."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) < 2 * _MAX_NUMBER)


def _repr(value: object) -> str:
    """Return a value for a message: strings and numbers as they are, of others the type."""
    if isinstance(value, str):
        return repr(shown(value, 40))
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2 * _MAX_NUMBER):
        return str(value)
    return "missing" if value is None else f"of type {type(value).__name__}"
