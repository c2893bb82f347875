"""How the peak grows with the batch, where two recordings do not say it."""

from __future__ import annotations

import pytest
import torch
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


class _ApartAtOne(nn.Module):
    """Takes ``most`` rows at once where there is one sample: the line from there to two samples is no line."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.line = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.expand(self.most, -1) if x.shape[0] == 1 else x
        return torch.cat([self.line(rows), rows])


@pytest.mark.parametrize("most", [3000, 1])
def test_a_batch_of_one_that_is_treated_apart_is_no_line(most: int) -> None:
    found = memplan.explain(lambda: _ApartAtOne(most), "1x1024", device="cpu")
    peaks = [memplan.explain(lambda: _ApartAtOne(most), f"{batch}x1024", device="cpu").timeline.peak_allocated
             for batch in (1, 2, 3)]  # fmt: skip
    on_a_line = abs(peaks[2] - (2 * peaks[1] - peaks[0])) <= 0.02 * peaks[2]
    assert on_a_line == (most == 1)
    assert (found.scaling is not None) == on_a_line
