"""Files as JSON, from strangers: bounded in memory before they take it, read only from files."""

from __future__ import annotations

import gzip
import json
import math
import os
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from environment import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan import Plan, Trace
from memplan._json import Measured, Unreadable, from_plain, memory_of, read_text, shown, to_plain
from memplan.errors import FormatError, MemplanError, SnapshotFormatError
from memplan.reports.html.saved_results import READERS, result_of
from memplan.simulation.snapshots.read import read_snapshot
from memplan.studies.guarding.baseline import Baseline

DATA = Path(__file__).parent / "data"
texts = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


def taken(text: str) -> int:
    """Bytes that Python really takes for the text and what it parses to."""
    tracemalloc.start()
    value = json.loads(text)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del value
    return most + len(text)


@settings(max_examples=examples(60), deadline=None)
@given(values, st.integers(1, 400), st.booleans(), st.booleans())
def test_the_bound_on_memory_holds(value: Any, times: int, ascii_only: bool, compact: bool) -> None:
    separators = (",", ":") if compact else None
    text = json.dumps([value] * times, ensure_ascii=ascii_only, separators=separators)
    assert taken(text) <= memory_of(text) + 2000  # of the interpreter's own


@pytest.mark.parametrize(
    "part",
    ["{}", "[]", '{"a":0}', "[0]", "1234", "1e5", '"ab"', '"\u0100"', '{"a":{"b":{}}}',
     "{" + ",".join(f'"{key}":0' for key in "abcdef") + "}"],
)  # fmt: skip
def test_the_bound_holds_where_little_text_takes_much(part: str) -> None:
    text = f"[{','.join([part] * 20_000)}]"
    assert taken(text) <= memory_of(text)


@pytest.mark.parametrize("count", [100, 43_690, 87_381])  # a mapping is largest just after it has grown
def test_the_bound_holds_for_large_mappings(count: int) -> None:
    text = json.dumps({str(key): 0 for key in range(count)}, separators=(",", ":"))
    assert taken(text) <= memory_of(text)


@pytest.mark.parametrize("part", [b'{"":0},', b"[],", b"{},", b'["\xc4\x80"],'])
def test_a_packed_file_is_bounded_by_its_own_bytes(part: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bomb.json.gz"
    file.write_bytes(gzip.compress(b'{"segments":[' + part * ((16 << 20) // len(part)) + b"0]}", 6))
    assert file.stat().st_size < 100_000
    with pytest.raises(SnapshotFormatError, match=r"reading it could take \S+ \S+ of memory, 384\.0 MiB at most"):
        read_snapshot(file)


def test_numbers_of_many_digits_are_refused_in_a_line() -> None:
    text = (DATA / "mlp.plan.json").read_text()
    for number in ("9" * 5000, "9" * 400, "1e400", "NaN", "-Infinity", "1e300", "-1"):
        changed = text.replace('"seconds":', f'"seconds":{number},"x":', 1)
        with pytest.raises(FormatError) as raised:
            Plan.from_json(changed)
        assert len(str(raised.value)) < 400
    with pytest.raises(FormatError, match="NaN is no number"):
        Trace.from_json('{"format":"memplan.trace","end":NaN}')


FORMATS: dict[str, Callable[[str], Any]] = {
    **{name: partial(result_of, source="a.json") for name in READERS},
    "memplan.baseline": Baseline.from_json,
    "a memplan.trace": Trace.from_json,
    "a memplan.plan": Plan.from_json,
    "a memplan.sweep": memplan.Sweep.from_json,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("number", ["1" * 5000, "-" + "1" * 5000])
def test_what_python_does_not_convert_is_refused_in_our_words(name: str, number: str) -> None:
    """Python's own message asks for a setting of its own, which a reader of a file has no use for."""
    with pytest.raises(MemplanError) as raised:
        FORMATS[name](f'{{"format":"{name.split()[-1]}","schema":1,"steps":[{{"peak":{number}}}]}}')
    assert "it has a number of more than 4300 digits; 19 are read at most" in str(raised.value)
    assert "Expected" in str(raised.value)
    assert "the memplan that wrote it" in str(raised.value)
    assert "set_int_max" not in str(raised.value)


def test_large_numbers_in_lists_are_shown_without_their_digits() -> None:
    assert shown([10**5000, {"a": 12}]) == "[a number of many digits, {'a': 12}]"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300, 2.0**63, -0.5])
def test_numbers_out_of_range_are_refused(number: float) -> None:
    with pytest.raises(Unreadable, match="out of range"):
        from_plain(float, number, "it")


def test_only_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="a device"):
        read_text("/dev/zero")
    with pytest.raises(FormatError, match="a device"):
        Trace.load("/dev/zero")
    with pytest.raises(FormatError, match="a device"):
        Plan.load("/dev/zero")
    with pytest.raises(IsADirectoryError):
        Trace.load(tmp_path)
    assert os.path.getsize(DATA / "mlp.plan.json") == len(read_text(DATA / "mlp.plan.json"))


def test_a_file_of_mistakes_takes_no_more_than_one_of_none() -> None:
    """The first mistake is the message: to collect 100,000 of them would take some hundred times the file."""
    plain: dict[str, Any] = {"names": [0] * 100_000}
    tracemalloc.start()
    with pytest.raises(Unreadable, match=r"^it\.names\[0\] is 0, not str$"):
        from_plain(Named, plain, "it")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


@dataclass(frozen=True)
class Inner:
    size: int
    error: Measured | None = None


@dataclass(frozen=True)
class Named:
    names: tuple[str, ...] = ()
    inner: Mapping[str, tuple[Inner, ...]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"inner": {"a": [{"size": 1}, {"size": "1"}]}}, "it.inner['a'][1].size is '1', not int"),
        ({"inner": {"a\x1b": [{}]}}, r"it.inner['a\x1b'][0] lacks 'size'"),
        ({"inner": {"a": [{"size": 1, "b\n": 2}]}}, r"it.inner['a'][0] has an unknown 'b\n'"),
        ({"inner": {"a": {"size": 1}}}, "it.inner['a'] is {'size': 1}, not a list"),
        ({"inner": [3]}, "it.inner is [3], not a mapping"),
        ([], "it is [], not a mapping"),
    ],
)
def test_an_error_names_the_place(plain: Any, message: str) -> None:
    with pytest.raises(Unreadable) as raised:
        from_plain(Named, plain, "it")
    assert str(raised.value) == message


@given(st.floats() | st.none())
def test_a_measured_error_may_be_any_number(value: float | None) -> None:
    text = json.dumps(to_plain({"size": 3, "error": value}), allow_nan=False)
    again = from_plain(Inner, json.loads(text), "it").error
    assert again == value or (value is not None and again is not None and math.isnan(value) and math.isnan(again))
