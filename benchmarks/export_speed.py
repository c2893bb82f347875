"""How fast exported training steps are: instructions on a Cortex-M4, and times beside eager PyTorch.

    python benchmarks/export_speed.py [--core] [--host]

With --core: instructions for each product of two numbers in a layer, forward and in both gradients, on a Cortex-M4 that
QEMU counts (arm-none-eabi-gcc and qemu-system-arm). With --host: steps here, compiled by ``cc``, beside
eager PyTorch with one thread: processor time, the fastest of many steps, by turns. Without either: both. Writes
benchmarks/results/export_speed.json and export_speed.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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

from tests.models.microcontroller_networks import resnet8  # noqa: E402

import memplan  # noqa: E402
from memplan.exporting.kernels.templates import template  # noqa: E402
from memplan.exporting.trials.cortex import COMPILER, CORES, EMULATOR, FLAGS, INSTRUCTIONS_PER_TICK  # noqa: E402

STANDARD = ("-std=c99", "-ffp-contract=fast")
CORE, CORE_LEVELS = "cortex-m4", ("-O2", "-Os")
HOST_LEVELS = (("-O3",), ("-O3", "-march=native"), ("-O3", "-DWIDE=8"))
"""The last: without tiles in AVX."""
ROUNDS = 8
RUN_SECONDS = 0.3
Row = dict[str, Any]


def exported(model: nn.Module, shape: tuple[int, ...], folder: Path, budget: str = "100 MiB", **options: Any) -> None:
    """Export a step that sums squares beside zeros, for any model."""
    memplan.export(
        model, "x".join(map(str, shape)), targets="x".join(map(str, model(torch.zeros(shape)).shape)), loss=F.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01), folder=folder, name="net", budget=budget, verify=False,
        force=True, **options,
    )  # fmt: skip


# -- instructions on a core


@dataclass(frozen=True)
class Layer:
    """A layer, and one before it, so that it has a gradient of its input."""

    before: Callable[[], nn.Module]
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input of `before`."""


def _convolution(before: int, after: int, kernel: int, size: int, **how: Any) -> Layer:
    return Layer(
        lambda: nn.Conv2d(2, before, 1), lambda: nn.Conv2d(before, after, kernel, **how), (1, 2, size, size)
    )  # fmt: skip


LAYERS: dict[str, Layer] = {
    "3x3, 16 to 16 channels, 16x16": _convolution(16, 16, 3, 16, padding=1),
    "3x3, 64 to 64 channels, 8x8": _convolution(64, 64, 3, 8, padding=1),
    "3x3, 16 to 32 channels, 16x16, stride 2": _convolution(16, 32, 3, 16, padding=1, stride=2),
    "3x3, 3 to 16 channels, 16x16": _convolution(3, 16, 3, 16, padding=1),
    "1x1, 32 to 64 channels, 8x8": _convolution(32, 64, 1, 8),
    "1x1, 16 to 32 channels, 16x16, stride 2": _convolution(16, 32, 1, 16, stride=2),
    "5x5, 6 to 16 channels, 14x14": _convolution(6, 16, 5, 14),
    "depthwise 3x3, 32 channels, 16x16": _convolution(32, 32, 3, 16, padding=1, groups=32),
    "linear, 256 to 64": Layer(lambda: nn.Linear(2, 256), lambda: nn.Linear(256, 64), (1, 2)),
    "linear, 256 to 64, 8 rows": Layer(lambda: nn.Linear(2, 256), lambda: nn.Linear(256, 64), (8, 2)),
}
IN_EIGHT_BITS = ", weights in eight bits"
NARROW = tuple(
    name for name in LAYERS
    if name.startswith(("3x3, 16 to 16", "1x1, 32 to 64", "depthwise", "linear"))
)  # fmt: skip
"""Layers that are measured with trained weights in eight bits, too."""
DIRECTIONS = ("forward", "input gradient", "weight gradient")
_MAIN = """#include "net.h"
#include <stdio.h>

static net_state state;
static float x[INPUTS], y[OUTPUTS];
static uint32_t counts[256];
static int calls;
uint32_t ticks(void);

void count(void)
{
    counts[calls++] = ticks();
}

int main(void)
{
    for (int k = 0; k < INPUTS; k++)
        x[k] = (float)(k * 37 % 101) / 50 - 1;
    net_init(&state);
    uint32_t begin = ticks();
    net_step(&state, x, y);
    for (int k = 0; k < calls; begin = counts[k++])
        printf("%u\\n", (unsigned)((counts[k] - begin) & 0xFFFFFF));
    return 0;
}
"""


def on_core(layer: Layer, level: str, **options: Any) -> Row:
    """Return instructions for each multiplication by direction, the weight's update with its gradient, and the bytes of
    code of the whole step. ``options``: of the export."""
    torch.manual_seed(0)
    before, make = layer.before(), layer.make()
    model, x = nn.Sequential(before, make), torch.zeros(layer.shape)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exported(model, layer.shape, folder, **options)
        calls = _labelled_calls((folder / "net.c").read_text())
        sizes = {"INPUTS": str(x.numel()), "OUTPUTS": str(model(x).numel())}
        ticks, text = _run_on_core(folder, level, sizes)
    assert len(ticks) == len(calls), "a count for each call"
    inner = make.weight[0].numel() if isinstance(make, (nn.Conv2d, nn.Linear)) else 1
    products = model(x).numel() * inner
    row: Row = {"text": text}
    for direction, label, at in _directions(make):
        found = [count for count, call in zip(ticks, calls, strict=True) if call == label]
        row[direction] = found[at] * INSTRUCTIONS_PER_TICK / products
    updates = [count for count, call in zip(ticks, calls, strict=True) if call == "update 1.weight"]  # not fused
    row["weight gradient"] += sum(updates) * INSTRUCTIONS_PER_TICK / products
    return row


def _directions(layer: nn.Module) -> list[tuple[str, str, int]]:
    """Return each direction, the comment over its call, and which of the calls under such comments it is."""
    if isinstance(layer, nn.Linear):
        return [("forward", "1: addmm", 0), ("input gradient", "1: mm", 0), ("weight gradient", "1: mm", 1)]
    names = ("convolution_gather", "convolution_scatter", "convolution_weight_gradient")
    return [(direction, f"1: {name}", 0) for direction, name in zip(DIRECTIONS, names, strict=True)]


def _labelled_calls(text: str) -> list[str]:
    """Return the comment over each call of a step, up to the hook behind the call."""
    body = text[text.index("float net_step_to(") :].partition("\n}\n")[0]
    label, found = "", list[str]()
    for line in body.splitlines():
        comment = re.match(r"\s*/\* (.*) \*/$", line)
        label = comment.group(1) if comment else label
        if line.strip() == "NET_HOOK();":
            found.append(label)
    return found


def _run_on_core(folder: Path, level: str, sizes: Mapping[str, str]) -> tuple[list[int], int]:
    """Return the ticks of each call, and the bytes of code."""
    board, _, ram = CORES[CORE]
    (folder / "main.c").write_text(_MAIN)
    for file in ("cortex_startup.c", "cortex.ld"):
        (folder / file).write_text(template(file).replace("@RAM@", ram))
    flags = [f"-mcpu={CORE}", "-mthumb", *FLAGS[CORE], *STANDARD, level, "-DNET_HOOK=count"]
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    _run([COMPILER, *flags, "-c", "net.c", "-o", "net.o"], folder)
    link = ["-nostartfiles", "--specs=rdimon.specs", "-T", "cortex.ld", "-Wl,--gc-sections", "-lm", "-o", "net.elf"]
    _run([COMPILER, *flags, *defines, "cortex_startup.c", "net.o", "main.c", *link], folder)
    machine = ["-M", board, "-cpu", CORE, "-nographic", "-monitor", "none", "-serial", "none", "-icount", "shift=0"]
    output = _run([EMULATOR, *machine, "-semihosting-config", "enable=on,target=native", "-kernel", "net.elf"], folder)
    text = re.search(r"^\.text\s+(\d+)", _run(["arm-none-eabi-size", "-A", "net.o"], folder), re.MULTILINE)
    return [int(line) for line in output.split()], int(text.group(1)) if text else 0


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


# -- times here


def _two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))


STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-8, 32x32, batch 1": (resnet8, (1, 3, 32, 32)),
    "ResNet-8, 32x32, batch 4": (resnet8, (4, 3, 32, 32)),
    "two convolutions, 64 channels, 16x16": (_two_convolutions, (1, 64, 16, 16)),
    "two convolutions, 64 channels, 8x8, batch 4": (_two_convolutions, (4, 64, 8, 8)),
}
_TIMED = """#define _POSIX_C_SOURCE 199309L
#include "net.h"
#include <stdio.h>
#include <time.h>

static net_state state;
static float x[INPUTS], y[OUTPUTS];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(void)
{
    double best = 1, until = now() + 0.3;
    for (int k = 0; k < INPUTS; k++)
        x[k] = (float)(k * 37 % 101) / 50 - 1;
    net_init(&state);
    state.rate = 0.001f;
    while (now() < until) {
        double before = now();
        net_step(&state, x, y);
        double taken = now() - before;
        best = taken < best ? taken : best;
    }
    printf("%.9f\\n", best);
    return 0;
}
"""


def on_host(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Row:
    """Return the seconds of a step: of the C code by flags, and of PyTorch."""
    torch.manual_seed(0)
    model = make()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        exported(model, shape, folder)
        (folder / "timed.c").write_text(_TIMED)
        outputs = model(torch.zeros(shape))
        defines = [f"-DINPUTS={math.prod(shape)}", f"-DOUTPUTS={outputs.numel()}"]
        programs = {" ".join(level): f"./timed{at}" for at, level in enumerate(HOST_LEVELS)}
        for flags, program in programs.items():
            _run(["cc", *STANDARD, *flags.split(), *defines, "timed.c", "net.c", "-lm", "-o", program], folder)
        step = eager(model, torch.randn(shape), torch.zeros_like(outputs))
        best = dict.fromkeys((*programs, "torch"), float("inf"))
        for _ in range(ROUNDS):
            for flags, program in programs.items():
                best[flags] = min(best[flags], float(_run([program], folder)))
            best["torch"] = min(best["torch"], fastest(step))
    return best


def eager(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Return a step of PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def fastest(step: Callable[[], None]) -> float:
    """Return the processor time of the fastest of many steps, in seconds."""
    best, until = float("inf"), time.perf_counter() + RUN_SECONDS
    while time.perf_counter() < until:
        before = time.process_time()
        step()
        best = min(best, time.process_time() - before)
    return best


# -- the tables


def tables(results: Mapping[str, Mapping[str, Row]]) -> str:
    """Return the tables as Markdown."""
    core, host = results["core"], results["host"]
    flags = f"`{COMPILER} {' '.join(STANDARD)}`"
    lines = [
        f"| instructions a product, {CORE}, {flags} | flags | {' | '.join(DIRECTIONS)} | code of the step, bytes |",
        f"|---|---|{'--:|' * (1 + len(DIRECTIONS))}",
    ]
    for name, levels in core.items():
        for level, row in levels.items():
            numbers = " | ".join(f"{row[direction]:.2f}" for direction in DIRECTIONS)
            lines.append(f"| {name} | `{level}` | {numbers} | {row['text']:,} |")
    lines += [
        "",
        f"| a step, `cc {' '.join(STANDARD)}`, one thread | flags | C, ms | PyTorch, eager, ms | C / PyTorch |",
        "|---|---|--:|--:|--:|",
    ]
    for name, row in host.items():
        theirs = row["torch"]
        for level, seconds in row.items():
            if level != "torch":
                numbers = f"{1e3 * seconds:.3f} | {1e3 * theirs:.3f} | {seconds / theirs:.2f}"
                lines.append(f"| {name} | `{level}` | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", action="store_true", help="instructions on a core alone")
    parser.add_argument("--host", action="store_true", help="times here alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.results / "export_speed.json"
    results = json.loads(path.read_text()) if path.exists() else {"core": {}, "host": {}}
    for name, layer in LAYERS.items():
        if options.only in name and (options.core or not options.host):
            results["core"][name] = {level: on_core(layer, level) for level in CORE_LEVELS}
            print(name, results["core"][name], flush=True)
    for name in NARROW:
        wide = name + IN_EIGHT_BITS
        if options.only in wide and (options.core or not options.host):
            results["core"][wide] = {
                level: on_core(LAYERS[name], level, trained_weights="int8") for level in CORE_LEVELS
            }  # fmt: skip
            print(wide, results["core"][wide], flush=True)
    for name, (make, shape) in STEPS.items():
        if options.only in name and (options.host or not options.core):
            results["host"][name] = on_host(make, shape)
            print(name, results["host"][name], flush=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    (options.results / "export_speed.md").write_text(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
