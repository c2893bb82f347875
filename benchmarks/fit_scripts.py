"""The lines of `memplan fit --script` in scripts that really run: does the printed bound hold?

    python benchmarks/fit_scripts.py               # writes benchmarks/results/fit_scripts.json and fit_scripts.md
    python benchmarks/fit_scripts.py FILE.py ...   # other scripts: prints alone

Each script is fitted at two budgets, between what it takes and the smallest that has a plan. The lines are added where
they are said to go, and the script runs to its fourth update. Bytes are torch's profiler's own events of the CPU's
allocator, from the script's first line on, without memplan. While `memplan.fit` runs, whose proof profiles by itself,
what it leaves allocated is counted from the tensors that are alive.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "integrations" / "scripts"
RESULTS = ROOT / "benchmarks" / "results"
SHARES = (0.75, 0.25)
"""Budgets: how far from the smallest one to what the script takes."""
UPDATES = 4


@dataclass(frozen=True)
class Row:
    """A script at a budget; sizes in bytes."""

    script: str
    recorded: int
    """What it takes as it is."""
    budget: int
    bound: int
    """What is said to be enough."""
    measured: int
    planned: int
    """Calls that ran as planned."""
    unplanned: int

    @property
    def holds(self) -> bool:
        """Return whether the script kept the bound, and the budget."""
        return self.measured <= self.bound <= self.budget and self.planned > 0


def rows_of(script: Path, shares: tuple[float, ...] = SHARES) -> list[Row]:
    """Fit a script and measure it with its lines."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(script, folder)
        least = _fitted(folder, script.name, 1 << 10)
        smallest, recorded = least["smallest_budget"] or least["recorded"], least["recorded"]
        rows = []
        for share in shares:
            budget = smallest + int(share * (recorded - smallest))
            found = _fitted(folder, script.name, budget)
            if found["lines"] is None:
                continue
            added = Path(folder, f"with_lines_{script.name}")
            added.write_text(
                with_lines(Path(folder, script.name).read_text(encoding="utf-8"), found["lines"]), encoding="utf-8"
            )
            measured = measure(folder, added.name)
            rows.append(
                Row(
                    script.name, recorded, budget, found["planned"], measured["peak"], measured["planned"],
                    measured["unplanned"],
                )
            )  # fmt: skip
        return rows


def with_lines(text: str, lines: dict[str, Any]) -> str:
    """Return a script with the lines where they belong, as far in as the line that they stand beside."""
    rows = text.splitlines()
    at = int(lines["where"].rpartition(":")[2])
    beside = rows[at - 1]
    if not lines["before"]:  # the last line of a statement may be a closing bracket
        beside = next(row for row in reversed(rows[:at]) if row.strip()[:1] not in (")", "]", "}", ""))
    indent = " " * (len(beside) - len(beside.lstrip()))
    at -= bool(lines["before"])
    return "\n".join([*rows[:at], *(indent + line for line in lines["text"]), *rows[at:], ""])


def _fitted(folder: str, name: str, budget: int) -> dict[str, Any]:
    options = ["--script", name, "--budget", str(budget), "--device", "cpu", "--json", "-"]
    command = [sys.executable, "-m", "memplan.cli", "fit", *options]
    done = subprocess.run(command, cwd=folder, env=_variables(), capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{name} at {budget}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def measure(folder: str, name: str, updates: int = UPDATES) -> dict[str, Any]:
    """Run a script in a process of its own and return its peak and its calls."""
    command = [sys.executable, "-W", "ignore", __file__, "--measured", str(updates), name]
    done = subprocess.run(command, cwd=folder, env=_variables(), capture_output=True, text=True, check=False)
    last = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if not last:
        raise RuntimeError(f"{name}: {done.stdout[-500:]} {done.stderr[-2000:]}")
    return json.loads(last[-1].removeprefix("MEASURED "))


class _Done(BaseException):
    """The script has made its updates."""


class _Meter:
    """Adds up the allocator's events of the parts of a script's run that are profiled."""

    def __init__(self) -> None:
        self.level = self.peak = 0
        self._profile: Any = None

    def start(self) -> None:
        import torch

        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        self._profile.__enter__()

    def stop(self) -> None:
        from torch._C._profiler import _EventType

        self._profile.__exit__(None, None, None)
        events, stack = [], list(self._profile.kineto_results.experimental_event_tree())
        while stack:
            event = stack.pop()
            if event.tag == _EventType.Allocation:
                events.append((event.start_time_ns, event.extra_fields.alloc_size))
            stack.extend(event.children)
        for _, size in sorted(events):
            self.level += size
            self.peak = max(self.peak, self.level)


def _alive() -> int:
    import torch

    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided and not one.is_meta:
            for tensor in (one, one.grad if one.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def run_measured(updates: int, script: str) -> None:
    """Run a script here, and print what it took. Ends the process."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import memplan

    meter, fits, seen, plain, fitting = _Meter(), list[Any](), 0, memplan.fit, False

    def fit(*args: Any, **kwargs: Any) -> Any:
        nonlocal fitting
        meter.stop()
        before, fitting = _alive(), True
        fits.append(plain(*args, **kwargs))
        fitting = False
        meter.level += _alive() - before
        meter.start()
        return fits[-1]

    def updated(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        seen += not fitting and not any(isinstance(one, FakeTensor) for one in parameters)

    plain_call = torch.nn.Module.__call__

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:  # no hook: a fitted model would run unplanned
        if not fitting and seen >= updates and torch.is_grad_enabled():
            raise _Done
        return plain_call(module, *args, **kwargs)

    vars(memplan)["fit"] = fit
    register_optimizer_step_post_hook(updated)
    torch.nn.Module.__call__ = called
    sys.argv = [script]
    sys.path.insert(0, os.getcwd())
    meter.start()
    with suppress(_Done):
        runpy.run_path(script, run_name="__main__")
    meter.stop()
    planned, unplanned = sum(one.stats.planned for one in fits), sum(one.stats.unplanned for one in fits)
    print("\nMEASURED " + json.dumps({"peak": meter.peak, "planned": planned, "unplanned": unplanned}), flush=True)
    os._exit(0)  # without waiting for what the script has started


def _variables() -> dict[str, str]:
    paths = filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def table(rows: list[Row]) -> str:
    """Return the rows as a page shows them."""
    lines = [
        "| script | as it is | budget | bound | measured | calls planned, not | |",
        "|---|--:|--:|--:|--:|--:|---|",
        *(
            f"| {row.script} | {row.recorded:,} B | {row.budget:,} B | {row.bound:,} B | {row.measured:,} B | "
            f"{row.planned}, {row.unplanned} | {'holds' if row.holds else 'BROKEN'} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run from the command line."""
    if sys.argv[1:2] == ["--measured"]:
        run_measured(int(sys.argv[2]), sys.argv[3])
    given = [Path(name) for name in sys.argv[1:]]
    rows = list[Row]()
    for script in given or sorted([*(SCRIPTS / "ten").glob("*.py"), *(SCRIPTS / "fitted").glob("*.py")]):
        try:
            found = rows_of(script)
        except RuntimeError as error:
            print(f"{script.name}: {error}", file=sys.stderr, flush=True)
            continue
        rows += found
        print(table(found), flush=True)
    if not given:
        data = [{**asdict(row), "holds": row.holds} for row in rows]
        (RESULTS / "fit_scripts.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "fit_scripts.md").write_text(table(rows), encoding="utf-8")
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
