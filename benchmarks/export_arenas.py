"""How little memory training steps take as C for small devices.

    python benchmarks/export_arenas.py [--models lenet,resnet8]

For each model, batch 1 and SGD: the smallest budget that is found, and a step exported within it, which is compiled and
compared with PyTorch for 20 steps. Writes benchmarks/results/export_arenas.json and export_arenas.md. Times of steps
are those of export_speed.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

from tests.models.microcontroller_networks import NETWORKS  # noqa: E402

import memplan  # noqa: E402
from memplan.errors import BudgetError  # noqa: E402
from memplan.exporting.exported import Exported  # noqa: E402

Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model, and which of its layers are trained."""

    title: str
    network: str
    trained: Callable[[nn.Module], None] = lambda model: None


def last_third(model: nn.Module) -> None:
    """Train the last third of the layers of a Sequential."""
    layers = list(model.children())
    for at, layer in enumerate(layers):
        layer.requires_grad_(at >= 2 * len(layers) // 3)


def head(model: nn.Module) -> None:
    """Train the last layer alone."""
    model.requires_grad_(False)
    list(model.modules())[-1].requires_grad_(True)


SUBJECTS: dict[str, Subject] = {
    "mlp": Subject("MLP", "mlp"),
    "lenet": Subject("LeNet", "lenet"),
    "resnet8": Subject("ResNet-8 (MLPerf Tiny)", "resnet8"),
    "ds_cnn": Subject("DS-CNN (MLPerf Tiny)", "ds_cnn"),
    "mobilenet_v2": Subject("MobileNetV2-like, width 0.35, 96x96", "mobilenet_v2"),
    "mobilenet_v2_third": Subject("the same, last third trained", "mobilenet_v2", last_third),
    "mobilenet_v2_head": Subject("the same, last layer trained", "mobilenet_v2", head),
    "autoencoder": Subject("autoencoder (MLPerf Tiny)", "autoencoder"),
    "sensor_cnn": Subject("1-D CNN", "sensor_cnn"),
    "gru": Subject("GRU cell, 8 steps", "gru"),
    "transformer": Subject("transformer, 2 layers", "transformer"),
}


def exported(subject: Subject, folder: Path, **options: Any) -> Exported:
    make, inputs, targets, loss = NETWORKS[subject.network]
    torch.manual_seed(0)
    model = make()
    subject.trained(model)
    return memplan.export(
        model, *inputs, targets=targets, loss=getattr(F, loss), folder=folder, name="net", force=True,
        optimizer=lambda p: torch.optim.SGD([one for one in p if one.requires_grad], lr=0.05), **options,
    )  # fmt: skip


def memory(subject: Subject, folder: Path) -> Row:
    """Export within the smallest budget, proven."""
    try:
        exported(subject, folder, budget=0, verify=False)
        raise AssertionError("nothing fits in no memory")
    except BudgetError as error:
        budget = error.smallest_budget
    done = exported(subject, folder, budget=budget, verify=True)
    row = {"smallest_budget": budget, "ram": done.ram, "arena": done.arena, "live": done.live, "state": done.state,
           "inputs": done.inputs, "trained": done.trained, "frozen": done.frozen, "recomputed": done.recomputed,
           "proven": done.verdict.proven}  # fmt: skip
    return {**row, "levers": [{"what": what, "live": live} for what, live in done.levers]}


# -- the table


def table(rows: dict[str, Row]) -> str:
    found = [(name, rows[name]) for name in SUBJECTS if "arena" in rows.get(name, {})]
    proven = sum(row["proven"] for _, row in found)
    beyond = max((row["arena"] / row["live"] - 1 for _, row in found), default=0.0)
    percent = math.ceil(1000 * beyond) / 10  # a bound: 0.02 % are not 0.0 %
    lines = [
        f"**{proven} of {len(found)} steps proven beside PyTorch in the smallest budget; no arena more than "
        f"{percent:.1f} % over what is in use at once** (batch 1, float32, SGD; bytes)",
        "",
        "| model | weights trained | all kept, gradients until the update | arena | in use at once | state | inputs "
        "| RAM |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in found:
        counts = (row["trained"], row["levers"][0]["live"], row["arena"], row["live"], row["state"], row["inputs"])
        numbers = " | ".join(f"{one:,}" for one in (*counts, row["ram"]))
        lines.append(f"| {SUBJECTS[name].title} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SUBJECTS), metavar="A,B", help="these only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "export_arenas.json"
    rows: dict[str, Row] = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            row = memory(SUBJECTS[name], Path(folder))
        rows[name] = rows.get(name, {}) | row
        print(name, {key: value for key, value in row.items() if key != "levers"}, flush=True)
        kept = {one: rows[one] for one in SUBJECTS if one in rows}
        path.write_text(json.dumps({"torch": torch.__version__, "rows": kept}, indent=1) + "\n")
        (RESULTS / "export_arenas.md").write_text(table(kept))
    return int(not all(row.get("proven", True) for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
