"""How near to the measured peak the predictions are, over the zoo.

    python benchmarks/accuracy.py                 # writes accuracy.json and its tables to benchmarks/results
    python benchmarks/accuracy.py --report        # the tables anew from accuracy.json
    python benchmarks/accuracy.py --only gpt2     # prints, writes nothing
    python benchmarks/accuracy.py --check         # exits 1 when a limit is passed

`predicted` is `simulate(record(build)).peak_allocated`. `measured` shares no code with memplan: the same
build and two steps run under torch.profiler, and the running sum of the CPU allocator's events gives the
peak. Each step of the zoo has a fresh process with two threads, and is measured there before memplan is
imported.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
STEPS = 2
THREADS = 2
SHORT = 8
"""So many steps stand in the short table."""
LIMITS = {"max_error": 0.01, "median_error": 0.002, "worst_under_prediction": 0.005}
COLUMNS = {
    "predicted": ",d",
    "measured": ",d",
    "relative_error": "+.3%",
    "memplan_measured": ",d",
    "record_seconds": ".2f",
    "run_seconds": ".1f",
}
Row = dict[str, Any]


def measured_peak(build: Callable[[], Callable[[], None]], steps: int = STEPS) -> int:
    """Peak of the bytes that `build()` and `steps` steps hold, from the profiler's raw allocation events."""
    import torch
    from torch._C._profiler import _EventType  # pyright: ignore[reportPrivateImportUsage]

    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step = build()
        for _ in range(steps):
            step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    pending: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())
    changes: list[tuple[int, int]] = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    changes.sort(key=lambda change: change[0])
    live = peak = 0
    for _, size in changes:
        live += size
        peak = max(peak, live)
    return peak


def memplan_columns(build: Callable[[], Callable[[], None]]) -> Row:
    """What memplan says: predicted peak, its own measured peak, and the seconds that recording took."""
    import memplan

    start = time.perf_counter()
    trace = memplan.record(build, device="cpu", steps=STEPS)
    seconds = time.perf_counter() - start
    row: Row = {"predicted": memplan.simulate(trace).peak_allocated, "record_seconds": round(seconds, 3)}
    try:
        really = memplan.measure(build, device="cpu", steps=STEPS)
        row["memplan_measured"] = memplan.simulate(really).peak_allocated
    except Exception as error:  # the prediction is what is judged here, and it stands without this column
        row["memplan_measured_error"] = f"{type(error).__name__}: {error}"
    return row


def child(name: str) -> Row:
    """Everything about one step, in this process."""
    import torch

    torch.set_num_threads(THREADS)
    sys.path.insert(0, str(ROOT))
    from benchmarks.zoo import ZOO

    build = ZOO[name]
    start = time.perf_counter()
    row: Row = {"name": name, "measured": measured_peak(build)}
    row["run_seconds"] = round(time.perf_counter() - start, 2)
    gc.collect()
    if importlib.util.find_spec("memplan") is None:
        return row
    try:
        row |= memplan_columns(build)
        row["relative_error"] = row["predicted"] / row["measured"] - 1
    except Exception as error:  # a step that memplan cannot record is a row of the table, not the end of it
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def run(name: str) -> Row:
    """One step of the zoo in a process of its own."""
    threads = {key: str(THREADS) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, __file__, "--child", name]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return {"name": name, "error": lines[-1] if lines else f"exit code {result.returncode}"}
    return json.loads(result.stdout.strip().splitlines()[-1])


def summary(rows: list[Row]) -> Row:
    """Largest and median absolute error, and the worst under-prediction; None without predictions."""
    errors = [row["relative_error"] for row in rows if "relative_error" in row]
    return {
        "steps": len(rows),
        "failed": sum("relative_error" not in row for row in rows),
        "max_error": max(map(abs, errors), default=None),
        "median_error": statistics.median(map(abs, errors)) if errors else None,
        "worst_under_prediction": max(0.0, -min(errors)) if errors else None,
    }


def violations(total: Row) -> list[str]:
    """The limits that the summary passes, in words."""
    found = [f"{total['failed']} of {total['steps']} steps have no prediction"] if total["failed"] else []
    for key, limit in LIMITS.items():
        if total[key] is not None and total[key] > limit:
            found.append(f"{key} is {total[key]:.3%}, the limit {limit:.1%}")
    return found


def cell(row: Row, key: str, form: str) -> str:
    return format(row[key], form) if key in row else "-"


def farthest(rows: list[Row]) -> list[Row]:
    """The steps whose predictions are farthest off."""
    return sorted(rows, key=lambda row: -abs(row.get("relative_error", math.inf)))[:SHORT]


def markdown(rows: list[Row], versions: dict[str, str], *, short: bool = False) -> str:
    """The summary and the table: of all steps, or of those that are farthest off."""
    total = summary(rows)
    said = ", ".join(f"{key} {value}" for key, value in versions.items())
    lines = [] if short else ["# Predicted and measured peaks", ""]
    lines.append(f"Building and two steps, on the CPU, in bytes as requested from the allocator; {said}.")
    if total["max_error"] is not None:
        summed = (
            f"{total['steps']} steps: largest error {total['max_error']:.3%}",
            f"median error {total['median_error']:.3%}",
            f"worst under-prediction {total['worst_under_prediction']:.3%}",
            f"{total['failed']} without a prediction",
        )
        lines += ["", f"**{', '.join(summed)}.**"]
    if short:
        rows = farthest(rows)
        lines += ["", f"The {len(rows)} that are farthest off:"]
    lines += ["", "| step | predicted | measured | error | measured by memplan | record, s | run, s |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        cells = [cell(row, key, form) for key, form in COLUMNS.items()]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    failures = [f"- {row['name']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, *(["", *failures] if failures else []), ""])


def write_tables(rows: list[Row], versions: dict[str, str]) -> None:
    (RESULTS / "accuracy.md").write_text(markdown(rows, versions))
    (RESULTS / "accuracy_short.md").write_text(markdown(rows, versions, short=True))


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", action="append", metavar="NAME", help="this step only; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default 1)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is passed")
    parser.add_argument("--report", action="store_true", help="write the tables from the results that are there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child)))
        return 0
    if options.report:
        content = json.loads((RESULTS / "accuracy.json").read_text())
        write_tables(content["steps"], content["versions"])
        return 0
    sys.path.insert(0, str(ROOT))
    import torch
    from benchmarks.zoo import ZOO

    names = options.only or list(ZOO)
    if unknown := [name for name in names if name not in ZOO]:
        parser.error(f"no step named {', '.join(unknown)}; the zoo has {', '.join(ZOO)}")
    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(run, names):
            rows.append(row)
            cells = [cell(row, key, form) for key, form in COLUMNS.items()]
            print(f"{row['name']:32}", *cells, row.get("error", ""), flush=True)
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if not options.only:
        RESULTS.mkdir(exist_ok=True)
        content = {"versions": versions, "summary": summary(rows), "steps": rows}
        (RESULTS / "accuracy.json").write_text(json.dumps(content, indent=1) + "\n")
        write_tables(rows, versions)
    found = violations(summary(rows))
    print(*found, sep="\n")
    return 1 if options.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
