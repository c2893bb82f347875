"""The settings of torch's CUDA caching allocator, parsed from a PYTORCH_ALLOC_CONF string or from a snapshot."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from memplan._display import Printed
from memplan.errors import UsageError

MIB = 1 << 20
LARGE_SEGMENT = 20 * MIB
BUCKETS = 16
"""Sizes fall into a bucket for each power of two from 1 MiB to 32 GiB; smaller and larger sizes into the outer two."""

_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""Environment variables of the settings; the last that is set counts."""

Divisions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AllocatorSettings(Printed):
    """The settings that determine where torch's CUDA caching allocator places a block. The defaults are torch's.

    Sizes in bytes. ``str()`` returns the settings as a string that `parse_settings` accepts.

    Example:
        >>> str(AllocatorSettings(expandable_segments=True))
        'expandable_segments:True'
    """

    max_split_size: int | None = None
    """Blocks of at least this size are never split, and serve only requests near their size. None: no limit."""
    roundup_power2_divisions: Divisions = ()
    """(lower end of the bucket in MiB, divisions) for all 16 buckets, or ()."""
    garbage_collection_threshold: float = 0.0
    """Above this share of the memory limit, unused segments are released, the oldest first. 0: never."""
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    """Segment size for requests of 1 to 10 MiB; with expandable segments, the page size of the large pool."""
    max_non_split_rounding: int | None = None
    """How much larger than its request a block above `max_split_size` may be. None: `large_segment_size`."""
    memory_fraction: float = 1.0
    """The limit of the process, as a share of the card's memory."""
    reject_over_limit: bool = False
    """Above that limit, run out of memory at once instead of releasing unused segments and trying again."""

    def divisions(self, size: int) -> int:
        """Return the steps between two powers of two to which ``size`` bytes are rounded; 0 or 1: none."""
        if not self.roundup_power2_divisions:
            return 0
        bucket = min(max(size.bit_length() - 1 - 20, 0), BUCKETS - 1)  # bucket k begins at 2**k MiB
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
    """Parse a PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) string as torch 2.13 does.

    Settings that do not affect where a block is placed are checked and left out. Errors that torch ignores (a missing
    colon or comma, letters behind a number) are refused. Raises UsageError: an unknown setting, with the nearest names;
    a value that torch refuses; the backend cudaMallocAsync, which is another allocator.

    Example:
        >>> parse_settings("max_split_size_mb:128, expandable_segments:True").max_split_size
        134217728
    """
    parsed = _ParsedSettings()
    pairs = _pairs(_tokens(text), text)
    # torch reads large_segment_size_mb first, wherever it stands: other settings are checked against it.
    for name, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        parser = _PARSERS.get(name)
        if parser is None:
            _refuse_name(name)
        parser(parsed, name, value)
    return parsed.settings()


def settings_of_snapshot(recorded: Mapping[str, Any]) -> AllocatorSettings:
    """Parse the ``allocator_settings`` of a torch memory snapshot, of any version of torch.

    Entries of their own take precedence. The other settings are taken from the recorded PYTORCH_ALLOC_CONF string, as
    far as it can be parsed. Raises UsageError if an entry has an invalid value.

    Example:
        >>> settings_of_snapshot({"max_split_size": -1, "expandable_segments": True})
        AllocatorSettings(..., expandable_segments=True, ...)
    """
    settings = AllocatorSettings()
    for name in _VARIABLES:
        text = recorded.get(name)
        if isinstance(text, str) and text:
            settings = _parse_recorded(text)
    try:
        return _with_own_entries(settings, recorded)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the allocator settings of the snapshot cannot be read ({error})",
            expected="numbers for max_split_size, garbage_collection_threshold and roundup_power2_divisions",
        ) from error


def settings_of_process() -> AllocatorSettings:
    """Return the settings in this process's environment, as far as they can be parsed.

    They are those of ``PYTORCH_ALLOC_CONF``, else of ``PYTORCH_CUDA_ALLOC_CONF``, its name up to torch 2.8. What the
    program changes while it runs is not seen.
    """
    return settings_of_snapshot({name: os.environ.get(name) for name in _VARIABLES})


def is_native_in_process() -> bool:
    """Return whether the process's environment leaves torch's own allocator in place. Of cudaMallocAsync, which hands
    memory back to the driver, `settings_of_process` knows nothing."""
    text = next((os.environ[name] for name in reversed(_VARIABLES) if os.environ.get(name)), "")
    try:
        return dict(_pairs(_tokens(text), text)).get("backend", "native") == "native"
    except UsageError:  # torch refuses it, too
        return True


def _with_own_entries(settings: AllocatorSettings, recorded: Mapping[str, Any]) -> AllocatorSettings:
    """Return the settings with those replaced that have an entry of their own in ``recorded``, a snapshot's
    ``allocator_settings``."""
    entries = {name: value for name, value in recorded.items() if value is not None}
    changes: dict[str, Any] = {}
    if "max_split_size" in entries:
        size = int(entries["max_split_size"])  # no limit: -1, or its unsigned 64 bits
        changes["max_split_size"] = None if size < 0 or size >= 1 << 63 else size
    for name, convert in (
        ("garbage_collection_threshold", float), ("expandable_segments", bool), ("large_segment_size", int),
    ):  # fmt: skip
        if name in entries:
            changes[name] = convert(entries[name])
    if "roundup_power2_divisions" in entries:
        by_mib = {int(bucket): int(divisions) for bucket, divisions in entries["roundup_power2_divisions"].items()}
        changes["roundup_power2_divisions"] = _divisions_of_buckets([by_mib.get(1 << k, 0) for k in range(BUCKETS)])
    return replace(settings, **changes)


def _parse_recorded(text: str) -> AllocatorSettings:
    """Parse as `parse_settings` does, but skip what it refuses: the torch that wrote the string may be newer."""
    parsed = _ParsedSettings()
    try:
        pairs = _pairs(_tokens(text), text)
    except UsageError:
        return AllocatorSettings()
    for name, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        if name in _PARSERS:
            with suppress(UsageError):
                _PARSERS[name](parsed, name, value)
    return parsed.settings()


class _ParsedSettings:
    """The settings parsed so far. As in torch, a repeated setting is overwritten, except that divisions accumulate."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        """Fields of `AllocatorSettings` that were set."""
        self.divisions = [0] * BUCKETS
        """By bucket k, of sizes from 2**k MiB on: the steps between two powers of two; 0: none."""

    @property
    def large_segment_size(self) -> int:
        return self.fields.get("large_segment_size", LARGE_SEGMENT)

    def settings(self) -> AllocatorSettings:
        """Return the settings; those that were not parsed have torch's defaults."""
        return AllocatorSettings(roundup_power2_divisions=_divisions_of_buckets(self.divisions), **self.fields)


def _divisions_of_buckets(table: Sequence[int]) -> Divisions:
    """Return (lower end of the bucket in MiB, divisions) of each bucket; () if no bucket has divisions."""
    return tuple((1 << k, parts) for k, parts in enumerate(table)) if any(table) else ()


def _divisions_text(divisions: Divisions) -> str:
    """Return the shortest string that parses to these divisions.

    Its first entry also covers all smaller buckets, and ">" all larger ones.
    """
    table = [parts for _, parts in divisions]  # entry k is the bucket from 2**k MiB on
    if len(set(table)) == 1:
        return str(table[0])
    first = next(k for k in range(BUCKETS) if table[k + 1] != table[k])
    last = next(k for k in reversed(range(BUCKETS)) if table[k] != table[-1])
    entries = [f"{1 << k}:{table[k]}" for k in range(first, last + 1) if table[k] or k in (first, last)]
    if table[-1]:
        entries.append(f">:{table[-1]}")
    return f"[{','.join(entries)}]"


# The syntax: text -> names and values


def _tokens(text: str) -> list[str]:
    """Split into words and the characters ``,:[]``, without white space."""
    tokens: list[str] = []
    word = ""
    for character in "".join(text.split()):
        if character not in ",:[]":
            word += character
            continue
        tokens += [word, character] if word else [character]
        word = ""
    return [*tokens, word] if word else tokens


Value = str | list[tuple[str, str]]
"""A word, or the pairs in brackets."""


def _pairs(tokens: list[str], text: str) -> list[tuple[str, Value]]:
    """Parse tokens into (setting, value) pairs; ``text`` is what they come from, for error messages."""
    pairs: list[tuple[str, Value]] = []
    position = 0
    while position < len(tokens):
        name = tokens[position]
        if name in ",:[]" or tokens[position + 1 : position + 2] != [":"] or position + 2 >= len(tokens):
            _refuse_text(text, position, tokens)
        position += 2
        if tokens[position] == "[":
            value, position = _bracketed_pairs(tokens, position, text)
        elif tokens[position] in ",:]":
            _refuse_text(text, position, tokens)
        else:
            value = tokens[position]
        pairs.append((name, value))
        position += 1
        if position < len(tokens) and tokens[position] != ",":
            _refuse_text(text, position, tokens)
        position += 1
    return pairs


def _bracketed_pairs(tokens: list[str], position: int, text: str) -> tuple[list[tuple[str, str]], int]:
    """Return the pairs in the brackets that open at token ``position``, and the index of the closing bracket."""
    pairs: list[tuple[str, str]] = []
    position += 1
    while tokens[position : position + 1] != ["]"]:
        entry = tokens[position : position + 4]  # bucket, ":", divisions, and "," or the closing bracket
        if len(entry) < 4 or entry[1] != ":" or entry[0] in ",:[]" or entry[2] in ",:[]" or entry[3] not in ",]":
            _refuse_text(text, position, tokens)
        pairs.append((entry[0], entry[2]))
        position += 4 if entry[3] == "," else 3
    return pairs, position


def _refuse_text(text: str, position: int, tokens: list[str]) -> NoReturn:
    """Raise the error of a text that cannot be parsed from the token at ``position`` on."""
    near = "".join(tokens[position : position + 3])
    raise UsageError(
        f"allocator settings {text!r} cannot be read at {near!r}" if near else f"allocator settings {text!r} end early",
        expected="name:value pairs with commas between them",
        do="Write them like 'max_split_size_mb:128,expandable_segments:True'",
    )


def _refuse_name(name: str) -> NoReturn:
    """Raise the error of an unknown setting, with the nearest names."""
    near = difflib.get_close_matches(name, _PARSERS, n=3, cutoff=0.5)
    raise UsageError(
        f"allocator setting {name!r} is unknown",
        expected=f"{' or '.join(near)}" if near else f"one of {', '.join(sorted(_PARSERS))}",
        do="Correct the name",
    )


def _refuse_value(name: str, value: Value, expected: str) -> NoReturn:
    """Raise the error of a value that a setting cannot have; ``expected`` says what it can be."""
    shown = value if isinstance(value, str) else "[" + ",".join(":".join(pair) for pair in value) + "]"
    raise UsageError(f"allocator setting {name}:{shown}", expected=expected, do="Correct the value")


# The parser of each setting


def _parse_number(name: str, value: Value, expected: str) -> int:
    """Parse the value of a setting as a whole number; ``expected`` is for the error message."""
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 19:  # 64 bits hold 19
        _refuse_value(name, value, expected)
    return int(value)


Parser = Callable[[_ParsedSettings, str, Value], None]
"""``(parsed, name, value)``: checks a setting, and adds it to the parsed settings. Settings of host memory, locks or
address reservation are not added: they do not affect where a block is placed."""


def _flag(field: str | None = None) -> Parser:
    """Return the parser of "True" or "False" for a field of `AllocatorSettings`, or for a setting that is not added."""

    def parse(parsed: _ParsedSettings, name: str, value: Value) -> None:
        if value not in ("True", "False"):
            _refuse_value(name, value, "True or False, written so")
        if field is not None:
            parsed.fields[field] = value == "True"

    return parse


def _whole_number(expected: str, is_valid: Callable[[int], bool], field: str | None = None, unit: int = 1) -> Parser:
    """Return the parser of a whole number of ``unit`` bytes. ``is_valid(number)`` says whether torch accepts a number,
    ``expected`` describes the valid numbers in errors. ``field``: as for `_flag`."""

    def parse(parsed: _ParsedSettings, name: str, value: Value) -> None:
        number = _parse_number(name, value, expected)
        if not is_valid(number):
            _refuse_value(name, value, expected)
        if field is not None:
            parsed.fields[field] = number * unit

    return parse


def _size_of_large_segment_or_more(field: str) -> Parser:
    """Return the parser of a size in MiB that must be at least that of a large segment."""

    def parse(parsed: _ParsedSettings, name: str, value: Value) -> None:
        """Parse a size that is valid for the large segments parsed before."""
        least = parsed.large_segment_size // MIB
        expected = f"a number of MiB from {least}, the size of a large segment"
        _whole_number(expected, lambda size: size >= least, field, MIB)(parsed, name, value)

    return parse


def _share(expected: str, is_valid: Callable[[float], bool], field: str) -> Parser:
    """Return the parser of a number for a field of `AllocatorSettings`. ``is_valid(number)`` says whether torch accepts
    a number; ``expected`` describes the valid numbers."""

    def parse(parsed: _ParsedSettings, name: str, value: Value) -> None:
        """Parse a number that ``is_valid``; nan, which other texts become, is not."""
        try:
            number = float(value) if isinstance(value, str) else math.nan
        except ValueError:
            number = math.nan
        if not is_valid(number):
            _refuse_value(name, value, expected)
        parsed.fields[field] = number

    return parse


def _ignored(parsed: _ParsedSettings, name: str, value: Value) -> None:
    """The parser of a setting without effect on sizes: accepts any value, and adds nothing."""


def _backend(parsed: _ParsedSettings, name: str, value: Value) -> None:
    """Accept "native"; refuse the allocators whose rules are not public."""
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


def _roundup(parsed: _ParsedSettings, name: str, value: Value) -> None:
    """Parse a number for all sizes, or [bucket:number,...] with buckets in MiB, the last of which may be ">"."""
    expected = "powers of two, one for all sizes or like [256:1,512:2,>:4] with 0 for none"
    if isinstance(value, str):
        parts = _parse_number(name, value, expected)
        if not _power_of_two(parts):
            _refuse_value(name, value, expected)
        parsed.divisions[:] = [parts] * BUCKETS
        return
    last, is_first = 0, True  # index of the last bucket so far
    for bucket, text in value:
        parts = _parse_number(name, text, expected)
        if parts and not _power_of_two(parts):
            _refuse_value(name, value, expected)
        if bucket == ">":
            parsed.divisions[last + 1 :] = [parts] * (BUCKETS - last - 1)
            continue
        lower_end = _parse_number(name, bucket, expected)
        if not _power_of_two(lower_end):
            _refuse_value(name, value, expected)
        last = min(lower_end.bit_length() - 1, BUCKETS - 1)
        first = 0 if is_first else last  # the first entry also covers all smaller buckets
        parsed.divisions[first : last + 1] = [parts] * (last + 1 - first)
        is_first = False


_SIZE = _whole_number("a number of MiB above 0", lambda mib: mib > 0)
_PARSERS: dict[str, Parser] = {
    "backend": _backend,
    "expandable_segments": _flag("expandable_segments"),
    "expandable_segments_reserve": _ignored,
    "expandable_segments_reserve_by_class": _ignored,
    "garbage_collection_threshold": _share(
        "a number between 0 and 1, both excluded", lambda share: 0 < share < 1, "garbage_collection_threshold"
    ),
    "graph_capture_record_stream_reuse": _flag(),
    "large_segment_size_mb": _whole_number("a number of MiB above 10", lambda mib: mib > 10, "large_segment_size", MIB),
    "max_non_split_rounding_mb": _size_of_large_segment_or_more("max_non_split_rounding"),
    "max_split_size_mb": _size_of_large_segment_or_more("max_split_size"),
    "per_process_memory_fraction": _share("a number from 0 to 1", lambda share: 0 <= share <= 1, "memory_fraction"),
    "pinned_free_catch_all": _flag(),
    "pinned_max_cached_size_mb": _SIZE,
    "pinned_max_round_threshold_mb": _SIZE,
    "pinned_num_register_threads": _whole_number(
        "a power of two up to 128", lambda threads: _power_of_two(threads) and threads <= 128
    ),
    "pinned_reserve_segment_size_mb": _SIZE,
    "pinned_use_background_threads": _flag(),
    "pinned_use_cuda_host_register": _flag(),
    "pinned_use_hip_host_register": _flag(),
    "release_lock_on_cudamalloc": _flag(),
    "release_lock_on_hipmalloc": _flag(),
    "roundup_power2_divisions": _roundup,
    "throw_on_cudamalloc_oom": _flag("reject_over_limit"),
}
"""The settings of torch 2.13, and later ones."""
