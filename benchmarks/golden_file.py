"""Read a golden file: what torch's CUDA allocator really did in one step. Shares no code with what writes it.

`tools/gpu/README.md` lists the fields. Nothing is believed before it is checked, and a file holds nothing but numbers
and texts: one that passes can be replayed and compared.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

FORMAT, VERSION = "memplan-golden", 1
DRY_FORMAT = "memplan-dry-golden"
"""Of a file that torch wrote on an emulated card."""
DRY_FOLDER = "dry"
"""Folder of `goldens/` that has these, and no others."""
FIRST_ADDRESS = 0x7F00_0000_0000
LARGEST = 256 << 20
"""Bytes, unpacked, beyond which a file is not read."""

_FREES = {"f": ("free_requested", "free_completed"), "r": ("free_requested",), "c": ("free_completed",)}
_PLACED = {
    "a": "alloc", "s": "segment_alloc", "d": "segment_free", "m": "segment_map", "u": "segment_unmap", "o": "oom",
    "R": "free_requested", "C": "free_completed",
}  # fmt: skip
_STATES = ("inactive", "active_allocated", "active_pending_free")


class GoldenError(ValueError):
    """A file that is no golden file, a damaged one, or one of another version."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most of some time, in bytes: in blocks, and held from the card."""

    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the calls of one op with one key took beyond their results, in bytes."""

    op: str
    key: str
    most: int
    least: int
    kept: int
    """Of all calls together, what was still held afterwards."""
    count: int
    results: tuple[int, ...]
    """Bytes of each new storage that the first call returned."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One step as measured on a card. Bytes throughout."""

    path: Path
    name: str
    set: str
    gpu: str
    capability: tuple[int, int]
    torch: str
    versions: dict[str, str | int | None]
    environment: dict[str, str]
    build: Peak
    steps: tuple[Peak, ...]
    context: int | None
    """What CUDA held beside the allocator, where that was measured."""
    settings: dict[str, Any]
    events: dict[str, Any] | None
    segments: tuple[tuple[Any, ...], ...]
    workspaces: tuple[Workspace, ...] | None
    calls: dict[str, tuple[int, ...]] | None
    """Of an op: which of the workspaces each call was, in order of time."""
    notes: tuple[str, ...]
    dry: bool = False
    """Whether the card was an emulated one."""
    assumed: tuple[str, ...] = ()
    """What a real card would have computed or chosen, and was assumed; of an emulated card alone."""

    @property
    def peak(self) -> Peak:
        """The most over building and all steps."""
        peaks = (self.build, *self.steps)
        return Peak(max(peak.allocated for peak in peaks), max(peak.reserved for peak in peaks))

    def snapshot(self) -> dict[str, Any]:
        """The events and segments as `torch.cuda.memory._snapshot()` gives them, at addresses of our own.

        Raises:
            GoldenError: the file has no events.
        """
        if self.events is None:
            raise GoldenError(f"{self.path.name} has no events: {'; '.join(self.notes) or 'it does not say why'}")
        unit, pools = self.events["unit"], self.events["pool_ids"]
        segments = [_segment(row, unit, pools) for row in self.segments]
        return {
            "segments": segments,
            "device_traces": [list(_entries(self.events))],
            "allocator_settings": self.settings,
        }


def find(root: Path) -> list[Path]:
    """All golden files below a folder, in order of their names: of `goldens/` those of real cards alone."""
    return sorted(path for path in root.rglob("*.json.gz") if DRY_FOLDER not in path.relative_to(root).parts)


def read(path: Path) -> Golden:
    """Read a golden file.

    Raises:
        GoldenError: it cannot be read, is damaged, or is of another version.
    """
    return _Reader(path, _parsed(path)).golden()


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise GoldenError(f"{path.name} unpacks to more than {LARGEST >> 20} MiB")
        content = json.loads(data)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        if isinstance(error, GoldenError):
            raise
        raise GoldenError(f"{path.name} is no golden file, or a damaged one: {error}") from None
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, DRY_FORMAT):
        raise GoldenError(f"{path.name} is no golden file. Expected one that tools/gpu/golden.py wrote.")
    if content.get("version") != VERSION:
        found = content.get("version")
        raise GoldenError(f"{path.name} is of version {found!r}. Expected {VERSION}. Record it anew.")
    return content


class _Reader:
    """Checks every field before it is used."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content

    def golden(self) -> Golden:
        gpu, versions = self._field("gpu", dict), self._field("versions", dict)
        name, steps = self._field("name", str), self._field("peaks", list)
        if name != self._path.name.removesuffix(".json.gz"):
            self._fail(f"it is of the step {name!r}")
        if not steps or len(steps) != self._field("steps", int):
            self._fail(f"it has the peaks of {len(steps)} steps")
        events = self._events()
        return Golden(
            self._path, name, self._field("set", str), self._of(gpu, "name", str), self._capability(gpu),
            self._of(versions, "torch", str), versions, self._environment(), self._peak(self._field("build", list)),
            tuple(self._peak(pair) for pair in steps), self._context(), self._field("allocator_settings", dict), events,
            self._segments(events), self._workspaces(), self._calls(), tuple(map(str, self._field("notes", list))),
            dry=(dry := self._field("format", str) == DRY_FORMAT),
            assumed=tuple(map(str, self._field("assumed", list))) if dry else (),
        )  # fmt: skip

    def _fail(self, what: str) -> NoReturn:
        raise GoldenError(f"{self._path.name} is damaged: {what}")

    def _field(self, name: str, kind: type) -> Any:
        return self._of(self._content, name, kind)

    def _of(self, row: dict[str, Any], name: str, kind: type) -> Any:
        value = row.get(name)
        if type(value) is not kind:
            self._fail(f"{name} is {'missing' if value is None else f'of type {type(value).__name__}'}")
        return value

    def _numbers(self, value: Any, what: str, least: int = 0) -> list[int]:
        if type(value) is not list or any(type(number) is not int or number < least for number in value):
            self._fail(f"{what} are no numbers of {least} or more")
        return value

    def _peak(self, pair: Any) -> Peak:
        numbers = self._numbers(pair, "the bytes of a peak")
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            self._fail(f"a peak is {numbers}: allocated and, at least as much, reserved were expected")
        return Peak(*numbers)

    def _capability(self, gpu: dict[str, Any]) -> tuple[int, int]:
        numbers = self._numbers(gpu.get("capability"), "the parts of the compute capability")
        if len(numbers) != 2:
            self._fail(f"the compute capability is {numbers}")
        return numbers[0], numbers[1]

    def _environment(self) -> dict[str, str]:
        found = self._field("environment", dict)
        if any(type(value) is not str for value in found.values()):
            self._fail("a variable of the environment is no text")
        return found

    def _context(self) -> int | None:
        row = self._content.get("context")
        if row is None:
            return None
        if type(row) is not dict or type(row.get("bytes")) is not int:
            self._fail("the context is no number of bytes")
        return row["bytes"]

    def _events(self) -> dict[str, Any] | None:
        events = self._content.get("events")
        if events is None:
            return None
        if type(events) is not dict:
            self._fail("the events are no columns")
        actions = self._of(events, "actions", str)
        unknown = sorted(set(actions) - set(_FREES) - set(_PLACED))
        if unknown:
            self._fail(f"it has events of an unknown kind {unknown[0]!r}")
        places, sizes = self._numbers(events.get("places"), "places", -1), self._numbers(events.get("sizes"), "sizes")
        placed = sum(action in _PLACED for action in actions)
        if len(places) != len(actions) or len(sizes) != placed:
            self._fail(f"{len(actions)} events have {len(places)} places, {placed} have {len(sizes)} sizes")
        if self._of(events, "unit", int) < 1:
            self._fail("the unit of addresses is less than a byte")
        self._references(actions, places)
        for name in ("streams", "pools"):
            column = events.get(name)
            if column is not None and len(self._numbers(column, name)) != len(actions):
                self._fail(f"{len(actions)} events have {len(column)} {name}")
        pools = self._of(events, "pool_ids", list)
        if any(len(self._numbers(pool, "the parts of a pool's id")) != 2 for pool in pools) or not pools:
            self._fail("a pool's id has not two parts")
        if max(events["pools"] or [0], default=0) >= len(pools):
            self._fail("an event is of a pool that is not listed")
        return events

    def _references(self, actions: str, places: list[int]) -> None:
        """Every free is of a block that was allocated before and not freed."""
        live: dict[int, str] = {}
        count = 0
        for action, place in zip(actions, places, strict=True):
            if action == "a":
                live[count] = "live"
                count += 1
            elif action in _FREES:
                state = live.pop(count - place, None)
                if state != ("requested" if action == "c" else "live"):
                    self._fail(f"a free is of the allocation {place} before, which is {state or 'not live'}")
                if action == "r":
                    live[count - place] = "requested"

    def _segments(self, events: dict[str, Any] | None) -> tuple[tuple[Any, ...], ...]:
        rows = self._field("segments", list)
        for row in rows:
            if type(row) is not list or len(row) != 7 or type(row[6]) is not list:
                self._fail("a segment has not seven parts")
            place, size, stream, small, pool, expandable, blocks = row
            self._numbers([place, size, stream, pool], "the parts of a segment")
            if type(small) is not bool or type(expandable) is not bool:
                self._fail("a segment does not say whether it is small, or expandable")
            for block in blocks:
                if len(self._numbers(block, "the parts of a block")) != 3 or block[1] > block[0] or block[2] > 2:
                    self._fail(f"a block is {block}")
            if sum(block[0] for block in blocks) != size:
                self._fail("the blocks of a segment are not as large as the segment")
            if events is None or pool >= len(events["pool_ids"]):
                self._fail("a segment is of a pool that is not listed")
        return tuple(tuple(row) for row in rows)

    def _workspaces(self) -> tuple[Workspace, ...] | None:
        rows = self._content.get("workspaces")
        if rows is None:
            return None
        found = []
        for row in rows if type(rows) is list else [rows]:
            if type(row) is not list or len(row) != 7 or type(row[0]) is not str or type(row[1]) is not str:
                self._fail("a workspace has not op, key, four numbers and results")
            if any(type(number) is not int for number in row[2:6]):
                self._fail(f"a workspace of {row[0]} is no number of bytes")
            results = self._numbers(row[6], f"the results of {row[0]}")
            found.append(Workspace(row[0], row[1], *row[2:6], results=tuple(results)))
        return tuple(found)

    def _calls(self) -> dict[str, tuple[int, ...]] | None:
        calls = self._content.get("calls")
        if calls is None:
            return None
        if type(calls) is not dict or self._content.get("workspaces") is None:
            self._fail("the calls of ops are no table, or there are no workspaces for them")
        for op, rows in calls.items():
            if max(self._numbers(rows, f"the calls of {op}"), default=0) >= len(self._content["workspaces"]):
                self._fail(f"a call of {op} is of no row")
        return {op: tuple(rows) for op, rows in calls.items()}


def _entries(events: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events one by one, as torch's snapshot has them."""
    unit, places, pool_ids = events["unit"], events["places"], events["pool_ids"]
    streams, pools = events["streams"], events["pools"]
    sizes = iter(events["sizes"])
    allocated: list[tuple[int, int]] = []
    for index, (action, place) in enumerate(zip(events["actions"], places, strict=True)):
        rest: dict[str, Any] = {
            "stream": streams[index] if streams else 0,
            "pool_id": tuple(pool_ids[pools[index] if pools else 0]),
        }
        if action in _FREES:
            address, size = allocated[-place]
            for name in _FREES[action]:
                yield {"action": name, "addr": address, "size": size, **rest}
            continue
        size = next(sizes)
        if action == "o":
            yield {"action": "oom", "device_free": place, "size": size, **rest}
            continue
        address = FIRST_ADDRESS + place * unit
        if action == "a":
            allocated.append((address, size))
        yield {"action": _PLACED[action], "addr": address, "size": size, **rest}


def _segment(row: tuple[Any, ...], unit: int, pool_ids: list[list[int]]) -> dict[str, Any]:
    place, size, stream, small, pool, expandable, blocks = row
    address = at = FIRST_ADDRESS + place * unit
    listed = []
    for block, requested, state in blocks:
        listed.append({"address": at, "size": block, "requested_size": requested, "state": _STATES[state]})
        at += block
    return {
        "device": 0, "address": address, "total_size": size, "stream": stream,
        "segment_type": "small" if small else "large", "segment_pool_id": tuple(pool_ids[pool]),
        "is_expandable": expandable, "blocks": listed,
    }  # fmt: skip
