"""What the examples in public docstrings take for granted: a small model, its data, a step, and a snapshot of it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.simulation.snapshots.write import write_snapshot

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Import a file of examples/."""
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def resnet18() -> nn.Module:
    return example("resnet18").make()


def build() -> Callable[[], None]:
    layer, data = nn.Linear(512, 512), torch.randn(64, 512)
    return lambda: layer(data).sum().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 3, 16, 16)).sum().backward()
        optimizer.step()


FULL = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 225.28 MiB is reserved by PyTorch but "
    "unallocated."
)


TRAINING = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(512, 10).to(device)
optimizer = torch.optim.Adam(model.parameters())
data = DataLoader(TensorDataset(torch.randn(640, 512), torch.randint(0, 10, (640,))), 64)
for images, labels in data:
    nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
"""


def written_weights(folder: Path, model: nn.Module) -> None:
    """Write what a device would: the trained weights as floats, beside the layout of an export."""
    folder.mkdir()
    parameters = dict(model.named_parameters())
    np.concatenate([one.detach().numpy().ravel() for one in parameters.values()]).tofile(folder / "weights.bin")
    tensors = [{"name": name, "shape": list(one.shape)} for name, one in parameters.items()]
    (folder / "net.json").write_text(json.dumps({"export": "net", "tensors": tensors}), encoding="utf-8")


def names(folder: Path) -> dict[str, Any]:
    """Return the names that docstrings use, and write the snapshot that they read."""
    write_snapshot(folder / "snapshot.pickle", memplan.simulate(memplan.record(build, device="h100")), {})
    (folder / "snapshots").mkdir()
    for rank in range(2):
        shutil.copy(folder / "snapshot.pickle", folder / "snapshots" / f"rank{rank}.pickle")
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )
    written_weights(folder / "written", model)
    given = {"memplan": memplan, "torch": torch, "nn": nn, "F": F, "resnet18": resnet18, "build": build, "train": train}
    given |= {"BudgetError": memplan.BudgetError, "MemplanError": memplan.MemplanError, "model": model}
    given |= {"images": torch.randn(16, 3, 16, 16), "labels": torch.arange(16) % 10}
    given |= {"error": torch.OutOfMemoryError(FULL)}
    return given | {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
