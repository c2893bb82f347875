"""Pickles from strangers: plain data comes out as Python's own unpickler gives it, anything else is refused unrun."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from memplan.errors import SnapshotFormatError, UsageError
from memplan.simulation.snapshots.safe_pickle import load_plain, shown

numbers = st.integers(-(1 << 63), (1 << 64) - 1)
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text()
pairs = st.tuples(numbers, numbers)
plain = st.recursive(scalars | pairs, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@profile(deadline=None)
@given(plain, st.integers(2, 5))
def test_plain_data_comes_out_as_it_went_in(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol), "x") == value


@profile(deadline=None)
@given(st.binary(max_size=200))
def test_noise_gives_one_error_or_plain_data(noise: bytes) -> None:
    with contextlib.suppress(SnapshotFormatError):
        load_plain(b"\x80\x04" + noise, "x")


@profile(deadline=None)
@given(plain, st.data())
def test_a_damaged_pickle_gives_one_error_or_plain_data(value: Any, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, 4))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SnapshotFormatError):
        load_plain(bytes(whole), "x")


@profile(deadline=None)
@given(plain, st.data())
def test_a_truncated_pickle_is_refused(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value, 4)
    with pytest.raises(SnapshotFormatError):
        load_plain(whole[: data.draw(st.integers(0, len(whole) - 1))], "x")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"segments": [1, Evil(tmp_path / "made")]}, protocol)
    with pytest.raises(SnapshotFormatError, match=r"calls for (posix|nt|os)\.mkdir; nothing of it was run"):
        load_plain(data, "evil.pickle")
    assert not (tmp_path / "made").exists()
    pickle.loads(data)
    assert (tmp_path / "made").exists()  # it was a real one


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (OrderedDict(a=1), "collections.OrderedDict"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (np.zeros(3), "numpy"),
        (print, "builtins.print"),
        (1j, "builtins.complex"),
    ],
)
def test_a_class_is_named(value: Any, name: str) -> None:
    for protocol in range(2, 6):
        with pytest.raises(SnapshotFormatError) as caught:
            load_plain(pickle.dumps([1, {"a": value}], protocol), "x")
        # protocol 2 writes Python 2's names
        assert name in str(caught.value) or (protocol == 2 and "__builtin__" in str(caught.value))
        assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (b"cos\nsystem\n.", "os.system"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"c\x1b[31mos\nsy\x07stem\n.", r"\?\[31mos\.sy\?stem"),
        (b"\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x93.", "a class"),
        (b"\x82\x01.", "a class"),
        (b"Px\n.", "a persistent id"),
        (b"NQ.", "a persistent id"),
        (b"]b.", "a class"),
        (b"]]R.", "a class"),
        (b"N\x85.", "a tuple"),
        (b"(NNt.", "a tuple"),
        (b"NN\x86.", "a tuple"),
        (b"K\x01K\x02\x86\x85.", "a tuple"),
        (b"\x8b\xff\xff\xff\x7f", "an integer of more than 9 bytes"),
        (b"\x8a\x0a1234567890.", "an integer of more than 9 bytes"),
        (b"I12\n.", "opcode 0x49"),
        (b"C\x01a.", "opcode 0x43"),
        (b"\x80\x06.", "protocol 6"),
        (b"X\xff\xff\xff\xff", "ends in the middle"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "ends in the middle"),
        (b"\x8c\x05ab.", "ends in the middle"),
        (b"]r\xff\xff\xff\xff.", "more places in memory than it can fill"),
        (b"h\x07.", "damaged"),
        (b"e.", "damaged"),
        (b"}]Ns.", "damaged"),
        (b"]NNs.", "damaged"),
        (b"X\x01\x00\x00\x00\xff.", "damaged"),
        (b"", "ends in the middle"),
    ],
)
def test_every_trick_is_refused_in_words(code: bytes, words: str) -> None:
    with pytest.raises(SnapshotFormatError, match=words):
        load_plain(b"\x80\x04" + code, "x")


def test_tricks_take_no_memory_and_end_no_process() -> None:
    """In a process that may take 1 GiB: lengths and memo places up to 2**63, and nesting a million deep."""
    code = """
import resource, struct
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from memplan.errors import SnapshotFormatError
from memplan.simulation.snapshots.safe_pickle import load_plain
deep = 10 ** 6
for tricky in (
    b"]r" + struct.pack("<I", 2**32 - 1) + b".",
    b"]r" + struct.pack("<I", 2**20 - 1) + b".",
    b"X" + struct.pack("<I", 2**32 - 1),
    b"\\x8d" + struct.pack("<Q", 2**62),
    b"\\x95" + struct.pack("<Q", 2**62) + b"N.",
    b"\\x8b" + struct.pack("<I", 2**31 - 1),
    b"]" * deep + b"a" * (deep - 1) + b".",
    b"}" + b"N" + b"]" * deep + b"a" * (deep - 1) + b"s.",
    b")" + b"\\x85" * deep + b"Ns.",
    b"}" + b")" * deep + b"\\x86" * (deep - 1) + b"Ns.",
    b"(" * deep + b".",
):
    try:
        load_plain(b"\\x80\\x04" + tricky, "x")
    except SnapshotFormatError:
        pass
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done.stderr


def test_shown_text_cannot_steer_a_terminal() -> None:
    assert shown("a\x1b[2J\nb\u202e\udc80") == "a?[2J?b??"
    assert len(shown("x" * 1000)) == 120


@pytest.mark.parametrize("opcode", [b"}", b"]", b"("])
def test_containers_of_nothing_are_refused(opcode: bytes) -> None:
    """A byte each here, 64 in memory."""
    with pytest.raises(SnapshotFormatError, match=r"could take \d{3}\.\d MiB of memory, 384\.0 MiB at most"):
        load_plain(b"\x80\x04" + opcode * (2_000_000 if opcode != b"]" else 4_100_000) + b".", "a.pickle")
