"""The input's gradient of strided convolutions, to the byte beside what torch's profiler saw."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import pytest
import torch
from truth.convolution_bytes import forward, gradient, only_avx512

from memplan.trace.semantics.layout import has_amx

pytestmark = only_avx512
Case = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]
KINDS: dict[str, list[Case]] = {
    "features of speech": [((2, 512, t), (512, 512, 3), {"stride": 2}) for t in (399, 499, 599, 699, 799, 899, 1599)],
    "features of speech, the last ones": [((1, 512, t), (512, 512, 2), {"stride": 2}) for t in (49, 99, 199, 1999)],
    # rows of a matrix product that are as fast by two numbers at a time but for the last bit of a float
    "ties": [((2, 16, t), (16, 16, 7), {"stride": 2}) for t in (1541, 1549, 1601, 1653, 1669, 1703, 1729)],
    "channels": [((2, c, 35, 35), (24, c, 3, 3), {"stride": 2}) for c in (1, 3, 17, 24, 40, 48, 64, 96, 160, 256)],
    "volumes": [((2, c, 9, 9, 9), (24, c, 3, 3, 3), {"stride": 2}) for c in (1, 24, 48, 64)],
    "single pixels": [((2, c, 35, 35), (24, c, 1, 1), {"stride": 2}) for c in (1, 40, 48, 64, 192)],
    "large kernels": [((2, c, 40, 40), (24, c, 16, 16), {"stride": 2}) for c in (8, 12, 32)],
    "groups": [((2, c, 41, 41), (n, c // 4, 3, 3), {"stride": 2, "groups": 4}) for c in (20, 32) for n in (12, 40, 80)],
    "groups, by steps that no kernel's row is a multiple of": [
        ((4, 512, 79), (8, 256, 64), {"stride": 5, "padding": 32, "groups": 2}),
        ((1, 80, 65, 42), (4, 40, 3, 3), {"stride": 2, "groups": 2}),
        ((1, 80, 95, 95), (32, 20, 5, 3), {"stride": 3, "padding": (0, 1), "groups": 4}),
        ((1, 512, 7, 7, 7), (20, 256, 4, 4, 4), {"stride": 2, "padding": (2, 2, 0), "groups": 2}),
    ],
    "left to other kernels, which are faster": [
        ((2, 64, 14, 14), (128, 64, 4, 4), {"stride": 2, "padding": 1}),
        ((2, 1, 28, 28), (64, 1, 4, 4), {"stride": 2, "padding": 1}),
        ((2, 1, 28, 28), (64, 1, 3, 3), {"stride": 2, "padding": 1}),
    ],
    "one channel": [((2, 1, 4000), (n, 1, k), {"stride": k // 2}) for n in (1, 64) for k in (100, 160, 200, 320, 400)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_scratch_is_what_the_profiler_saw(kind: str, threads: int) -> None:
    found = [gradient(size, weight, **how) for size, weight, how in KINDS[kind]]
    assert [predicted for predicted, _ in found] == [seen for _, seen in found]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "groups, by" not in kind])
@pytest.mark.skipif(
    has_amx() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="with tiles, other kernels run"
)
def test_scratch_in_bfloat16(kind: str, threads: int) -> None:
    found = [gradient(size, weight, **how, dtype=torch.bfloat16) for size, weight, how in KINDS[kind]]
    assert [predicted for predicted, _ in found] == [seen for _, seen in found]


@pytest.mark.parametrize("kind", ["channels", "volumes", "groups", "large kernels"])
def test_scratch_in_channels_last(kind: str, threads: int) -> None:
    found = [gradient(size, weight, **how, last=True) for size, weight, how in KINDS[kind]]
    assert [predicted for predicted, _ in found] == [seen for _, seen in found]


@pytest.mark.parametrize("length", [24, 199, 399, 449])
def test_a_transposed_convolution_runs_the_same_kernel(length: int, threads: int) -> None:
    predicted, seen = forward((2, 512, length), (512, 256, 3), stride=2, transposed=True)
    assert predicted == seen


def drawn(seed: int) -> list[Case]:
    """Shapes of all sizes."""
    draw, cases = random.Random(seed), []
    channels = (1, 2, 3, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
    while len(cases) < 20:
        dims, groups = draw.choice([1, 1, 2, 2, 3]), draw.choice([1, 1, 1, 2, 4])
        size = draw.randint(*{1: (10, 2000), 2: (5, 90), 3: (4, 14)}[dims])
        kernel = draw.choice({1: (1, 2, 3, 4, 5, 7, 10, 25, 64, 160), 2: (1, 2, 3, 4, 5, 7, 16), 3: (1, 2, 3, 4)}[dims])
        wide, narrow, batch = draw.choice(channels), draw.choice(channels), draw.choice([1, 2, 4])
        if wide % groups or narrow % groups or groups == wide == narrow or kernel > size:
            continue
        space, weight = (size,) * dims, (narrow, wide // groups, *(kernel,) * dims)
        stride = draw.choice([2, 2, 2, 3, 4, 5, 8])
        if batch * max(wide, narrow) * prod(space) < 1e7 and batch * prod(weight) * prod(space) < 2e9 * stride**dims:
            how = {"stride": stride, "padding": draw.choice([0, kernel // 2]), "groups": groups}
            cases.append(((batch, wide, *space), weight, how))
    return cases


def check_drawn(seed: int) -> None:
    found = {case[:2] + tuple(case[2].items()): gradient(*case[:2], **case[2]) for case in drawn(seed)}
    assert {case: predicted for case, (predicted, _) in found.items()} == {c: seen for c, (_, seen) in found.items()}


@pytest.mark.parametrize("seed", range(3))
def test_shapes_of_all_sizes(seed: int, threads: int) -> None:
    check_drawn(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 20))
def test_shapes_of_all_sizes_slow(seed: int, threads: int) -> None:
    check_drawn(seed)
