"""What a watch costs a step when nothing is wrong.

    python benchmarks/watch_overhead.py                 # writes benchmarks/results/watch_overhead.json and .md
    python benchmarks/watch_overhead.py --steps 200 --check

Two equal models on the CPU are trained in turns, a step each, in one process: one watched, one not. Figures are medians
over all steps after the first window (the first four steps, whose ops are noted or profiled, and which stand apart):
of a step's time, of the time that the watch's own hooks take in it, and of the difference of the two in turns, which is
exact on a quiet machine alone. Windows that nothing asks for come later, where they take at most half a per cent of the
time: none of their steps is among the figures.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memplan

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT = 0.01
FIRST = 4


def small() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A step of a few milliseconds: three linear layers of width 256, batch 128."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, lambda: F.cross_entropy(model(torch.randn(128, 256)), torch.randint(0, 10, (128,)))


def large() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A step of half a second: four transformer layers, width 512, batch 4, sequence 128."""
    model = nn.Sequential(*[nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)])
    return model, lambda: model(torch.randn(4, 128, 512)).square().mean()


MODELS = {"small": small, "large": large}


def stepper(
    make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]], device: str
) -> tuple[Any, Any, Callable[[], float]]:
    with torch.device(device):
        model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters())
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step() -> float:
        finish()
        began = time.perf_counter()
        with torch.device(device):
            loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        finish()
        return time.perf_counter() - began

    return model, optimizer, step


def measured(name: str, steps: int, device: str = "cpu") -> dict[str, Any]:
    model, optimizer, watched_step = stepper(MODELS[name], device)
    _, _, plain_step = stepper(MODELS[name], device)
    with memplan.watch(model, optimizer, quiet=True) as seen:
        first = [watched_step() for _ in range(FIRST)]
        pairs, own = list[tuple[float, float]](), list[float]()
        assert seen._inputs is not None
        end_step, note = seen.end_step, seen._inputs._note

        def timed_end_step() -> None:
            began = time.perf_counter()
            end_step()
            own[-1] += time.perf_counter() - began

        seen.end_step = timed_end_step  # pyright: ignore[reportAttributeAccessIssue]
        for number in range(steps):
            began = time.perf_counter()
            note(
                model, (torch.empty(0, device=device),), {}
            )  # the hook before the model's call, as it is called once a step
            own.append(time.perf_counter() - began)
            if number % 2:
                pair = plain_step(), watched_step()
            else:
                pair = watched_step(), plain_step()
                pair = pair[1], pair[0]
            if not seen.rows[-1].observed:
                pairs.append(pair)
    assert not seen.leaks
    plain, watched = (statistics.median(times) for times in zip(*pairs, strict=True))
    added, difference = statistics.median(own), statistics.median(one - other for other, one in pairs)
    return {
        "model": name,
        "about": (MODELS[name].__doc__ or "").split(":")[1].strip(". "),
        "steps": len(pairs),
        "observed_steps": sum(row.observed for row in seen.rows),
        "plain_seconds": plain,
        "watched_seconds": watched,
        "added_seconds": added,
        "difference_seconds": difference,
        "overhead": added / plain,
        "first_steps_seconds": first,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | a step | the watch's hooks | | its first four steps |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        step, added, share = row["plain_seconds"] * 1e3, row["added_seconds"] * 1e6, row["overhead"]
        first = sum(row["first_steps_seconds"]) / FIRST / row["plain_seconds"]
        lines.append(f"| {row['about']} | {step:.1f} ms | {added:.0f} µs | {share:.2%} | {first:.1f} times as long |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="of each model; by default 500 small ones and 30 large")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 where the watch adds more than 1 %%; write nothing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(name, options.steps or count) for name, count in (("small", 500), ("large", 30))]
    print(table(rows))
    if options.check:
        return int(any(row["overhead"] > LIMIT for row in rows))
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    RESULTS.mkdir(exist_ok=True)
    data = {"versions": versions, "machine": platform.machine(), "rows": rows}
    (RESULTS / "watch_overhead.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "watch_overhead.md").write_text(table(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
