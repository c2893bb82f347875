"""Laws give what layers really hold at places that were not looked at."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from memplan.studies.capacity.growth_laws import polynomial, roundest, roundness, storage_law, stride_of


def test_a_line_and_a_parabola() -> None:
    line = polynomial([1, 5], [[10, 3], [50, 3]], float)
    assert line(100).tolist() == [1000.0, 3.0]
    square = polynomial([10, 20, 40], [[n * n + 7 * n + 3] for n in (10, 20, 40)], float)
    assert square(100)[0] == pytest.approx(100 * 100 + 700 + 3)
    assert square(15)[0] == pytest.approx(15 * 15 + 105 + 3)


def test_bytes_do_not_fall_again() -> None:
    law = polynomial([10, 20, 40], [[100], [200], [220]], float)
    assert [float(law(n)[0]) for n in (15, 20, 30, 80)] == pytest.approx([150, 200, 210, 260])


@settings(deadline=None, max_examples=300)
@given(st.integers(2, 1000), st.integers(0, 999), st.lists(st.integers(1, 10**7), min_size=3, max_size=6, unique=True))
def test_a_stride_gives_every_count(stride: int, ahead: int, places: list[int]) -> None:
    counts = [(place + ahead % stride) // stride for place in places]
    found = stride_of(places, counts)
    if found is not None:
        assert [(place + found[1]) // found[0] for place in places] == counts


@pytest.mark.parametrize("pad", [7, 14, 32, 100, 512, 1000])
def test_what_attention_in_windows_pads_is_known(pad: int) -> None:
    def bytes_of(tokens: int) -> list[int]:
        x = torch.empty(2, tokens, 4, device="meta")
        padded = functional.pad(x, (0, 0, 0, -tokens % pad))
        return [
            one.numel() * 4 for one in (x, padded, padded.view(-1, pad, 4).transpose(1, 2) @ padded.view(-1, pad, 4))
        ]

    places = [1024, 2048, 167_144, 201_041]
    law = storage_law(places, [bytes_of(place) for place in places], float)
    for place in (167_000, 167_500, 300_001, 5_000_000):
        assert numpy.rint(law(place)).tolist() == bytes_of(place)


def test_what_strided_convolutions_hold_is_known() -> None:
    down = [nn.Conv1d(2, 2, 15, stride=4, padding=7, device="meta") for _ in range(4)]
    pool = nn.Sequential(nn.MaxPool1d(2), nn.MaxPool1d(2)).to("meta")

    def bytes_of(length: int) -> list[int]:
        x = torch.empty(1, 2, length, device="meta")
        held = [x, pool(x)]
        for layer in down:
            x = layer(x)
            held.append(x)
        return [4 * one.numel() for one in held]

    places = [1000, 2000, 12_345, 77_777]
    law = storage_law(places, [bytes_of(place) for place in places], float)
    for place in (12_400, 80_003, 1_000_001):
        assert numpy.rint(law(place)).tolist() == bytes_of(place)


def test_images_that_are_padded_grow_with_the_square() -> None:
    def bytes_of(size: int) -> list[int]:
        padded = -(-size // 32) * 32
        return [4 * size * size, 12 * padded * padded, 12 * (padded // 4) ** 2, 640]

    places = [64, 128, 333, 500]
    law = storage_law(places, [bytes_of(place) for place in places], lambda place: float(place**2))
    for place in (340, 353, 1025):
        assert numpy.allclose(law(place), bytes_of(place), rtol=1e-12)


@given(st.integers(0, 10**6), st.integers(2, 10**5))
def test_the_roundest_number_is_as_round_as_any(low: int, width: int) -> None:
    high = low + width
    found = roundest(low, high)
    assert low < found < high
    step = max(1, width // 3000)
    assert all(roundness(found) >= roundness(number) for number in range(low + 1, high, step))


def test_roundness() -> None:
    assert [roundness(n) for n in (7, 12, 1000, 1024, 3000, 6144)] == [1, 4, 1000, 1024, 1000, 2048]
