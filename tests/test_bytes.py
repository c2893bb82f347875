from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan._bytes import format_bytes, parse_bytes, round_to_blocks
from memplan.errors import UnitError

# Written out here, not taken from the code under test.
UNITS = {
    "": 1,
    "B": 1,
    "K": 1000,
    "KB": 1000,
    "M": 1000**2,
    "MB": 1000**2,
    "G": 1000**3,
    "GB": 1000**3,
    "T": 1000**4,
    "TB": 1000**4,
    "Ki": 2**10,
    "KiB": 2**10,
    "Mi": 2**20,
    "MiB": 2**20,
    "Gi": 2**30,
    "GiB": 2**30,
    "Ti": 2**40,
    "TiB": 2**40,
}
# No deadline: a busy machine is no failure.
relaxed = settings(deadline=None)
sizes = st.one_of(
    st.integers(0, 2**13),
    st.integers(0, 2**60),
    # the neighbourhood of each unit, where rounding rolls over
    st.builds(lambda power, delta: max(0, 2 ** (10 * power) + delta), st.integers(1, 5), st.integers(-9999, 9999)),
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8 GiB", 8589934592),
        ("8GB", 8_000_000_000),
        ("512 KiB", 524288),
        ("1.5MiB", 1572864),
        ("4k", 4000),
        ("4 Ki", 4096),
        (" 8  gib ", 8589934592),
        ("0", 0),
        ("17", 17),
        ("17 B", 17),
        ("0.0001 KB", 0),
        (0, 0),
        (8589934592, 8589934592),
    ],
)
def test_parse(text: str | int, number: int) -> None:
    assert parse_bytes(text) == number


@relaxed
@given(st.integers(0, 10**6), st.text("0123456789", max_size=6), st.sampled_from(sorted(UNITS)), st.data())
def test_parse_agrees_with_fractions(whole: int, decimals: str, unit: str, data: st.DataObject) -> None:
    if UNITS[unit] == 1:
        decimals = ""
    written = data.draw(st.sampled_from([unit, unit.lower(), unit.upper(), unit.swapcase()]))
    number = f"{whole}.{decimals}" if decimals else str(whole)
    exact = (whole + Fraction(int(decimals or "0"), 10 ** len(decimals))) * UNITS[unit]
    space = data.draw(st.sampled_from(["", " ", "  "]))
    assert parse_bytes(number + space + written) == math.floor(exact)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "GiB",
            "8 XiB",
            "eight",
            "-1",
            "-1 GiB",
            "1.5",
            "1.5 B",
            "8 GiBs",
            "1 2 GiB",
            "1..5 GiB",
            "1.GiB",
        ),
        *("inf", "nan", "8\nGiB\n8", "٨ GiB", -1, 1.5, True, None, b"8"),
    ],
)
def test_what_is_no_number_of_bytes_is_refused_with_what_to_write(value: Any) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(value)
    assert str(caught.value) == (
        f"{value!r} is not a number of bytes. Expected an integer from 0, or a number with one of the units "
        "KiB, MiB, GiB, TiB, KB, MB, GB, TB. Write it like '8 GiB' (8589934592 bytes), "
        "'8 GB' (8000000000 bytes) or 8589934592."
    )


def test_a_number_of_many_digits_is_refused_in_a_line_of_bounded_length() -> None:
    with pytest.raises(UnitError, match=r"^'999.*Write it like '8 GiB'") as caught:
        parse_bytes("9" * 5000)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("value", ["8 Gbit", "8gibit", "8 Gbits", "100 Mbps", "64 bits"])
def test_bits_are_refused_as_bits(value: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(value)
    assert str(caught.value) == (
        f"{value!r} is a number of bits. Expected a number of bytes. Divide it by 8 and write it like '1 GB'."
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (-1, "-1 B"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**3 - 1, "1.0 GiB"),
        (8589934592, "8.0 GiB"),
        (2_040_109_466, "1.9 GiB"),
        (5 * 1024**5, "5120.0 TiB"),
    ],
)
def test_format(number: int, text: str) -> None:
    assert format_bytes(number) == text


@relaxed
@given(sizes)
def test_format_is_the_nearest_tenth_of_the_largest_unit(number: int) -> None:
    text = format_bytes(number)
    shown = re.fullmatch(r"(\d+(?:\.\d)?) (B|[KMGT]iB)", text)
    assert shown is not None
    value, unit = Fraction(shown[1]), UNITS[shown[2]]
    assert abs(value * unit - number) <= (0 if unit == 1 else Fraction(unit, 20))
    assert value < 1024 or unit == 2**40
    assert value >= 1 or unit == 1


@relaxed
@given(sizes)
def test_round_trip(number: int) -> None:
    again = parse_bytes(format_bytes(number))
    # half of the last digit shown, and the fraction of a byte that parse_bytes drops
    assert abs(again - number) <= number / 20 + 1
    assert format_bytes(again) == format_bytes(number)
    assert format_bytes(-number) == ("-" if number else "") + format_bytes(number)


@relaxed
@given(sizes, sizes)
def test_more_bytes_never_read_as_less(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert parse_bytes(format_bytes(low)) <= parse_bytes(format_bytes(high))


@given(st.integers(0, 1 << 40))
def test_a_block_is_the_smallest_multiple_of_512_that_holds_it(size: int) -> None:
    found = round_to_blocks(size)
    assert found % 512 == 0
    assert 0 <= found - size < 512
