"""What can be exported, and how exact it is: 157 small networks beside PyTorch.

    python benchmarks/export_breadth.py [--only TEXT]

Each network of tests/models/small_nets.py is exported, compiled by ``cc`` and run for 20 steps, each with data of its
own. The same steps run in PyTorch in float64 and in float32. A weight may be 8 times as far from float64 as the largest
error of float32 in its tensor, plus two roundings of the tensor's largest element; a loss likewise. Nothing of
memplan's own proof takes part. Writes benchmarks/results/export_breadth.json and export_breadth.md; the exit code is 1
where an export is worse than that, or an error is none of memplan's.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

from tests.models.small_nets import ACTIVATIONS, LAYERS, LOSSES, NETS, OPERATIONS, OPTIMIZERS, Net  # noqa: E402

import memplan  # noqa: E402

STEPS = 20
FAIR = 8.0
"""How many times float32's own error is allowed: kernels add in another order."""
ROUNDING = 2.0**-23
KINDS = {"activations": ACTIVATIONS, "layers": LAYERS, "losses": LOSSES, "operations": OPERATIONS,
         "optimizers": OPTIMIZERS}  # fmt: skip
LIBRARY = """#include "net.h"
size_t state_bytes(void);
size_t state_bytes(void) { return sizeof(net_state); }
"""
Data = list[tuple[torch.Tensor, torch.Tensor]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What steps compute."""

    losses: np.ndarray
    tensors: dict[str, np.ndarray]
    """Parameters and running statistics after the steps, by name."""


def in_torch(net: Net, model: nn.Module, data: Data, dtype: torch.dtype) -> Run:
    """Train a copy of the model."""
    model = copy.deepcopy(model).to(dtype)
    optimizer, losses = net.optimizer(model.parameters()), list[float]()
    for x, y in data:
        x, y = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in (x, y))
        optimizer.zero_grad()
        loss = net.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = (*model.named_parameters(), *model.named_buffers())
    return Run(np.array(losses), {name: tensor.detach().double().numpy().copy() for name, tensor in named})


def in_c(folder: Path, data: Data) -> Run:
    """Compile an export and run the steps."""
    (folder / "library.c").write_text(LIBRARY)
    flags = ["-std=c99", "-O2", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-pedantic", "-shared", "-fPIC"]
    library = folder / "net.so"
    subprocess.run(["cc", *flags, "net.c", "library.c", "-lm", "-o", str(library)], cwd=folder, check=True)
    net = ctypes.CDLL(str(library))
    net.net_step.restype, net.state_bytes.restype = ctypes.c_float, ctypes.c_size_t
    state, losses = ctypes.create_string_buffer(net.state_bytes()), list[float]()
    net.net_init(state)
    for sample in data:
        arrays = [tensor.numpy() if tensor.is_floating_point() else tensor.int().numpy() for tensor in sample]
        losses.append(net.net_step(state, *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays)))
    listed = json.loads((folder / "net.json").read_text())["tensors"]
    sizes = [int(np.prod(tensor["shape"], dtype=int)) for tensor in listed]
    weights = np.zeros(sum(sizes), np.float32)
    net.net_get_weights(state, weights.ctypes.data_as(ctypes.c_void_p))
    parts = np.split(weights.astype(np.float64), np.cumsum(sizes)[:-1])
    return Run(np.array(losses), {t["name"]: part.reshape(t["shape"]) for t, part in zip(listed, parts, strict=True)})


def share_of_bound(found: np.ndarray, double: np.ndarray, single: np.ndarray) -> float:
    """Return the largest error of ``found`` in shares of the bound that float32's own error sets."""
    own = float(np.abs(single - double).max(initial=0.0))
    bound = FAIR * own + 2 * ROUNDING * float(np.abs(double).max(initial=0.0))
    error = float(np.abs(found - double).max(initial=0.0))
    return error / bound if error else 0.0  # a not-a-number remains one


def compared(net: Net) -> Row:
    """Export a network and run its steps; return how near they come to float64."""
    torch.manual_seed(1)
    model, generator = net.make(), torch.Generator().manual_seed(11)
    data = [(net.input(generator), net.target(generator)) for _ in range(STEPS)]
    with torch.no_grad():
        copy.deepcopy(model)(data[0][0]) if not _lazy(model) else model(data[0][0])
    torch.manual_seed(2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        memplan.export(
            model, data[0][0], targets=(data[0][1],), loss=net.loss, optimizer=net.optimizer, budget="1 MiB",
            folder=folder, name="net", verify=False,
        )  # fmt: skip
        found = in_c(folder, data)
    double = in_torch(net, model, data, torch.float64)
    single = in_torch(net, model, data, torch.float32)
    shares = {
        name: share_of_bound(tensor, double.tensors[name], single.tensors[name])
        for name, tensor in found.tensors.items()
    }
    loss = share_of_bound(found.losses, double.losses, single.losses)
    missing = sorted(name for name, _ in model.named_parameters() if name not in found.tensors)
    exact = all(share <= 1 for share in (loss, *shares.values())) and not missing  # not-a-number is not exact
    return {"outcome": "exact" if exact else "differs", "loss": loss, "weights": max(shares.values()),
            "missing": missing}  # fmt: skip


def _lazy(model: nn.Module) -> bool:
    return any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters())


def tried(net: Net) -> Row:
    """Return the outcome: exact, differs, refused by an error of memplan's, or crashed by another one."""
    try:
        return compared(net)
    except memplan.MemplanError as error:
        return {"outcome": "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:  # what is not memplan's is what this looks for
        return {"outcome": "crashed", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def table(rows: dict[str, Row]) -> str:
    """Return the counts by kind, and what is refused, as Markdown."""
    count = Counter(row["outcome"] for row in rows.values())
    worst = max((row["weights"] for row in rows.values() if row["outcome"] == "exact"), default=0.0)
    lines = [
        f"**{count['exact']} of {len(rows)} exported, each within {FAIR:g} times float32's own error over {STEPS} "
        f"steps (the worst at {worst:.2g} of that bound); {count['refused']} refused, {count['differs']} differ, "
        f"{count['crashed']} crashed**",
        "",
        "| kind | networks | exported and exact | refused |",
        "|---|--:|--:|---|",
    ]
    for kind, names in KINDS.items():
        found = {name: rows[name] for name in names if name in rows}
        exact = sum(row["outcome"] == "exact" for row in found.values())
        refused = ", ".join(f"`{name}`" for name, row in found.items() if row["outcome"] == "refused")
        lines.append(f"| {kind} | {len(found)} | {exact} | {refused} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / "export_breadth.json"
    rows: dict[str, Row] = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name, net in NETS.items():
        if options.only in name:
            rows[name] = tried(net)
            print(f"{name:32s}", rows[name], flush=True)
    rows = {name: rows[name] for name in NETS if name in rows}
    path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    (RESULTS / "export_breadth.md").write_text(table(rows))
    return int(any(row["outcome"] in ("differs", "crashed") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
