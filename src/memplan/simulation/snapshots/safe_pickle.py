"""Pickles from strangers: only numbers, texts, lists and dicts come out, and nothing is ever run.

A pickle is a program. This one is read twice: first every opcode is looked at, without doing anything, and only those
that make plain values are let through; then Python's own unpickler, which is fast, runs them with every class
refused. The first pass also keeps out what would make the second one allocate without bounds: lengths and places in
the memo beyond what the file can fill, integers of more than 9 bytes, nested tuples (hashing those recurses in C).
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from memplan._json import Unreadable, check_memory
from memplan._text import printable
from memplan.errors import SnapshotFormatError

EXPECTED = "a snapshot as torch.cuda.memory._dump_snapshot writes it: plain lists, dicts, texts and numbers"
DO = "Write it again with torch.cuda.memory._dump_snapshot"

_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x00|\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9}))"
# Opcodes that need no look at their argument, as many as follow each other; possessive, so that nothing is kept to
# step back to. A tuple may only hold two integers (the id of a pool). Memo places up to 2**20 are let through here.
_PLAIN = re.compile(
    rb"(?:[(\]})N\x88\x89aesudl\x94]|" + _INT + rb"{2}\x86|" + _INT + rb"|[hq].|j.{4}|r..[\x00-\x0f]\x00"
    rb"|G.{8}|\x95.{8}|\x80[\x02-\x05])++",
    re.DOTALL,
)
_LENGTHS = {ord("X"): 4, 0x8C: 1, 0x8D: 8}
"""BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, and in how many bytes each writes its length."""
_STOP, _LONG_BINPUT, _PROTO, _LONG1, _LONG4, _STACK_GLOBAL = ord("."), ord("r"), 0x80, 0x8A, 0x8B, 0x93
_TEXT_GLOBALS = b"ci"  # GLOBAL, INST: the name stands behind them, in two lines
_OBJECTS = b"oRb\x81\x92\x82\x83\x84"  # OBJ, REDUCE, BUILD, NEWOBJ, NEWOBJ_EX, EXT1, EXT2, EXT4
_PERSISTENT = b"PQ"
_TUPLES = b"t\x85\x86\x87"
_ARGUMENTS = {ord("K"): 1, ord("M"): 2, ord("J"): 4, _LONG1: 1, ord("h"): 1, ord("q"): 1, ord("j"): 4, _LONG_BINPUT: 4,
              ord("G"): 8, 0x95: 8, _PROTO: 1}  # fmt: skip
"""Bytes of the argument of those of `_PLAIN` that have one: a file can end in it."""


class _Refused(Exception):
    """A class in a pickle; the text names it."""


class _Plain(pickle.Unpickler):
    """Refuses whatever could run something, should it ever get past the look at the opcodes."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise _Refused("a persistent id")


def load_plain(data: bytes, source: str, packed: int | None = None) -> Any:
    """Return the value of a pickle that holds plain data only. Nothing of it is run.

    Args:
        data: the pickle, of protocol 2 to 5.
        source: what to call it in an error.
        packed: bytes of the file, where the pickle was unpacked.

    Raises:
        SnapshotFormatError: a class (named), a persistent id, an opcode that no plain value needs, a damaged pickle,
            or one that takes far more memory than its file.

    Example:
        >>> load_plain(pickle.dumps({"segments": []}), "a.pickle")
        {'segments': []}
    """
    try:
        check_memory(memory_of_pickle(data), len(data), len(data) if packed is None else packed)
    except Unreadable as error:
        raise SnapshotFormatError(f"{source} cannot be read: {error}", expected=EXPECTED, do=DO) from None
    at = _first_forbidden(data)
    if at is not None:
        raise SnapshotFormatError(f"{source} is a pickle that {_what(data, at)}", expected=EXPECTED, do=DO)
    try:
        return _Plain(io.BytesIO(data)).load()
    except _Refused as refused:
        raise SnapshotFormatError(f"{source} is a pickle that {_calls_for(str(refused))}", expected=EXPECTED) from None
    except (
        pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
        MemoryError, RecursionError,
    ) as error:  # fmt: skip
        reason = shown(str(error) or type(error).__name__)
        raise SnapshotFormatError(f"{source} is a damaged pickle ({reason})", expected=EXPECTED, do=DO) from None


def memory_of_pickle(data: bytes) -> int:
    """Return a bound on the bytes that a plain pickle and its value take together.

    Counted are 240 for a dict of few keys, 100 for a list, 32 for any other byte: at most a number in three bytes (32
    and its slot), or a place in the memo in one (24 while that grows).
    """
    return 33 * len(data) + 240 * (data.count(b"}") + data.count(b"(")) + 100 * data.count(b"]")


def _first_forbidden(data: bytes) -> int | None:
    """Return where the first opcode stands that makes no plain value, or the end where none stops the pickle; else
    None."""
    at, end = 0, len(data)
    while True:
        if (plain := _PLAIN.match(data, at)) is not None:
            at = plain.end()
        code = data[at] if at < end else -1
        if code == _STOP:
            return None
        if code in _LENGTHS:
            start = at + 1 + _LENGTHS[code]
            after = start + int.from_bytes(data[at + 1 : start], "little")
            if after > end:
                return end
            at = after
        elif code == _LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") <= end:
            at += 5
        else:
            return at


def _what(data: bytes, at: int) -> str:
    """Return what is wrong with the opcode at a place, in words that follow "a pickle that"."""
    code = data[at] if at < len(data) else _STOP
    size = _ARGUMENTS.get(code, 0)
    if code == _LONG1 and at + 1 < len(data) and data[at + 1] < 10:
        size += data[at + 1]
    if at + size >= len(data):
        return "ends in the middle"
    if code in _TEXT_GLOBALS:
        return _calls_for(".".join(data[at + 1 : at + 1001].decode("utf-8", "replace").split("\n")[:2]))
    if code == _STACK_GLOBAL:
        return _calls_for(_name_on_stack(data))
    if code in _OBJECTS:
        return _calls_for("a class")
    if code in _PERSISTENT:
        return _calls_for("a persistent id")
    if code in _TUPLES:
        return "holds a tuple that is no pair of integers"
    if code in (_LONG1, _LONG4):
        return "holds an integer of more than 9 bytes"
    if code == _LONG_BINPUT:
        return "asks for more places in memory than it can fill"
    if code == _PROTO:
        return f"is of protocol {data[at + 1]}, not 2 to 5"
    return f"has the opcode 0x{code:02x}, which no snapshot needs"


def _name_on_stack(data: bytes) -> str:
    """Return the class that the first forbidden opcode asks for by two texts on the stack: the load ends there,
    refused."""
    try:
        _Plain(io.BytesIO(data)).load()
    except Exception as error:
        return str(error) if isinstance(error, _Refused) else "a class"
    return "a class"


def _calls_for(name: str) -> str:
    return f"calls for {shown(name)}; nothing of it was run"


def shown(text: str, most: int = 120) -> str:
    """Return a text from a stranger as it may be printed: no characters that steer a terminal, and not too long."""
    return printable(text if len(text) <= most else text[: most - 3] + "...")
