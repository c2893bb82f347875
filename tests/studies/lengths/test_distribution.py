"""Distributions of lengths are read from texts and files, and drawn from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from memplan.errors import InputError
from memplan.studies.lengths.distribution import draw, padded, parse_lengths


def test_shares_and_files_are_read(tmp_path: Path) -> None:
    assert parse_lengths("512:0.6, 2048:0.3,8192:0.1") == {512: 0.6, 2048: 0.3, 8192: 0.1}
    file = tmp_path / "lengths.txt"
    file.write_text("512\n128\n\n512\n512\n")
    assert parse_lengths(str(file)) == {128: 0.25, 512: 0.75}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:0.5,512:0.5", "the length '0'"),
        ("512:0.6,1024:0.3", "add up to 0.9"),
        ("512:0.6,512:0.4", "names a length twice"),
        ("512:-0.5,1024:1.5", "'512:-0.5'"),
        ("512:nan", "'512:nan'"),
        ("512:0.5,1024", "'1024'"),
        ("no/such/file", "is no file to read"),
        ("512", "is no file to read"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_lengths(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [("", "it is empty"), ("\n\n", "it is empty"), ("512\n0\n", ":2: .*'0'")]
)
def test_a_file_without_lengths_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        parse_lengths(str(file))


def test_draws_are_the_same_for_a_seed_and_follow_the_shares() -> None:
    shares = {512: 0.6, 2048: 0.3, 8192: 0.1}
    drawn = draw(shares, 10_000, seed=3)
    assert drawn == draw(shares, 10_000, seed=3) != draw(shares, 10_000, seed=4)
    counts = Counter(drawn)
    for length, share in shares.items():  # five standard deviations of a binomial
        assert abs(counts[length] - 10_000 * share) < 5 * (10_000 * share * (1 - share)) ** 0.5


def test_lengths_are_padded_up() -> None:
    assert padded((1, 63, 64, 65, 200), 64) == (64, 64, 64, 128, 256)
