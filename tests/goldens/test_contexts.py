"""The CUDA context that is expected, beside what it took in each process that recorded a golden file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from goldens.handmade import ROOT

from memplan.devices.context import READINGS, context_of, expected_context

FILES = sorted((ROOT / "goldens").glob("nvidia-*/*/*.json.gz"))
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.linear.")


def ratio(path: Path) -> float:
    """Return the bytes that NVML had for the process, less torch's, over the expected bytes."""
    golden = json.loads(gzip.decompress(path.read_bytes()))
    low, _ = context_of(tuple(golden["gpu"]["capability"]), golden["gpu"]["multiprocessors"])
    names = golden["calls"]
    expected = expected_context(
        low,
        convolutions=any(name.startswith("aten.convolution") for name in names),
        products=any(name.startswith(PRODUCTS) for name in names),
    )
    return golden["context"]["bytes"] / expected


@pytest.mark.skipif(not FILES, reason="no golden recordings here")
def test_what_real_processes_took_is_near_the_expected_context() -> None:
    ratios = sorted(map(ratio, FILES))
    assert READINGS[0] <= ratios[0]
    assert ratios[-1] <= READINGS[1]
    assert 0.9 < ratios[len(ratios) // 2] < 1.1
