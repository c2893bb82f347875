"""How the peak grows with the batch, where two recordings do not say it."""

from __future__ import annotations

import pytest
from torch import nn

import memplan
from memplan.explanation.scaling import scaling_of
from memplan.simulation.peaks import timeline_of


def test_other_kernels_at_twice_the_batch_are_no_line() -> None:
    """A convolution of few channels takes another kernel at batch 1: more bytes than at batch 2."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.Conv3d(8, 2, 3, padding=1))

    found = memplan.explain(make, "1x1x32x32x32", device="cpu")
    if found.scaling is None:
        assert any("at batch 2 other kernels run" in note for note in found.notes)
        assert "per sample" not in str(found)
    else:  # another processor's kernels
        assert all(line.per_sample >= 0 and line.fixed >= 0 for line in found.scaling.lines)


@pytest.mark.parametrize(("once", "twice"), [(30, 13), (10, 30)])
def test_a_line_that_falls_or_begins_below_zero_is_seen(once: int, twice: int) -> None:
    one = timeline_of("cpu", [(1, once, once)], (0, 0, 2))
    two = timeline_of("cpu", [(1, twice, twice), (2, twice, twice)], (0, 0, 3))
    assert min(min(line.fixed, line.per_sample) for line in scaling_of(one, two, 1).lines) < 0
