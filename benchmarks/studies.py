"""Sweeps and `largest` against measured steps, and the time that they take.

    python benchmarks/studies.py

Writes benchmarks/results/studies.json: the fixed part and the slope of sweeps beside those of steps that really ran on
the CPU; the recordings that `largest` took, and whether its answer fits and the next value does not when they run; the
seconds of 40 points of a 3D U-Net in two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import memplan
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.largest import find_largest, room_of
from memplan.trace.step import StepOptions, build_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import resnet18  # noqa: E402
import unet3d  # noqa: E402


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)


LINES: list[tuple[str, Callable[[], nn.Module], str, str, tuple[int, ...], Any]] = [
    ("ResNet-18, batch", resnet18.make, "batch", "{}x3x64x64", (8, 16, 32, 48), None),
    ("ResNet-18, batch, AdamW", resnet18.make, "batch", "{}x3x64x64", (32, 48, 64, 96), torch.optim.AdamW),
    ("ResNet-18, size", resnet18.make, "size", "4x3x{0}x{0}", (96, 128, 160, 192), None),
    ("3D U-Net, size", unet3d.make, "size", "1x1x{0}x{0}x{0}", (48, 64, 80, 96), None),
    ("3D U-Net, batch", unet3d.make, "batch", "{}x1x48x48x48", (2, 3, 4, 6), None),
    ("Transformer encoder, batch", encoder, "batch", "{}x64x64", (8, 16, 32, 64), None),
]
BUDGETS: list[tuple[str, Callable[[], nn.Module], str, str, str, int]] = [
    ("ResNet-18, batch in 512 MiB", resnet18.make, "batch", "{}x3x64x64", "512 MiB", 1),
    ("ResNet-18, size in 512 MiB", resnet18.make, "size", "2x3x{0}x{0}", "512 MiB", 32),
    ("3D U-Net, patch in 512 MiB", unet3d.make, "patch", "1x1x{0}x{0}x{0}", "512 MiB", 16),
    ("Transformer encoder, sequence in 64 MiB", encoder, "sequence", "4x{}x64", "64 MiB", 1),
]


def peak_of(make: Callable[[], nn.Module], given: str, optimizer: Any = None) -> int:
    build = build_of(make, StepOptions((given,), optimizer=optimizer).checked())
    return memplan.simulate(memplan.measure(build, device="cpu")).peak_allocated


def line(name: str, make: Any, axis: str, form: str, values: tuple[int, ...], optimizer: Any) -> dict[str, Any]:
    (fit,) = memplan.sweep(make, {axis: values}, form.format(values[0]), optimizer=optimizer, device="cpu", jobs=1).fits
    dims = form.count("{0}") if axis == "size" else 1
    measured = [peak_of(make, form.format(value), optimizer) for value in fit.values]
    slope, fixed = numpy.polyfit([value**dims for value in fit.values], measured, 1)
    return {
        "name": name, "values": fit.values, "unit": fit.unit, "residual": fit.residual,
        "fixed": fit.fixed, "measured_fixed": float(fixed), "slope": fit.slope, "measured_slope": float(slope),
        "fixed_off": fit.fixed / float(fixed) - 1, "slope_off": fit.slope / float(slope) - 1,
        "fixed_off_of_peak": (fit.fixed - float(fixed)) / max(measured),
    }  # fmt: skip


def largest(name: str, make: Any, axis: str, form: str, budget: str, step: int) -> dict[str, Any]:
    room = room_of("cpu", budget)
    start = {"batch": 8, "size": 64, "patch": 48, "sequence": 16}[axis]
    subject = Subject(make, StepOptions((form.format(start),)).checked())
    begin = time.perf_counter()
    found = find_largest(subject, axis, room, divisible=step)
    seconds = time.perf_counter() - begin
    peaks = [peak_of(make, form.format(value)) for value in (found.value, found.value + step)]
    return {
        "name": name, "value": found.value, "recordings": len(found.tried), "seconds": seconds, "limit": room.limit,
        "measured_peak": peaks[0], "measured_peak_of_next": peaks[1],
    }  # fmt: skip


def speed() -> dict[str, Any]:
    axes = {"batch": (1, 2, 3, 4), "size": (48, 64, 80, 96, 112), "width": (1, 2)}

    def make(width: int) -> nn.Module:
        from monai.networks.nets.unet import UNet

        channels = tuple(16 * width * 2**level for level in range(5))
        return UNet(3, 1, 3, channels, (2, 2, 2, 2), num_res_units=2, norm="batch")

    # what this machine does besides makes seconds longer: the processor's own are beside them, of some points here
    few = {"batch": (1, 4), "size": (48, 112), "width": (1,)}
    memplan.sweep(make, {"batch": (1,), "width": (1,)}, "1x1x64x64x64", device="cpu", jobs=1)
    begin = time.process_time()
    alone = memplan.sweep(make, few, "1x1x64x64x64", optimizer=torch.optim.AdamW, device="cpu", jobs=1)
    each = (time.process_time() - begin) / len(alone.rows)
    begin = time.perf_counter()
    swept = memplan.sweep(make, axes, "1x1x64x64x64", optimizer=torch.optim.AdamW, device="cpu", jobs=2)
    seconds = time.perf_counter() - begin
    load = os.getloadavg()[0]
    return {
        "points": len(swept.rows), "jobs": 2, "seconds": seconds, "cpu_seconds_a_point": each,
        "cores": os.cpu_count(), "load_of_the_machine": load,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=str(ROOT / "benchmarks" / "results" / "studies.json"))
    parser.add_argument("--only", choices=("lines", "largest", "speed"), action="append")
    given = parser.parse_args()
    path = Path(given.json)
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    data["torch"] = torch.__version__
    for name, run in (
        ("lines", lambda: [line(*one) for one in LINES]),
        ("largest", lambda: [largest(*one) for one in BUDGETS]),
        ("speed", speed),
    ):
        if given.only is None or name in given.only:
            data[name] = run()
            print(json.dumps(data[name], indent=1))
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
