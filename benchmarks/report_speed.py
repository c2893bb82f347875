"""How long a page takes to write and to open, and how large it is.

    python benchmarks/report_speed.py             # writes benchmarks/results/report_speed.json and report_speed.md
    python benchmarks/report_speed.py --repeats 1 --only resnet50

Steps: a ResNet-50 of batch 32 at 224 pixels with AdamW, GPT-2 XL (48 layers of 1600) of batch 1 and 1,024 tokens, and
a chain of blocks whose recording has 20,000 ops. Each is recorded and explained once for an H100, and saved as JSON.

Writing: `memplan report step.json --html page.html` in a process of its own, from its start to its end, imports
included. Opening: Chromium, headless, from a file, without a network, from the start of the navigation to when the page
answers: a key has moved the readout of memory over time. Medians, of wall seconds and of the processor's own seconds
(of the command's process; of the page's thread), which other processes on the machine lengthen less.

The browser is steered through its debugger. With one attached, V8 parses a script again for the places of the
exceptions in it, which took 0.45 s of plotly's 1.1 s; without one it does not. A flag of V8 keeps these places from the
first time on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from memplan.explanation.explain import explain_trace

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROGRAM = shutil.which("chromium") or "chromium"
PLACES = "--js-flags=--no-enable-lazy-source-positions"
Build = Callable[[], Callable[[], None]]
Row = dict[str, Any]


def resnet50() -> Callable[[], None]:
    sys.path.insert(0, str(ROOT))
    from benchmarks.zoo.vision import resnet50_model

    return _step(resnet50_model(), torch.randn(32, 3, 224, 224))


def gpt2_xl() -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25))
    tokens = torch.randint(50257, (1, 1024))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def many_ops() -> Callable[[], None]:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(385)]
    return _step(nn.Sequential(*layers), torch.randn(32, 64))


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


STEPS: dict[str, Build] = {"resnet50": resnet50, "gpt2_xl": gpt2_xl, "many_ops": many_ops}


def written(source: Path, page: Path) -> tuple[float, float]:
    """Write a page by the command; return wall seconds and processor seconds."""
    command = [sys.executable, "-m", "memplan.cli", "report", str(source), "--html", str(page), "--force"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def opened(path: Path) -> tuple[float, float]:
    """Open a page in a fresh browser; return wall seconds until it answers, and its thread's seconds until then."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox", PLACES])
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector(".chart[data-kind=time][data-drawn]")
        page.locator(".chart[data-kind=time] .plot").focus()
        before = page.locator(".chart[data-kind=time] .readout").inner_text()
        page.keyboard.press("Home")
        assert page.locator(".chart[data-kind=time] .readout").inner_text() != before
        wall = page.evaluate("performance.now()") / 1000  # since the navigation began
        metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        browser.close()
    return wall, metrics["TaskDuration"]


def measured(name: str, repeats: int, folder: Path) -> Row:
    """Record a step, and measure its page."""
    trace = memplan.record(STEPS[name], device="h100")
    source, path = folder / f"{name}.json", folder / f"{name}.html"
    source.write_text(explain_trace(trace, title=name).to_json(), encoding="utf-8")
    writes = [written(source, path) for _ in range(repeats)]
    opens = [opened(path) for _ in range(repeats)]
    row = {
        "step": name, "ops": len(trace.ops), "json_bytes": source.stat().st_size, "page_bytes": path.stat().st_size,
        "write_seconds": statistics.median(wall for wall, _ in writes),
        "write_processor_seconds": statistics.median(own for _, own in writes),
        "open_seconds": statistics.median(wall for wall, _ in opens),
        "open_processor_seconds": statistics.median(own for _, own in opens),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


NAMES = {
    "resnet50": "ResNet-50, batch 32",
    "gpt2_xl": "GPT-2 XL, 1,024 tokens",
    "many_ops": "a chain of 385 blocks",
}


def table(data: Row) -> str:
    """Return the results as Markdown."""
    head = (
        f"{data['cores']} cores ({data['processor']}), on which {data['load']:.1f} processes ran besides or waited; "
        f"torch {data['torch']}; Chromium, headless. Medians of {data['repeats']} in wall seconds; in brackets the "
        "processor's own.\n\n"
        "| step | ops recorded | page | `memplan report`, s | until it answers in Chromium, s |\n"
        "|---|--:|--:|--:|--:|\n"
    )
    lines = [
        f"| {NAMES[row['step']]} | {row['ops']:,} | {row['page_bytes'] / 1e6:.2f} MB "
        f"| {row['write_seconds']:.2f} ({row['write_processor_seconds']:.2f}) "
        f"| {row['open_seconds']:.2f} ({row['open_processor_seconds']:.2f}) |\n"
        for row in data["rows"]
    ]
    return head + "".join(lines)


def main() -> None:
    """Measure and write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--only", choices=STEPS)
    chosen = options.parse_args()
    data: Row = {
        "torch": torch.__version__, "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "repeats": chosen.repeats,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        names = [chosen.only] if chosen.only else [*STEPS]
        data["rows"] = [measured(name, chosen.repeats, Path(folder)) for name in names]
    if not chosen.only:
        (RESULTS / "report_speed.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "report_speed.md").write_text(table(data), encoding="utf-8")
    print(table(data))


if __name__ == "__main__":
    main()
