"""Convolutions of long kernels, which are a matrix product: to the byte beside what torch's profiler saw."""

from __future__ import annotations

from typing import Any

import pytest
from truth.convolution_bytes import forward, gradient, only_avx512

pytestmark = only_avx512
Case = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]
KINDS: dict[str, list[Case]] = {
    "positions of speech, in groups": [
        ((2, 768, 49), (768, 48, 128), {"padding": 64, "groups": 16}),
        ((1, 768, 499), (768, 48, 128), {"padding": 64, "groups": 16}),
        ((2, 32, 49), (32, 8, 128), {"padding": 64, "groups": 4}),
        ((4, 64, 200), (64, 16, 100), {"padding": 50, "groups": 4}),
    ],
    "to one channel": [((2, c, 1398), (1, c, k), {"padding": k // 2}) for c in (24, 128, 192) for k in (100, 256, 400)],
    "from one channel": [((2, 1, 1500), (c, 1, k), {"padding": k // 2}) for c in (12, 64) for k in (160, 256, 400)],
    "from one channel, unpadded": [((1, 1, 1500), (c, 1, k), {}) for c in (4, 12, 64) for k in (160, 256, 400)],
    "to many": [((4, 20, 192), (384, 20, 64), {"padding": 32, "stride": 8})],
    "padded by more than a row of the kernel": [((4, 80, 195), (12, 80, 64), {"padding": 32})],
    "images": [((2, 8, 40, 40), (n, 8, 16, 16), {"padding": 8}) for n in (4, 24)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward(kind: str, threads: int) -> None:
    found = [forward(size, weight, **how) for size, weight, how in KINDS[kind]]
    assert [predicted for predicted, _ in found] == [seen for _, seen in found]


@pytest.mark.parametrize("of", ["input", "weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient(kind: str, of: str, threads: int) -> None:
    found = [gradient(size, weight, **how, of=of) for size, weight, how in KINDS[kind]]
    assert [predicted for predicted, _ in found] == [seen for _, seen in found]
