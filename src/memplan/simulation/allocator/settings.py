"""The settings of torch's CUDA caching allocator: from a PYTORCH_ALLOC_CONF string or a snapshot, and back to text."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from memplan._display import Printed
from memplan.errors import UsageError

MIB = 1 << 20
LARGE_SEGMENT = 20 * MIB
BUCKETS = 16
"""Sizes from 1 MiB to 64 GiB fall into 16 buckets, one for each power of two; below and above, the outer ones."""

Divisions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AllocatorSettings(Printed):
    """What changes where torch's CUDA caching allocator puts a block. The defaults are torch's.

    Sizes in bytes. ``str()`` gives the settings as text, which `parse_settings` reads back to an equal value.

    Example:
        >>> str(AllocatorSettings(expandable_segments=True))
        'expandable_segments:True'
    """

    max_split_size: int | None = None
    """Blocks of this size and larger are never split, and serve only requests near their size. None: no limit."""
    roundup_power2_divisions: Divisions = ()
    """Pairs (lower end of a bucket in MiB, divisions), all 16 of them or none."""
    garbage_collection_threshold: float = 0.0
    """Above this share of the memory limit, unused segments are given back, the oldest first. 0: never."""
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    """What a request of 1 to 10 MiB takes from the device; with expandable segments, the page of the large pool."""
    max_non_split_rounding: int | None = None
    """How much larger than a request of `max_split_size` a block may be. None: `large_segment_size`."""
    memory_fraction: float = 1.0
    """The share of the card's memory that the process allows itself."""
    reject_over_limit: bool = False
    """Above that share, give up at once instead of releasing unused segments and trying again."""

    def divisions(self, size: int) -> int:
        """Return into how many parts the powers of two around ``size`` bytes are divided; 0 or 1: not at all."""
        if not self.roundup_power2_divisions:
            return 0
        bucket = min(max(size.bit_length() - 1 - 20, 0), BUCKETS - 1)
        return self.roundup_power2_divisions[bucket][1]

    def __str__(self) -> str:
        parts: list[str] = []
        if self.large_segment_size != LARGE_SEGMENT:
            parts.append(f"large_segment_size_mb:{self.large_segment_size // MIB}")
        if self.max_split_size is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size // MIB}")
        if self.max_non_split_rounding is not None:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // MIB}")
        if self.roundup_power2_divisions:
            parts.append(f"roundup_power2_divisions:{_divisions_text(self.roundup_power2_divisions)}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold!r}")
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.memory_fraction != 1.0:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction!r}")
        if self.reject_over_limit:
            parts.append("throw_on_cudamalloc_oom:True")
        return ",".join(parts)


def parse_settings(text: str) -> AllocatorSettings:
    """Read a PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) string as torch 2.13 reads it.

    Settings that do not bear on where a block is put are checked and left out. Stricter than torch in one way: what
    torch skips without a word (a missing colon or comma, letters behind a number) is refused.

    Raises:
        UsageError: an unknown setting, with the nearest names; a value that torch refuses; the backend
            cudaMallocAsync, which is another allocator.

    Example:
        >>> parse_settings("max_split_size_mb:128, expandable_segments:True").max_split_size
        134217728
    """
    read = _Reading()
    pairs = _pairs(_tokens(text), text)
    # torch reads this one first, wherever it stands: other settings are checked against it.
    for name, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        reader = _READERS.get(name)
        if reader is None:
            _refuse_name(name)
        reader(read, name, value)
    return read.settings()


def settings_of_snapshot(recorded: Mapping[str, Any]) -> AllocatorSettings:
    """Read the ``allocator_settings`` of a torch memory snapshot, whatever of them the version of torch wrote.

    What stands there by itself counts; what does not (newer settings) is taken from the recorded string, as far as
    that can be read.

    Raises:
        UsageError: an entry that is no setting's value.

    Example:
        >>> settings_of_snapshot({"max_split_size": -1, "expandable_segments": True})
        AllocatorSettings(..., expandable_segments=True, ...)
    """
    settings = AllocatorSettings()
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        text = recorded.get(name)
        if isinstance(text, str) and text:
            settings = _known_settings(text)
    try:
        return _with_entries(settings, recorded)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the allocator settings of the snapshot cannot be read ({error})",
            expected="numbers for max_split_size, garbage_collection_threshold and roundup_power2_divisions",
        ) from error


def _with_entries(settings: AllocatorSettings, recorded: Mapping[str, Any]) -> AllocatorSettings:
    if (split := recorded.get("max_split_size")) is not None:
        # -1, or the same as an unsigned number of 64 bits.
        size = int(split)
        settings = replace(settings, max_split_size=None if size < 0 or size >= 1 << 63 else size)
    if (threshold := recorded.get("garbage_collection_threshold")) is not None:
        settings = replace(settings, garbage_collection_threshold=float(threshold))
    if (expandable := recorded.get("expandable_segments")) is not None:
        settings = replace(settings, expandable_segments=bool(expandable))
    if (large := recorded.get("large_segment_size")) is not None:
        settings = replace(settings, large_segment_size=int(large))
    if (table := recorded.get("roundup_power2_divisions")) is not None:
        given = {int(bucket): int(parts) for bucket, parts in table.items()}
        settings = replace(settings, roundup_power2_divisions=_as_divisions([given.get(1 << k, 0) for k in range(16)]))
    return settings


def _known_settings(text: str) -> AllocatorSettings:
    """As `parse_settings`, without what it refuses: the recording torch took it, so it may be newer than this."""
    read = _Reading()
    try:
        pairs = _pairs(_tokens(text), text)
    except UsageError:
        return AllocatorSettings()
    for name, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        try:
            _READERS.get(name, _ignored)(read, name, value)
        except UsageError:
            continue
    return read.settings()


class _Reading:
    """What has been read so far; a setting given twice is overwritten, divisions are added to, as in torch."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.table = [0] * BUCKETS

    @property
    def large_segment_size(self) -> int:
        return self.fields.get("large_segment_size", LARGE_SEGMENT)

    def settings(self) -> AllocatorSettings:
        return AllocatorSettings(roundup_power2_divisions=_as_divisions(self.table), **self.fields)


def _as_divisions(table: Sequence[int]) -> Divisions:
    return tuple((1 << k, parts) for k, parts in enumerate(table)) if any(table) else ()


def _divisions_text(divisions: Divisions) -> str:
    """Return the shortest text that is read back to these: the first entry counts for smaller sizes, too, ">" for
    larger."""
    table = [parts for _, parts in divisions]
    if len(set(table)) == 1:
        return str(table[0])
    first = next(k for k in range(BUCKETS) if table[k + 1] != table[k])
    last = next(k for k in reversed(range(BUCKETS)) if table[k] != table[-1])
    entries = [f"{1 << k}:{table[k]}" for k in range(first, last + 1) if table[k] or k in (first, last)]
    if table[-1]:
        entries.append(f">:{table[-1]}")
    return f"[{','.join(entries)}]"


# Text -> names and values


def _tokens(text: str) -> list[str]:
    """Words and the signs between them; white space does not count, not even inside a word."""
    tokens: list[str] = []
    word = ""
    for sign in "".join(text.split()):
        if sign not in ",:[]":
            word += sign
            continue
        tokens += [word, sign] if word else [sign]
        word = ""
    return [*tokens, word] if word else tokens


Value = str | list[tuple[str, str]]
"""A word, or what stands in brackets."""


def _pairs(tokens: list[str], text: str) -> list[tuple[str, Value]]:
    pairs: list[tuple[str, Value]] = []
    at = 0
    while at < len(tokens):
        name = tokens[at]
        if name in ",:[]" or tokens[at + 1 : at + 2] != [":"] or at + 2 >= len(tokens):
            _refuse_text(text, at, tokens)
        at += 2
        if tokens[at] == "[":
            value, at = _bracket(tokens, at, text)
        elif tokens[at] in ",:]":
            _refuse_text(text, at, tokens)
        else:
            value = tokens[at]
        pairs.append((name, value))
        at += 1
        if at < len(tokens) and tokens[at] != ",":
            _refuse_text(text, at, tokens)
        at += 1
    return pairs


def _bracket(tokens: list[str], at: int, text: str) -> tuple[list[tuple[str, str]], int]:
    """Return the pairs inside brackets that open at ``at``, and where they close."""
    inside: list[tuple[str, str]] = []
    at += 1
    while tokens[at : at + 1] != ["]"]:
        entry = tokens[at : at + 4]
        if len(entry) < 4 or entry[1] != ":" or entry[0] in ",:[]" or entry[2] in ",:[]" or entry[3] not in ",]":
            _refuse_text(text, at, tokens)
        inside.append((entry[0], entry[2]))
        at += 4 if entry[3] == "," else 3
    return inside, at


def _refuse_text(text: str, at: int, tokens: list[str]) -> NoReturn:
    near = "".join(tokens[at : at + 3])
    raise UsageError(
        f"allocator settings {text!r} cannot be read at {near!r}" if near else f"allocator settings {text!r} end early",
        expected="name:value pairs with commas between them",
        do="Write them like 'max_split_size_mb:128,expandable_segments:True'",
    )


def _refuse_name(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, _READERS, n=3, cutoff=0.5)
    raise UsageError(
        f"allocator setting {name!r} is unknown",
        expected=f"{' or '.join(near)}" if near else f"one of {', '.join(sorted(_READERS))}",
        do="Correct the name",
    )


def _refuse_value(name: str, value: Value, expected: str) -> NoReturn:
    shown = value if isinstance(value, str) else "[" + ",".join(f"{a}:{b}" for a, b in value) + "]"
    raise UsageError(f"allocator setting {name}:{shown}", expected=expected, do="Correct the value")


# One reader for each setting


def _number(name: str, value: Value, expected: str) -> int:
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 19:
        _refuse_value(name, value, expected)
    return int(value)


def _real(name: str, value: Value, expected: str) -> float:
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        _refuse_value(name, value, expected)
    return number


def _flag(name: str, value: Value) -> bool:
    if value not in ("True", "False"):
        _refuse_value(name, value, "True or False, written so")
    return value == "True"


def _ignored(read: _Reading, name: str, value: Value) -> None:
    """Bears on host memory, on locks or on how addresses are reserved, not on where a block is put."""


def _ignored_flag(read: _Reading, name: str, value: Value) -> None:
    _flag(name, value)


def _ignored_threads(read: _Reading, name: str, value: Value) -> None:
    expected = "a power of two up to 128"
    if not _power_of_two(threads := _number(name, value, expected)) or threads > 128:
        _refuse_value(name, value, expected)


def _ignored_size(read: _Reading, name: str, value: Value) -> None:
    if not _number(name, value, "a number of MiB above 0"):
        _refuse_value(name, value, "a number of MiB above 0")


def _large_segment(read: _Reading, name: str, value: Value) -> None:
    expected = "a number of MiB above 10"
    if (size := _number(name, value, expected)) <= 10:
        _refuse_value(name, value, expected)
    read.fields["large_segment_size"] = size * MIB


def _at_least_large(field: str) -> Callable[[_Reading, str, Value], None]:
    def reader(read: _Reading, name: str, value: Value) -> None:
        expected = f"a number of MiB from {read.large_segment_size // MIB}, the size of a large segment"
        if (size := _number(name, value, expected) * MIB) < read.large_segment_size:
            _refuse_value(name, value, expected)
        read.fields[field] = size

    return reader


def _threshold(read: _Reading, name: str, value: Value) -> None:
    expected = "a number between 0 and 1, both excluded"
    if not 0 < (share := _real(name, value, expected)) < 1:
        _refuse_value(name, value, expected)
    read.fields["garbage_collection_threshold"] = share


def _fraction(read: _Reading, name: str, value: Value) -> None:
    expected = "a number from 0 to 1"
    if not 0 <= (share := _real(name, value, expected)) <= 1:
        _refuse_value(name, value, expected)
    read.fields["memory_fraction"] = share


def _expandable(read: _Reading, name: str, value: Value) -> None:
    read.fields["expandable_segments"] = _flag(name, value)


def _reject(read: _Reading, name: str, value: Value) -> None:
    read.fields["reject_over_limit"] = _flag(name, value)


def _backend(read: _Reading, name: str, value: Value) -> None:
    if value in ("cudaMallocAsync", "hipMallocAsync"):
        raise UsageError(
            f"allocator setting backend:{value}",
            expected="backend:native; cudaMallocAsync leaves the memory to the driver, whose rules are not public",
            do="Leave it out",
        )
    if value != "native":
        _refuse_value(name, value, "native")


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _roundup(read: _Reading, name: str, value: Value) -> None:
    """One number for all sizes, or [bucket:number,...]: each bucket in MiB, the last one may be ">"."""
    expected = "powers of two, one for all sizes or like [256:1,512:2,>:4] with 0 for none"
    if isinstance(value, str):
        if not _power_of_two(parts := _number(name, value, expected)):
            _refuse_value(name, value, expected)
        read.table[:] = [parts] * BUCKETS
        return
    last, first = 0, True
    for bucket, text in value:
        parts = _number(name, text, expected)
        if parts and not _power_of_two(parts):
            _refuse_value(name, value, expected)
        if bucket == ">":
            read.table[last + 1 :] = [parts] * (BUCKETS - last - 1)
            continue
        if not _power_of_two(start := _number(name, bucket, expected)):
            _refuse_value(name, value, expected)
        last = min(start.bit_length() - 1, BUCKETS - 1)
        read.table[0 if first else last : last + 1] = [parts] * (last + 1 if first else 1)
        first = False


_READERS: dict[str, Callable[[_Reading, str, Value], None]] = {
    "backend": _backend,
    "expandable_segments": _expandable,
    "expandable_segments_reserve": _ignored,
    "expandable_segments_reserve_by_class": _ignored,
    "garbage_collection_threshold": _threshold,
    "graph_capture_record_stream_reuse": _ignored_flag,
    "large_segment_size_mb": _large_segment,
    "max_non_split_rounding_mb": _at_least_large("max_non_split_rounding"),
    "max_split_size_mb": _at_least_large("max_split_size"),
    "per_process_memory_fraction": _fraction,
    "pinned_free_catch_all": _ignored_flag,
    "pinned_max_cached_size_mb": _ignored_size,
    "pinned_max_round_threshold_mb": _ignored_size,
    "pinned_num_register_threads": _ignored_threads,
    "pinned_reserve_segment_size_mb": _ignored_size,
    "pinned_use_background_threads": _ignored_flag,
    "pinned_use_cuda_host_register": _ignored_flag,
    "pinned_use_hip_host_register": _ignored_flag,
    "release_lock_on_cudamalloc": _ignored_flag,
    "release_lock_on_hipmalloc": _ignored_flag,
    "roundup_power2_divisions": _roundup,
    "throw_on_cudamalloc_oom": _reject,
}
"""What torch 2.13 knows, and what came after it."""
