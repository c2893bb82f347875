"""What headroom does to trainings in weights of eight bits, by their updates in PyTorch.

    python benchmarks/int8_headroom.py

Prints, for each headroom: accuracy over five seeds with its sample standard deviation, and the share of weights at
their bounds in the end. "drift": a trained network of `drifting_bars` goes on for 400 steps of one image
after its sensor has drifted. "random": 1,200 steps from random weights.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
for _path in (ROOT, ROOT / "tests", ROOT / "src"):
    sys.path.insert(0, str(_path))

from tests.models.drifting_bars import bars, small_cnn  # noqa: E402

from memplan.exporting.kernels.frozen_weights import LARGEST_INT8, trainable  # noqa: E402

HEADROOMS = (None, 1.0, 1.25, 1.5, 2.0, 3.0)
SEEDS = range(1, 6)


def seen(images: torch.Tensor) -> torch.Tensor:
    """Return images as the network sees them."""
    return (images.float() - 100) / 50


def settled(seed: int) -> nn.Module:
    """Return a network that knows images of the sensor before its drift."""
    torch.manual_seed(seed)
    model, (images, classes) = small_cnn(), bars(600, 10 * seed + 1, drifted=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(120):
        at = torch.arange(32) + 32 * (step % 18)
        optimizer.zero_grad()
        F.cross_entropy(model(seen(images[at])), classes[at]).backward()
        optimizer.step()
    return model.eval()


def random(seed: int) -> nn.Module:
    """Return a network of random weights; its norms have the statistics of images."""
    torch.manual_seed(seed)
    model = small_cnn()
    with torch.no_grad():
        for _ in range(30):
            model(seen(bars(64, 10 * seed + 1, drifted=True)[0]))
    return model.eval()


def trained(model: nn.Module, seed: int, headroom: float | None, images: int, steps: int, rate: float) -> list[float]:
    """Train in eight bits (None: in floats). Return the accuracy, and the share of weights at their bounds."""
    (new, classes), (test, wanted) = (bars(n, 10 * seed + k, drifted=True) for n, k in ((images, 2), (300, 3)))
    drawn, scales = torch.Generator().manual_seed(seed), dict[nn.Parameter, torch.Tensor]()
    for weight in model.parameters():
        if headroom is not None and weight.dim() > 1:
            rounded = trainable(weight.detach().numpy(), headroom)
            scales[weight] = torch.from_numpy(rounded.scales).reshape(-1, *[1] * (weight.dim() - 1))
            weight.data = torch.from_numpy(rounded.floats)
    for step in range(steps):
        at = [step % images]
        model.zero_grad()
        F.cross_entropy(model(seen(new[at])), classes[at]).backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None, "it is trained"
                if weight not in scales:
                    weight -= rate * weight.grad
                    continue
                scale, chance = scales[weight], torch.rand(weight.shape, generator=drawn)
                moved = (weight / scale).round() + torch.floor(chance - rate * weight.grad / scale)
                weight.copy_(scale * moved.clamp(-LARGEST_INT8, LARGEST_INT8))
    with torch.no_grad():
        right = (model(seen(test)).argmax(1) == wanted).float().mean().item()
        bound = [((w / s).round().abs() >= LARGEST_INT8).float().mean().item() for w, s in scales.items()]
    return [right, statistics.mean(bound or [0.0])]


def main() -> None:
    """Print a row for each headroom of each training."""
    torch.set_num_threads(1)
    for name, make, options in (("drift", settled, (200, 400, 0.01)), ("random", random, (400, 1200, 0.02))):
        for headroom in HEADROOMS:
            right, bound = zip(*(trained(make(seed), seed, headroom, *options) for seed in SEEDS), strict=True)
            mean, spread = statistics.mean(right), statistics.stdev(right)
            print(f"{name}, {headroom or 'float32'}: {mean:.1%} ± {spread:.1%}, {statistics.mean(bound):.1%} at bounds")


if __name__ == "__main__":
    main()
