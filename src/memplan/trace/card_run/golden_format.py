"""The format of golden files, without torch or a GPU: events, segments, keys of ops, and the bytes of the file.

A file is one gzipped JSON object, the same bytes for the same content. It starts with `FORMAT` (or `DRY_FORMAT`) and
`VERSION`; tools/gpu/README.md lists the fields. `benchmarks/cuda_accuracy.py` reads it without sharing code with this
module.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memplan._bytes import ALLOCATOR_BLOCK

FORMAT, VERSION = "memplan-golden", 1
DRY_FORMAT = "memplan-dry-golden"
"""Files of an emulated card, so that they do not pass for those of a real one."""
UNIT = ALLOCATOR_BLOCK
"""Unit of addresses in bytes: torch's caching allocator splits blocks in multiples of it."""
LIMIT = 10_000_000
"""Bytes that a folder of golden files may hold."""

CODES = {
    "alloc": "a",
    "free_requested": "r",
    "free_completed": "c",
    "segment_alloc": "s",
    "segment_free": "d",
    "segment_map": "m",
    "segment_unmap": "u",
    "oom": "o",
}
"""torch's action -> its letter; ``f`` stands for a requested free and its completion as the next event."""

DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b1", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
_LISTED = 8


class Numbers:
    """Gives streams or pools numbers in order of appearance; 0 is the default stream or pool."""

    def __init__(self, default: Any) -> None:
        """``default``: torch's id of the default stream or pool, which is number 0."""
        self.known: dict[Any, int] = {default: 0}
        """By id of torch: the number."""

    def of(self, value: Any) -> int:
        """Return the number of a stream or pool."""
        return self.known.setdefault(value, len(self.known))


def compact(snapshot: Mapping[str, Any], gpu: int = 0) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return the history and final segments of a GPU from torch's snapshot, as columns of small numbers.

    Events: ``actions`` has a letter per event, ``places`` a number: for a free, the age of its block in allocations (1:
    the last allocation); for ``o`` the free bytes of the card; else the address, relative to the lowest, in units of
    ``unit`` bytes. ``sizes`` has the requested bytes of each event other than such a free. A free of a block whose
    allocation is not among the events, or had another size, is ``R`` or ``C``, with address and size. ``streams`` and
    ``pools`` have a number per event, or are None if all events are on the default stream and in the default pool.
    ``pool_ids`` are torch's ids of the pools.

    Segments, in order of address: [place, size, stream, small, pool, expandable, blocks] each; a block is
    [size, requested, state], the state 0 for free, 1 for live, 2 for freed and waiting for a stream.
    """
    traces = snapshot["device_traces"]
    rows = [row for row in (traces[gpu] if gpu < len(traces) else ()) if row["action"] in CODES]
    segments = [segment for segment in snapshot["segments"] if segment.get("device", 0) == gpu]
    base, unit = _origin(rows, segments)
    streams, pools = Numbers(default=0), Numbers((0, 0))
    actions, places, sizes = list[str](), list[int](), list[int]()
    stream_numbers, pool_numbers = list[int](), list[int]()
    for letter, row, place in _letters_of_events(rows):
        if place is None:
            place = row.get("device_free", -1) if letter == "o" else (row["addr"] - base) // unit
            sizes.append(row["size"])
        actions.append(letter)
        places.append(place)
        stream_numbers.append(streams.of(row.get("stream", 0)))
        pool_numbers.append(pools.of(tuple(row.get("pool_id", (0, 0)))))
    segment_rows = [
        [
            (segment["address"] - base) // unit, segment["total_size"], streams.of(segment.get("stream", 0)),
            segment.get("segment_type") == "small", pools.of(tuple(segment.get("segment_pool_id", (0, 0)))),
            bool(segment.get("is_expandable")), [_block(block) for block in segment["blocks"]],
        ]
        for segment in segments
    ]  # fmt: skip
    events = {
        "unit": unit, "actions": "".join(actions), "places": places, "sizes": sizes,
        "streams": stream_numbers if any(stream_numbers) else None,
        "pools": pool_numbers if any(pool_numbers) else None,
        "pool_ids": [list(pool) for pool in pools.known],
    }  # fmt: skip
    return events, sorted(segment_rows, key=lambda row: row[0])


def _block(block: Mapping[str, Any]) -> list[int]:
    """Return [size, requested bytes, state] of a block; the requested bytes of a free block are 0."""
    state = {"inactive": 0, "active_allocated": 1}.get(block["state"], 2)
    return [block["size"], block.get("requested_size", block["size"]) if state else 0, state]


def _origin(rows: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the lowest address, and the largest unit (`UNIT` or 1) of which all offsets from it are multiples."""
    addresses = [row["addr"] for row in rows if row["action"] != "oom"] + [segment["address"] for segment in segments]
    base = min(addresses, default=0)
    return base, UNIT if all((address - base) % UNIT == 0 for address in addresses) else 1


def _letters_of_events(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any], int | None]]:
    """Yield (letter, event, age) for each event of torch's snapshot (``rows``). Letters are those of `CODES`.

    A requested free whose completion is the next event is a single event ``f``. For the free of a block whose
    allocation, of the same size, is among the events, ``age`` is the number of allocations since (1: the last one).

    Any other event has no age (None), and is saved with address and size. A free without an age has its letter in upper
    case, ``R`` or ``C``; instead of an ``f`` there are both.
    """
    count = 0
    live: dict[int, tuple[int, int]] = {}  # address of a block -> (number of its allocation, bytes)
    skip = False  # whether the event is the completion of the free before it, which was yielded with that free
    for index, row in enumerate(rows):
        if skip:
            skip = False
            continue
        letter = CODES[row["action"]]
        if letter == "a":
            live[row["addr"]] = count, row["size"]
            count += 1
        elif letter in "rc":
            number, size = live.get(row["addr"], (0, -1))
            following = rows[index + 1] if index + 1 < len(rows) else {}
            skip = letter == "r" and following.get("action") == "free_completed" and _same_block(row, following)
            if letter == "c" or skip:
                live.pop(row["addr"], None)
            if size == row["size"]:
                yield "f" if skip else letter, row, count - number
            else:
                yield letter.upper(), row, None
                if skip:
                    yield "C", following, None
            continue
        yield letter, row, None


def _same_block(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row.get(key) == other.get(key) for key in ("addr", "size", "stream", "pool_id"))


def plain(value: Any) -> Any:
    """Return settings as JSON values: strings, numbers, booleans and objects of these; None for anything else."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    return value if isinstance(value, (str, int, float, bool)) else None


def op_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of an op as text, which is equal for calls that need the same memory.

    Example:
        >>> op_key((torch.zeros(2, 3), [1, 1], None), {"groups": 1})
        'f32[2,3] [1,1] - groups=1'
    """
    parts = [_value_text(value) for value in args]
    return " ".join(parts + [f"{name}={_value_text(value)}" for name, value in sorted(kwargs.items())])


def _value_text(value: Any) -> str:
    """Return an argument of an op as text without spaces: a tensor's dtype and shape, a list, or a plain value."""
    if hasattr(value, "dtype") and hasattr(value, "stride"):
        return _tensor_text(value)
    if isinstance(value, (list, tuple)):
        if len(value) > _LISTED:
            return f"({len(value)} of them, first {_value_text(value[0])})"
        return f"[{','.join(_value_text(part) for part in value)}]"
    if value is None:
        return "-"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    return str(value).replace(" ", "")


def _tensor_text(tensor: Any) -> str:
    """Return a tensor's dtype and shape as text, with its strides if it is not contiguous."""
    name = str(tensor.dtype).removeprefix("torch.")
    text = f"{DTYPES.get(name, name)}[{','.join(map(str, tensor.shape))}]"
    if str(tensor.layout) != "torch.strided":
        return f"{text}/{str(tensor.layout).removeprefix('torch.')}"
    if not tensor.is_contiguous():
        text += f"/{','.join(map(str, tensor.stride()))}"
    return text


def packed(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a golden file: gzipped JSON, always the same for the same content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as file:
        file.write(text.encode())
    return buffer.getvalue()


def write(path: Path, content: Mapping[str, Any]) -> int:
    """Write the content of a golden file as `packed`, atomically, and return the size of the file in bytes."""
    data = packed(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)
    return len(data)


def shrink(folder: Path, limit: int = LIMIT) -> list[str]:
    """Remove the events of the largest files of a folder until all files together have at most ``limit`` bytes.

    Returns the names of the files whose events were removed.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*.json.gz")}
    shrunk: list[str] = []
    for path in sorted(sizes, key=lambda path: (-sizes[path], path.name)):
        if sum(sizes.values()) <= limit:
            break
        content = json.loads(gzip.decompress(path.read_bytes()))
        if content.get("events") is None:
            continue
        content["events"], content["segments"] = None, []
        content["notes"] = [*content["notes"], f"events left out: with them the set has over {limit} bytes"]
        sizes[path] = write(path, content)
        shrunk.append(path.name)
    return shrunk


def slug(text: str) -> str:
    """Return ``text`` in characters that are safe in file names: lower case, other characters as ``-``."""
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in text.lower()).strip("-")
