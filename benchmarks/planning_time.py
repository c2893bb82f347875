"""Seconds that planning takes, each step in a process of its own.

    python benchmarks/planning_time.py [--only resnet18] [--engine inductor]

A plan for a budget half way between the floor and what the step takes as it is. Of the engine inductor, what Inductor
itself needs is told apart: importing it, and of each candidate that is looked at tracing through its decompositions and
lowering. All steps and both engines write benchmarks/results/planning_time.json, and .md, which docs/fit.md has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _path in (str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)
RESULTS = ROOT / "benchmarks" / "results" / "planning_time"


STEPS = ("resnet18", "densenet", "basic_unet", "gpt", "vit_s")


def halfway(name: str) -> dict[str, Any]:
    """In this process: the budget."""
    from benchmarks.frontier.models import MODELS

    import memplan

    step = MODELS[name]()
    known = memplan.plan(
        step.model, *step.inputs, targets=step.targets, loss=step.loss, budget="1 TiB", costs="roofline"
    )
    return {"budget": (known.floor + known.eager_peak) // 2}


def measured(name: str, engine: Any, budget: int) -> dict[str, Any]:
    """In this process: the seconds."""
    import torch
    from benchmarks.frontier.models import MODELS

    import memplan
    from memplan._torch import inductor

    step, needed = MODELS[name](), 0.0
    if engine == "inductor":
        begin = time.perf_counter()
        import torch._inductor.compile_fx
        import torch._inductor.lowering

        needed = time.perf_counter() - begin

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal needed
            begin = time.perf_counter()
            made = function(*args, **kwargs)
            needed += time.perf_counter() - begin
            return made

        return run

    inductor.traced, inductor._generate_code = timed(inductor.traced), timed(inductor._generate_code)
    begin, imported, needed = time.perf_counter(), needed, 0.0
    memplan.plan(step.model, *step.inputs, targets=step.targets, loss=step.loss, budget=budget, engine=engine)
    own = time.perf_counter() - begin - needed
    return {"own": own, "inductor": imported + needed, "threads": torch.get_num_threads()}


def _child(*args: str) -> dict[str, Any]:
    found = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each step."""
    from benchmarks.frontier.models import TITLES

    lines = ["| step | `graph`, s | `inductor`, s | and what Inductor itself needs, s |", "|---|--:|--:|--:|"]
    found = {(row["step"], row["engine"]): row for row in rows}
    for name in STEPS:
        graph, fused = found[name, "graph"], found[name, "inductor"]
        lines.append(f"| {TITLES[name]} | {graph['own']:.1f} | {fused['own']:.1f} | {fused['inductor']:.1f} |")
    return lines


def main() -> int:
    """Measure all, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--engine", choices=("graph", "inductor"))
    parser.add_argument("--part", choices=("budget", "seconds"), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part is not None:
        found = halfway(asked.only) if asked.part == "budget" else measured(asked.only, asked.engine, asked.budget)
        print(json.dumps(found))
        return 0
    rows = list[dict[str, Any]]()
    for name in [asked.only] if asked.only else STEPS:
        budget = str(_child("--part", "budget", "--only", name)["budget"])
        for engine in [asked.engine] if asked.engine else ("graph", "inductor"):
            found = _child("--part", "seconds", "--only", name, "--engine", engine, "--budget", budget)
            rows.append({"step": name, "engine": engine, **found})
            print(f"{name:12} {engine:9} {found['own']:6.2f} s, and {found['inductor']:6.2f} s that Inductor needs")
    if asked.only is None and asked.engine is None:
        RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text("\n".join([*table(rows), ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
