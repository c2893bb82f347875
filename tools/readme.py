"""Fill README.md and docs/: outputs of commands and tables of benchmarks are generated, never typed.

    python tools/readme.py            writes the pages anew
    python tools/readme.py --check    exits 1 if a page would change

A block begins with one of these lines and ends with ``<!-- end -->``; what stands between is replaced::

    <!-- run: COMMAND -->             what `memplan ...` or `python examples/...` prints, 80 columns wide
    <!-- run[1,2]: COMMAND -->        the first and the second part of that: parts are what an empty line separates
    <!-- run[-1]: COMMAND -->         the last part
    <!-- include: FILE -->            a table that a benchmark wrote; also include[1,3]
    <!-- accuracy: short -->          how near predictions are, from the results of three benchmarks
    <!-- options: all -->             options of the commands beside parameters of the functions

Commands run in the repository's root, with two threads and without AVX-512, whatever the machine has: both change what
convolutions take.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- (run|include|accuracy|options)(?:\[([-\d,]+)\])?: (.+?) -->\n.*?<!-- end -->", re.S)
MACHINE = {"OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
COLUMNS = 80
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "explain": ("explain", "quantize"), "check": ("check",), "sweep": ("sweep",), "largest": ("largest",),
    "compare": ("compare",), "guard": ("assert_peak",), "fit": ("plan", "fit"), "export": ("export",),
    "measure": ("measure",), "replay": ("replay",),
}  # fmt: skip
"""Command -> the public functions that do the same."""
_OTHER_NAMES = {
    "--input": "inputs", "--kwarg": "kwargs", "--target": "targets", "--a": "a_options", "--b": "b_options",
    "--use-plan": "plan", "--plan": "",
}  # fmt: skip
"""Options whose parameter has another name: of one value, where Python takes all; ``--plan`` is a file to write."""


def pages() -> list[Path]:
    """List every page, the README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return the text with every block made anew."""
    return BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    kind, parts, what = match.groups()
    if kind == "run":
        body = f"```console\n$ {what}\n{_parts(output(what), parts, '...')}\n```"
    elif kind == "include":
        body = _parts((ROOT / what).read_text(encoding="utf-8").strip(), parts, "")
    else:
        body = accuracy() if kind == "accuracy" else options()
    head = kind if parts is None else f"{kind}[{parts}]"
    return f"<!-- {head}: {what} -->\n{body}\n<!-- end -->"


def _parts(text: str, numbers: str | None, left_out: str) -> str:
    """Keep the parts of these numbers, from 1, and say where some are left out at the end."""
    if numbers is None:
        return text
    parts = re.split(r"\n\n+", text)
    chosen = [int(number) for number in numbers.split(",")]
    kept = "\n\n".join(parts[number - 1 if number > 0 else number] for number in chosen)
    return f"{kept}\n{left_out}" if left_out and chosen[-1] > 0 and max(chosen) < len(parts) else kept


def output(command: str) -> str:
    """Return what a command prints, as the pages show it."""
    program, *arguments = shlex.split(command)
    assert program in ("memplan", "python"), "the pages show no other command's output"
    # importing MONAI sets this one, which sizes cuBLAS's workspaces: it must not come from who asks for the output
    inherited = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    chosen = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")} | MACHINE
    done = subprocess.run(
        [sys.executable, *(["-m", "memplan.cli"] if program == "memplan" else []), *arguments],
        cwd=ROOT,
        env=inherited | chosen,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:  # 1: something was found, as `memplan check` says
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr}")
    return "\n".join(_folded(line.rstrip()) for line in done.stdout.strip("\n").splitlines())


def _folded(line: str) -> str:
    is_address = " " not in line.strip()
    return line if len(line) <= COLUMNS or is_address else textwrap.fill(line, COLUMNS, subsequent_indent="  ")


def accuracy() -> str:
    """Draw the table of how near the predictions are, a row for each kind of measurement."""
    cpu, published, cards = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("accuracy", "published_cuda", "cuda")
    )
    missed = json.loads((ROOT / "goldens" / "known_misses.json").read_text(encoding="utf-8"))
    total, shown = cpu["summary"], published["summary"]
    recorded = cards["summary"]["steps"]
    gpus = " and ".join(dict.fromkeys(step["gpu"] for step in cards["steps"]))
    errors = [abs(error) for step in cards["steps"] if (error := _off(step)) is not None]
    rows = [
        (
            f"CPU, torch {cpu['versions']['torch'].partition('+')[0]}: whole steps, by torch's profiler",
            total["steps"],
            f"{sum(abs(step['relative_error']) <= 0.01 for step in cpu['steps'])} within 1 %",
            f"{total['median_error']:.3%}",
            f"{total['max_error']:.3%}",
            "[all](docs/accuracy.md#on-the-cpu)",
        ),
        (
            "CUDA: peaks of kernels and layers that others published",
            shown["rows"],
            f"{shown['within_limit']} within 1 %",
            f"{shown['median_error']:.3%}",
            f"{shown['max_error']:.3%}",
            "[all](docs/accuracy.md#on-cuda-beside-what-others-published)",
        ),
        (
            f"{gpus}, torch {cards['steps'][0]['torch'].partition('+')[0]}: recorded steps",
            recorded,
            f"{recorded - len(missed)} within 1 % allocated and 3 % reserved; **{len(missed)} are not**",
            f"{statistics.median(errors):.3%}",
            f"{max(errors):.1%}",
            "[all](docs/cuda.md)",
        ),
    ]
    lines = [
        "| measured on | figures | as near as they have to be | median error | largest | |",
        "|---|--:|---|--:|--:|---|",
    ]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def options() -> str:
    """Draw the options of commands beside the parameters of functions; then name the options without a parameter."""
    import click

    import memplan
    from memplan.cli import COMMANDS, main

    commands = {name: main.get_command(click.Context(main), name) for name in COMMANDS}
    users: dict[str, list[str]] = {}
    for name, command in commands.items():
        for parameter in command.params if command is not None else ():
            if isinstance(parameter, click.Option):
                spelled = "/".join((*parameter.opts, *parameter.secondary_opts))
                users.setdefault(spelled, []).append(name)
    rows, alone = [], []
    for option, names in sorted(users.items(), key=lambda item: (-len(item[1]), item[0])):
        parameter = _OTHER_NAMES.get(option, option.partition("/")[0].removeprefix("--").replace("-", "_"))
        functions = [
            function for command in names for function in _FUNCTIONS.get(command, ())
            if parameter in inspect.signature(getattr(memplan, function)).parameters
        ]  # fmt: skip
        if functions:
            rows.append(f"| `{option}` | {', '.join(names)} | `{parameter}` | {', '.join(functions)} |")
        else:
            alone.append(f"`{option}` ({', '.join(names) if len(names) < 5 else f'{len(names)} commands'})")
    head = "| option | commands | parameter | functions |\n|---|---|---|---|"
    return "\n".join((head, *rows, "", f"On the command line alone: {', '.join(alone)}."))


def _off(step: dict[str, Any]) -> float | None:
    """Return the largest relative error of the allocated peaks; None where the prediction is no single number."""
    best = (step["prediction"] or {}).get("best")
    if best is None:
        return None
    pairs = zip(best, step["measured"], strict=True)
    return max((predicted["allocated"] / measured["allocated"] - 1 for predicted, measured in pairs), key=abs)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a page would change")
    parser.add_argument("pages", nargs="*", type=Path, help="all by default")
    options = parser.parse_args()
    changed = []
    for path in [page.resolve() for page in options.pages] or pages():
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            changed.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(after, encoding="utf-8")
    print(*changed, sep="\n", end="\n" if changed else "")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
