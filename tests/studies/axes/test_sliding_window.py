"""Inference of a volume in patches takes what MONAI's own function really takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

import memplan
from memplan.errors import InputError
from memplan.studies.axes.sliding_window import Sliding, Window
from memplan.studies.axes.subject import Subject
from memplan.studies.sweeps.points import record_point
from memplan.trace.recording.session import Target
from memplan.trace.step import StepOptions


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 5, 1))


def coarse() -> nn.Module:
    """Its output has half of the input's size."""
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(4, 3, 1))


def narrow() -> nn.Module:
    """Of few channels: of 27 patches two at a time the last comes alone, and goes by torch's own im2col."""
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 5, 3, padding=1))


CASES = [
    (segmenter, (40, 40, 24), 16, 0.25, 4),
    (coarse, (32, 32, 32), 16, 0.5, 2),
    *slow(
        (segmenter, (20, 12, 20), 16, 0.25, 1),
        (narrow, (32, 32, 32), 16, 0.5, 4),
        (segmenter, (40, 40, 24), 16, 0.5, 1),
        (segmenter, (64, 32, 32), 32, 0.25, 2),
        (narrow, (32, 32, 32), 16, 0.5, 2),
    ),
]


@pytest.mark.parametrize(("make", "volume", "patch", "overlap", "batch"), CASES)
def test_the_peak_is_what_monai_takes(
    make: Callable[[], nn.Module], volume: tuple[int, ...], patch: int, overlap: float, batch: int
) -> None:
    inferers = pytest.importorskip("monai.inferers")

    def build() -> Callable[[], Any]:
        model, image = make().eval(), torch.zeros(1, 1, *volume)

        def step() -> None:
            with torch.no_grad():
                inferers.sliding_window_inference(image, (patch,) * 3, batch, model, overlap=overlap)

        return step

    real = memplan.simulate(memplan.measure(build, device="cpu")).peak_allocated
    options = StepOptions((f"1x1x{patch}x{patch}x{patch}",)).checked()
    found = record_point(Subject(make, options, window=Window(volume, overlap, batch)), Target("cpu")).bytes
    assert found is not None
    assert found.peak == pytest.approx(real, rel=0.01)
    scale = 8 if make is coarse else 1
    covered = [max(size, patch) for size in volume]
    classes = 3 if make is coarse else 5
    assert found.aggregation == 4 * (classes + 1) * covered[0] * covered[1] * covered[2] // scale


@pytest.mark.parametrize(("make", "volume", "patch", "overlap", "batch"), CASES)
def test_the_result_is_what_monai_gives(
    make: Callable[[], nn.Module], volume: tuple[int, ...], patch: int, overlap: float, batch: int
) -> None:
    inferers = pytest.importorskip("monai.inferers")
    model, image = make().eval(), torch.randn(1, 1, *volume)
    with torch.no_grad():
        right = inferers.sliding_window_inference(image, (patch,) * 3, batch, model, overlap=overlap)
        ours = Sliding(model, (patch,) * 3, Window(volume, overlap, batch))(image)
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (Window(()), "a volume of"),
        (Window((0, 8)), "sizes above 0"),
        (Window((8, 8), 1.0), "0 <= overlap < 1"),
        (Window((8, 8), 0.5, 0), "0 patches at a time"),
    ],
)
def test_a_window_that_cannot_be_is_refused(window: Window, words: str) -> None:
    with pytest.raises(InputError, match=words):
        window.checked()


def test_a_patch_has_the_dimensions_of_the_volume() -> None:
    subject = Subject(segmenter, StepOptions(("1x1x16x16",)).checked(), window=Window((32, 32, 32)))
    with pytest.raises(InputError, match=r"1 input\(s\) for a volume of 32x32x32\. Expected one input, a patch"):
        subject.build(on_card=False)
