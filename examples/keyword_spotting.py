"""A keyword spotter that goes on learning on a device: exported as C, and repaired there when its sensor drifts.

    python examples/keyword_spotting.py           # in a folder that is removed again
    python examples/keyword_spotting.py FOLDER

The data is made up: each word is a pattern of 25 frames by 10 bands, in noise. The device is this machine: the C files
are compiled to a shared library and called from Python.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import memplan

WORDS, FRAMES, BANDS, BATCH = 6, 25, 10, 4


def make() -> nn.Module:
    """A DS-CNN for keyword spotting, a small one."""
    layers: list[nn.Module] = [nn.Conv2d(1, 24, (5, 4), 2, (2, 1)), nn.BatchNorm2d(24), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24), nn.ReLU()]
        layers += [nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, WORDS))


def heard(count: int, seed: int, drift: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Words in noise. A sensor that has drifted hears the upper bands too low, and all of them with an offset."""
    patterns = torch.randn(WORDS, 1, FRAMES, BANDS, generator=torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(WORDS, (count,), generator=drawn)
    sound = patterns[labels] + 1.2 * torch.randn(count, 1, FRAMES, BANDS, generator=drawn)
    gains = torch.linspace(1.0, -0.6, BANDS)
    return (sound * gains + 1.5 if drift else sound), labels


def train(model: nn.Module, steps: int = 120) -> None:
    """Train on the host, on a sensor as it should be."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        sound, labels = heard(16, seed=step + 10)
        optimizer.zero_grad()
        F.cross_entropy(model(sound), labels).backward()
        optimizer.step()


class Device:
    """The exported step, compiled for this machine: as much memory as the export says, and nothing else."""

    def __init__(self, exported: memplan.Exported) -> None:
        library = exported.folder / "device.so"
        source = str(exported.folder / f"{exported.name}.c")
        flags = ["-std=c99", "-O2", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, source, "-o", str(library), "-lm"], check=True)
        self.code, self.name = ctypes.CDLL(str(library.resolve())), exported.name
        self.state = (ctypes.c_float * ((exported.state + exported.arena) // 4))()
        self.weights = np.zeros(exported.trained + 2 * 5 * 24, np.float32)
        getattr(self.code, f"{self.name}_step").restype = ctypes.c_float
        self._call("init")

    def _call(self, function: str, *arrays: np.ndarray) -> float:
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
        return getattr(self.code, f"{self.name}_{function}")(self.state, *pointers)

    def learn(self, sound: torch.Tensor, labels: torch.Tensor) -> float:
        """Run one step; return its loss."""
        return self._call("step", sound.contiguous().numpy(), labels.int().numpy())

    def hear(self, sound: torch.Tensor) -> torch.Tensor:
        """Return the scores of a batch."""
        scores = np.zeros((BATCH, WORDS), np.float32)
        self._call("infer", sound.contiguous().numpy(), scores)
        return torch.from_numpy(scores)

    def save(self, file: Path) -> None:
        """Write the weights, as a device would send them."""
        self._call("get_weights", self.weights)
        self.weights.tofile(file)


def right(scores_of: object, drift: bool, seed: int = 5) -> float:
    """Return the share of 200 words that are recognised."""
    sound, labels = heard(200, seed, drift)
    scores = torch.cat([scores_of(part) for part in sound.split(BATCH)])  # type: ignore[operator]
    return float((scores.argmax(1) == labels).float().mean())


def main(folder: Path) -> None:
    """Train, export, drift, learn on the device, and bring the weights back."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make()
    train(model)
    step = {"targets": f"{BATCH}:int64<{WORDS}", "loss": F.cross_entropy, "budget": "128 KiB"}
    exported = memplan.export(
        model, f"{BATCH}x1x{FRAMES}x{BANDS}", optimizer=lambda p: torch.optim.SGD(p, lr=0.05), name="spotter",
        folder=folder, **step,
    )  # fmt: skip
    print(f"exported: {exported.ram} bytes of RAM, proven: {exported.verdict.proven}")
    device = Device(exported)
    print(f"words recognised on the device: {right(device.hear, drift=False):.0%}")
    print(f"after the sensor has drifted: {right(device.hear, drift=True):.0%}")
    for at in range(150):
        device.learn(*heard(BATCH, seed=1000 + at, drift=True))
    print(f"after 150 steps on the device: {right(device.hear, drift=True):.0%}")
    device.save(folder / "weights.bin")
    memplan.load_weights(model, folder / "weights.bin").eval()
    with torch.no_grad():
        print(f"with its weights in PyTorch: {right(model, drift=True):.0%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
