"""How long a prediction takes, beside torch's own MemTracker on fake tensors.

    python benchmarks/speed.py                    # writes benchmarks/results/speed.json and speed.md
    python benchmarks/speed.py --layers 12 --repeats 1 --no-xl

The same step for both: a transformer of 12, 24 and 48 layers (d 1024, 16 heads, feed-forward 4096, sequence
512, batch 8, mean squared error, AdamW), none of it allocated. The two take turns in one process. A timing
holds everything from building model, data and optimizer on fake tensors to the peak as a number; importing
torch and memplan, and one warm-up of each on a single layer, come before it. Then memplan.explain of GPT-2
XL's training step, each time in a fresh process: seconds of the call alone, and the process's largest
resident memory before and after it.
"""

import argparse
import gc
import importlib.util
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
LAYERS, REPEATS = (12, 24, 48), 5
BATCH, SEQUENCE, WIDTH, HEADS = 8, 512, 1024, 16
HAVE_MEMPLAN = importlib.util.find_spec("memplan") is not None
Row = dict[str, Any]


class Parts(NamedTuple):
    """A step and what MemTracker wants to be told of beforehand."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: tuple[Tensor, Tensor]
    step: Callable[[], None]


def transformer(layers: int) -> Parts:
    # A list, not nn.TransformerEncoder: that one deep-copies its layer, which a bare FakeTensorMode cannot.
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True) for _ in range(layers)]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(BATCH, SEQUENCE, WIDTH), torch.randn(BATCH, SEQUENCE, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return Parts(model, optimizer, (inputs, targets), step)


def memplan_peak(layers: int, steps: int) -> int:
    import memplan

    trace = memplan.record(lambda: transformer(layers).step, device="cpu", steps=steps)
    return memplan.simulate(trace).peak_allocated


def mem_tracker_peak(layers: int, steps: int) -> int:
    with FakeTensorMode():
        parts = transformer(layers)
        tracker = MemTracker()
        tracker.track_external(parts.model, parts.optimizer, *parts.data)
        with tracker:
            for index in range(steps):
                if index:
                    tracker.reset_mod_stats()  # it refuses a second iteration without this
                parts.step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def timed(peak: Callable[[int, int], int], layers: int, steps: int) -> tuple[float, int]:
    """Seconds, and the peak in bytes."""
    gc.collect()
    start = time.perf_counter()
    found = peak(layers, steps)
    return time.perf_counter() - start, found


def compare(layers: int, repeats: int) -> Row:
    """Medians of both tools at this depth, for one step and for two, taking turns."""
    tools = {"memplan": memplan_peak} if HAVE_MEMPLAN else {}
    tools["mem_tracker"] = mem_tracker_peak
    seconds: dict[tuple[str, int], list[float]] = {(tool, steps): [] for tool in tools for steps in (1, 2)}
    row: Row = {"layers": layers, "repeats": repeats}
    for _ in range(repeats):
        for tool, steps in seconds:
            taken, row[f"{tool}_peak_{steps}"] = timed(tools[tool], layers, steps)
            seconds[tool, steps].append(taken)
    for (tool, steps), taken in seconds.items():
        row[f"{tool}_seconds_{steps}"] = round(statistics.median(taken), 4)
        row[f"{tool}_range_{steps}"] = [round(min(taken), 4), round(max(taken), 4)]
    for tool in tools:
        row[f"{tool}_seconds_per_step"] = round(row[f"{tool}_seconds_2"] / 2, 4)
    return row


def explain_xl() -> Row:
    """memplan.explain of GPT-2 XL in this process."""
    sys.path.insert(0, str(ROOT))
    from examples.gpt2 import build

    import memplan

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    start = time.perf_counter()
    explanation = memplan.explain(lambda: build(batch=8, sequence=1024, layers=48, width=1600), device="cpu")
    return {
        "seconds": time.perf_counter() - start,
        "resident_before": resident * 1024,
        "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_peak": explanation.timeline.peak_allocated,
    }


def xl(repeats: int) -> Row:
    """Medians over fresh processes, or the error that the first of them ended in."""
    if not HAVE_MEMPLAN:
        return {"error": "memplan is not installed"}
    rows: list[Row] = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "--child"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return {"error": (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]}
        rows.append(json.loads(result.stdout.strip().splitlines()[-1]))
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    sizes = {key: int(value) for key, value in medians.items() if key != "seconds"}
    return {"repeats": repeats, "seconds": round(medians["seconds"], 3), **sizes}


def markdown(rows: list[Row], large: Row, versions: dict[str, str]) -> str:
    """The table of the two tools, and a line about GPT-2 XL."""

    def cell(row: Row, key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-"

    said = ", ".join(f"{key} {value}" for key, value in versions.items())
    lines = ["Seconds to a prediction: medians, from building on fake tensors to the peak; imports and a warm-up come"]
    lines[-1] += f" before; {said}."
    lines += ["", f"Transformer, d {WIDTH}, {HEADS} heads, sequence {SEQUENCE}, batch {BATCH}, AdamW."]
    lines[-1] += " Per step: two steps and their build, divided by two. Peaks in bytes, over two steps."
    lines += ["", "| layers | tool | 1 step, s | 2 steps, s | per step, s | predicted peak |"]
    lines.append("|--:|---|--:|--:|--:|--:|")
    for row in rows:
        for tool, title in (("memplan", "memplan"), ("mem_tracker", "MemTracker")):
            cells = [cell(row, f"{tool}_seconds_{key}", ".2f") for key in ("1", "2", "per_step")]
            peak = cell(row, f"{tool}_peak_2", ",d")
            lines.append(f"| {row['layers']} | {title} | {' | '.join(cells)} | {peak} |")
    lines += [
        "",
        "`memplan.explain` of GPT-2 XL (48 layers of 1600, batch 8, sequence 1024, AdamW), alone in a",
    ]
    lines[-1] += " process: "
    if "seconds" in large:
        lines[-1] += f"{large['seconds']:.2f} s; resident memory {large['resident_before']:,d} bytes after the "
        lines[-1] += f"imports, {large['resident_peak']:,d} at most; predicted peak {large['predicted_peak']:,d}."
    else:
        lines[-1] += large.get("error", "not run") + "."
    return "\n".join([*lines, ""])


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), help="depths")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timings per number")
    parser.add_argument("--no-xl", action="store_true", help="leave GPT-2 XL out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(explain_xl()))
        return 0
    compare(1, 1)  # what is imported or compiled on first use is paid here
    rows = [compare(layers, options.repeats) for layers in options.layers]
    large = {} if options.no_xl else xl(options.repeats)
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    RESULTS.mkdir(exist_ok=True)
    content = {"versions": versions, "transformer": rows, "gpt2_xl": large}
    (RESULTS / "speed.json").write_text(json.dumps(content, indent=1) + "\n")
    text = markdown(rows, large, versions)
    (RESULTS / "speed.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
