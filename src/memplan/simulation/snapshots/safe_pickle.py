"""Load untrusted pickles: only numbers, strings, lists and dicts come out, and no code is run.

A pickle is a program, so it is read twice. The first pass scans the opcodes without executing them and accepts only
those that build plain values. Then Python's own unpickler, which is fast, executes them, with every class refused. The
first pass also rejects what would make the second allocate without bounds: lengths and memo indices larger than the
file, integers of more than 9 bytes, nested tuples (hashing those recurses in C).
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
# A run of opcodes that are safe for any argument; possessive, so that the match stores no backtracking state. A tuple
# may only hold two integers (the id of a pool). Memo indices up to 2**20 are accepted here.
_SAFE_OPCODES = re.compile(
    rb"(?:[(\]})N\x88\x89aesudl\x94]|" + _INT + rb"{2}\x86|" + _INT + rb"|[hq].|j.{4}|r..[\x00-\x0f]\x00"
    rb"|G.{8}|\x95.{8}|\x80[\x02-\x05])++",
    re.DOTALL,
)
_LENGTHS = {ord("X"): 4, 0x8C: 1, 0x8D: 8}
"""Bytes of the length field of BINUNICODE, SHORT_BINUNICODE and BINUNICODE8."""
_STOP, _LONG_BINPUT, _PROTO, _LONG1, _LONG4, _STACK_GLOBAL = ord("."), ord("r"), 0x80, 0x8A, 0x8B, 0x93
_TEXT_GLOBALS = b"ci"  # GLOBAL, INST: followed by module and name, in two lines
_OBJECTS = b"oRb\x81\x92\x82\x83\x84"  # OBJ, REDUCE, BUILD, NEWOBJ, NEWOBJ_EX, EXT1, EXT2, EXT4
_PERSISTENT = b"PQ"
_TUPLES = b"t\x85\x86\x87"
_ARGUMENTS = {ord("K"): 1, ord("M"): 2, ord("J"): 4, _LONG1: 1, ord("h"): 1, ord("q"): 1, ord("j"): 4, _LONG_BINPUT: 4,
              ord("G"): 8, 0x95: 8, _PROTO: 1}  # fmt: skip
"""Bytes of the argument of `_SAFE_OPCODES`, in which a truncated file can end."""


class _Refused(Exception):
    """A pickle refers to a class; the message is the class's name."""


class _PlainUnpickler(pickle.Unpickler):
    """Refuses classes and persistent ids, should any get past the scan of the opcodes."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        """Called by `pickle` for an object that is stored elsewhere, as tensors in files of torch.save: refuse it."""
        raise _Refused("a persistent id")


def load_plain(data: bytes, source: str, packed: int | None = None) -> Any:
    """Return the value of a pickle of plain data. No code in it is run.

    Args:
        data: the pickle, of protocol 2 to 5.
        source: its name in error messages.
        packed: bytes of the compressed file, if it was compressed.

    Raises:
        SnapshotFormatError: the pickle is damaged, refers to a class (which the message names) or a persistent id, has
            an opcode that no plain value needs, or takes far more memory than its file.

    Example:
        >>> load_plain(pickle.dumps({"segments": []}), "a.pickle")
        {'segments': []}
    """
    try:
        check_memory(memory_of_pickle(data), len(data), len(data) if packed is None else packed)
    except Unreadable as error:
        raise SnapshotFormatError(f"{source} cannot be read: {error}", expected=EXPECTED, do=DO) from None
    offset = _first_forbidden(data)
    if offset is not None:
        raise SnapshotFormatError(f"{source} is a pickle that {_problem(data, offset)}", expected=EXPECTED, do=DO)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _Refused as refused:
        raise SnapshotFormatError(f"{source} is a pickle that {_refusal(str(refused))}", expected=EXPECTED) from None
    except (
        pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
        MemoryError, RecursionError,
    ) as error:  # fmt: skip
        reason = shown(str(error) or type(error).__name__)
        raise SnapshotFormatError(f"{source} is a damaged pickle ({reason})", expected=EXPECTED, do=DO) from None


def memory_of_pickle(data: bytes) -> int:
    """Return an upper bound in bytes for a plain pickle and its value together.

    A dict of few keys takes 240 bytes, a list 100. Every other byte of the pickle adds at most 32: a number needs three
    bytes in the pickle and takes 32 and its slot, a memo entry needs one byte and takes 24 while the memo grows.
    """
    # 33: a byte of the pickle itself, and the 32 that it adds
    return 33 * len(data) + 240 * (data.count(b"}") + data.count(b"(")) + 100 * data.count(b"]")


def _first_forbidden(data: bytes) -> int | None:
    """Return the offset of the first opcode that is not accepted, ``len(data)`` if the pickle is truncated, or None."""
    offset, end = 0, len(data)
    while True:
        safe = _SAFE_OPCODES.match(data, offset)
        if safe is not None:
            offset = safe.end()
        code = data[offset] if offset < end else -1
        if code == _STOP:
            return None
        if code in _LENGTHS:  # a string: its length, then its bytes
            start = offset + 1 + _LENGTHS[code]
            string_end = start + int.from_bytes(data[offset + 1 : start], "little")
            if string_end > end:
                return end
            offset = string_end
        elif code == _LONG_BINPUT and int.from_bytes(data[offset + 1 : offset + 5], "little") <= end:
            offset += 5
        else:
            return offset


def _problem(data: bytes, offset: int) -> str:
    """Return what is wrong with the opcode at an offset, in words that follow "a pickle that"."""
    code = data[offset] if offset < len(data) else _STOP
    size = _ARGUMENTS.get(code, 0)
    if code == _LONG1 and offset + 1 < len(data) and data[offset + 1] < 10:
        size += data[offset + 1]
    if offset + size >= len(data):
        return "ends in the middle"
    if code in _TEXT_GLOBALS:
        text = data[offset + 1 : offset + 1001].decode("utf-8", "replace")  # module and name, each on a line
        return _refusal(".".join(text.split("\n")[:2]))
    if code == _STACK_GLOBAL:
        return _refusal(_name_on_stack(data))
    if code in _OBJECTS:
        return _refusal("a class")
    if code in _PERSISTENT:
        return _refusal("a persistent id")
    if code in _TUPLES:
        return "holds a tuple that is no pair of integers"
    if code in (_LONG1, _LONG4):
        return "holds an integer of more than 9 bytes"
    if code == _LONG_BINPUT:
        return "asks for more places in memory than it can fill"
    if code == _PROTO:
        return f"is of protocol {data[offset + 1]}, not 2 to 5"
    return f"has the opcode 0x{code:02x}, which no snapshot needs"


def _name_on_stack(data: bytes) -> str:
    """Return the name of the class that STACK_GLOBAL takes from the stack, by loading the pickle up to its refusal."""
    try:
        _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        return str(error) if isinstance(error, _Refused) else "a class"
    return "a class"


def _refusal(name: str) -> str:
    """Return the rest of the message on a class in a pickle, which follows "a pickle that"."""
    return f"calls for {shown(name)}; nothing of it was run"


def shown(text: str, most: int = 120) -> str:
    """Return untrusted text without terminal control characters, shortened to ``most`` characters."""
    return printable(text if len(text) <= most else text[: most - 3] + "...")
