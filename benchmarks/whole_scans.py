"""What training on whole slides and volumes takes: a U-Net of five levels, 32 to 512 features, batch norms, float32.

    python benchmarks/whole_scans.py                    # plans every step, and writes whole_scans.json and .md
    python benchmarks/whole_scans.py --only 2d-1024     # plans these, and keeps the other rows
    python benchmarks/whole_scans.py --run 2d-4096      # plans this step, runs it once, and notes its peak
    python benchmarks/whole_scans.py --gradients        # gradients of small planned steps beside float64

Training is planned by the costs of a roofline. A step runs once, with one thread and without a proof, as eager mode
needs more memory than machines have. Its peak is that of the events of the CPU's allocator, read without memplan
(tests/truth/cpu_allocator.py).

Gradients are those of networks of 8 to 128 features with SiLU and average pools: at the kink of a ReLU, or between two
equal elements of a pool, two right steps can differ by a whole element.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

from tests.truth.cpu_allocator import allocations, peak_of  # noqa: E402

from memplan.planning.capture.flat_call import Call, call_of  # noqa: E402
from memplan.planning.capture.loss_module import WithLoss  # noqa: E402
from memplan.planning.planner import Planner  # noqa: E402
from memplan.planning.settings import Settings  # noqa: E402
from memplan.planning.study import Planned  # noqa: E402
from memplan.planning.tiles.crops import Crops  # noqa: E402
from memplan.rewriting.engine import Engine  # noqa: E402
from memplan.trace.recording.session import called, recording_suspended, undisturbed  # noqa: E402
from memplan.verification.fitting import inference  # noqa: E402
from memplan.verification.measurement.peak_and_time import storage_bytes  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
Row = dict[str, Any]


class UNet(nn.Module):
    """Two convolutions with batch norms in each of five levels, skips joined by concatenation."""

    def __init__(self, dims: int, channels: int, *, width: int = 32, levels: int = 5, smooth: bool = False) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d

        def twice(inputs: int, outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for before in (inputs, outputs):
                layers += [conv(before, outputs, 3, padding=1, bias=False), norm(outputs)]
                layers.append(nn.SiLU() if smooth else nn.ReLU(inplace=True))
            return nn.Sequential(*layers)

        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(map(twice, (channels, *widths), widths))
        kinds = (nn.AvgPool2d, nn.AvgPool3d) if smooth else (nn.MaxPool2d, nn.MaxPool3d)
        self.pool = kinds[dims - 2](2)
        self.up = nn.ModuleList(up(2 * features, features, 2, 2) for features in widths[-2::-1])
        self.again = nn.ModuleList(twice(2 * features, features) for features in widths[-2::-1])
        self.head = conv(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, channels, *space) -> (N, 2, *space)."""
        skips: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for up, again in zip(self.up, self.again, strict=True):
            x = again(torch.cat((skips.pop(), up(x)), 1))
        return self.head(x)


@dataclass(frozen=True)
class Scan:
    """An image or a volume, and the budget in bytes of what is done with it."""

    title: str
    shape: tuple[int, ...]
    budget: int
    train: bool = True


SCANS = {
    "2d-4096": Scan("2D", (1, 3, 4096, 4096), 4 * GIB),
    "2d-1024": Scan("2D", (1, 3, 1024, 1024), 312 * MIB),
    "3d-192": Scan("3D", (1, 1, 192, 192, 192), 3 * GIB),
    "2d-8192-inference": Scan("2D, inference", (1, 3, 8192, 8192), 2 * GIB, train=False),
}


SMALL = {
    "2d-512": Scan("2D", (1, 3, 512, 512), 24 * MIB),
    "3d-64": Scan("3D", (1, 1, 64, 64, 64), 40 * MIB),
}
"""Steps whose gradients are compared."""
ROUNDING = 2 * torch.finfo(torch.float32).eps
"""Relative error of a gradient up to which the ratio of two errors is chance."""


def network(scan: Scan, **options: Any) -> UNet:
    torch.manual_seed(0)
    return UNet(len(scan.shape) - 2, scan.shape[1], **options)


def planned_step(scan: Scan, model: nn.Module) -> tuple[nn.Module, Call, Planned]:
    step = WithLoss(model, functional.cross_entropy, 1)
    call = call_of((torch.randn(scan.shape), torch.randint(2, (scan.shape[0], *scan.shape[2:]))), {})
    settings = Settings(costs="roofline", allow="reordered")
    with called("memplan.plan"), recording_suspended(), undisturbed(cuda=False):
        return step, call, Planner(step).planned(call, settings, scan.budget, remedies=False)


def training_row(scan: Scan, *, run: bool) -> Row:
    began = time.process_time()
    step, call, planned = planned_step(scan, network(scan))
    plan = planned.plan
    assert plan.step_seconds is not None, "a roofline tells seconds"
    row: Row = {
        "eager": plan.eager_peak, "predicted": plan.peak, "added": plan.seconds / plan.step_seconds,
        "pieces": [tile.pieces for tile in plan.tiles], "repeating": sum(bool(tile.repeats) for tile in plan.tiles),
    }  # fmt: skip
    print(f"planned in {time.process_time() - began:.0f} processor seconds: {row}", flush=True)
    if run:
        engine = Engine(planned.captured, planned.schedule)
        there = storage_bytes((*step.parameters(), *step.buffers(), *call.tensors))
        measure(row, there, lambda: engine.run(step, call).backward())
        row["finite"] = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in step.parameters())
        print(f"gradients finite: {row['finite']}", flush=True)
    return row


def measure(row: Row, resident: int, run: Callable[[], object]) -> None:
    """Run once, and add peak and processor seconds to the row. ``resident``: bytes that are allocated before."""
    began, seconds = time.process_time(), time.perf_counter()
    row["measured"] = resident + peak_of(allocations(run))
    row["processor"] = time.process_time() - began
    print(f"measured peak {format_size(row['measured'])}, predicted {format_size(row['predicted'])}; "
          f"{row['processor']:.0f} processor seconds, {time.perf_counter() - seconds:.0f} s", flush=True)  # fmt: skip


def gradients_row(scan: Scan) -> Row:
    """Of the parameter for which that is most: how often as far off from float64 as eager mode's the gradient is, of
    all parameters and of those whose gradient is off by more than `ROUNDING`."""
    model = network(scan, width=8, smooth=True)
    step, call, planned = planned_step(scan, model)
    plain, wide = copy.deepcopy(step), copy.deepcopy(step).double()
    x, classes = call.tensors
    Engine(planned.captured, planned.schedule).run(step, call).backward()
    plain(x, classes).backward()
    wide(x.double(), classes).backward()
    rows: list[tuple[float, str, float, float]] = []
    for (name, ours), theirs, true in zip(step.named_parameters(), plain.parameters(), wide.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert true.grad is not None
        norm = true.grad.norm().item()
        planned_error, eager_error = (
            (grad.double() - true.grad).norm().item() / norm for grad in (ours.grad, theirs.grad)
        )
        rows.append((planned_error / eager_error, name, planned_error, eager_error))
    ratio, name, *errors = max(rows)
    return {
        "predicted": planned.plan.peak, "repeating": sum(bool(tile.repeats) for tile in planned.plan.tiles),
        "ratio": ratio, "parameter": name, "errors": errors,
        "ratio_above_rounding": max((row[0] for row in rows if row[2] > ROUNDING), default=0.0),
    }  # fmt: skip


def inference_row(scan: Scan, *, run: bool) -> Row:
    """By the rules of `memplan.fit` with ``train=False``, which would run the image twice."""
    model = network(scan).eval()
    before = inference._peak(model, scan.shape, torch.float32)
    crops = Crops(model, scan.shape, torch.float32)
    parts, predicted = inference._parts(model, crops, scan.budget, before)
    read = sum((high - low) * (right - left) for part in parts for (low, high), (left, right) in [part.input_windows])
    row: Row = {
        "eager": before, "predicted": predicted, "added": read / (scan.shape[2] * scan.shape[3]) - 1,
        "pieces": [len(parts)], "repeating": 0,
    }  # fmt: skip
    print(row, flush=True)
    if run:
        image = torch.randn(scan.shape)
        there = storage_bytes((*model.parameters(), *model.buffers(), image))
        with torch.no_grad():
            measure(row, there, lambda: crops.run(image, parts, model.forward))
    return row


def format_size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def table(rows: dict[str, Row], gradients: dict[str, Row]) -> str:
    lines = [
        "| step | without a plan | budget | predicted peak | measured peak | added time |", "|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, scan in SCANS.items():
        if name in rows:
            row = rows[name]
            measured = format_size(row["measured"]) if "measured" in row else "not run"
            added = f"{100 * row['added']:.0f} %" + ("" if scan.train else " is read again")
            lines.append(
                f"| {scan.title}, {' x '.join(map(str, scan.shape))} | {format_size(row['eager'])} "
                f"| {format_size(scan.budget)} | {format_size(row['predicted'])} | {measured} | {added} |"
            )
    for name, row in gradients.items():
        ours, eager = row["errors"]
        lines += [
            "",
            f"Gradients in the L2 norm against float64, {' x '.join(map(str, SMALL[name].shape))} in "
            f"{format_size(SMALL[name].budget)}: at most {row['ratio']:.1f} times as far off as eager mode's (of "
            f"`{row['parameter']}`, {ours:.1e} instead of {eager:.1e}); of gradients that are off by more than "
            f"{ROUNDING:.1e}, at most {row['ratio_above_rounding']:.1f} times.",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(SCANS), metavar="A,B", help="plan these only; '': write the table anew"
    )
    parser.add_argument("--run", choices=SCANS, help="plan this step only, and run it once")
    parser.add_argument("--gradients", action="store_true", help="compare gradients, and plan nothing else")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = RESULTS / "whole_scans.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows, gradients = found.get("rows", {}), found.get("gradients", {})

    def write() -> None:
        ordered = {name: rows[name] for name in SCANS if name in rows}
        found = {"torch": torch.__version__, "rows": ordered, "gradients": gradients}
        path.write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "whole_scans.md").write_text(table(ordered, gradients))

    if options.gradients:
        for name, scan in SMALL.items():
            gradients[name] = gradients_row(scan)
            print(name, gradients[name], flush=True)
            write()
        return int(any(row["ratio_above_rounding"] > 2 for row in gradients.values()))
    for name in [options.run] if options.run else filter(None, options.only.split(",")):
        scan = SCANS[name]
        row = (training_row if scan.train else inference_row)(scan, run=name == options.run)
        before = rows.get(name, {})
        if row["predicted"] == before.get("predicted"):  # the same plan: its run counts
            row = {**{key: before[key] for key in ("measured", "processor", "finite") if key in before}, **row}
        rows[name] = row
        print(name, row, flush=True)
        write()
    write()
    return int(any(row.get("measured", 0) > SCANS[name].budget for name, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
