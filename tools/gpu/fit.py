"""Budgets on a CUDA card: what memplan.fit holds there, beside eager mode, checkpoints and torch.compile.

    python tools/gpu/fit.py                         # all steps; writes benchmarks/results/fit_gpu/<gpu>.<torch>.json
    python tools/gpu/fit.py --only unet3d --methods "eager,fit-graph-*"
    python tools/gpu/fit.py --only gpt --dry h100 --torch ~/cuda-env    # on an emulated card: bytes alone mean anything
    python benchmarks/fit_gpu.py                    # the table, without a GPU

Needs a CUDA GPU. Each case has a process of its own, one at a time; one that fails, or that memplan refuses, is an
entry with the reason. Exit code: 0 all measured; 3 some are missing, or a budget was exceeded; 1 nothing could be
measured; 2 bad usage, or no GPU.

Measured of each: `max_memory_allocated` and `max_memory_reserved` over two steps, after two others and with an emptied
cache; seconds in alternating pairs with eager mode; bytes that its ops read and write (of what torch.compile makes: as
Inductor counts them), and these over the seconds as a share of what a copy on the card moves. A plan's budget is held
where `max_memory_reserved` is within it.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for _path in (str(HERE), str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)
import fit_steps  # noqa: E402  # of this folder, as the next
import golden  # noqa: E402

from memplan.trace.card_run import golden_format  # noqa: E402

if TYPE_CHECKING:
    from golden_dry import DryCard

RESULTS = ROOT / "benchmarks" / "results" / "fit_gpu"
PEERS = ("eager", "per_block", "compile", "compile-0.8", "compile-0.5", "compile-0.2", "compile-0.0", "liger")
ENGINES = ("graph", "inductor")
SHARES = (0.8, 0.6)
"""Budgets: shares of what eager mode reserves."""
BESIDE = ("per_block", "compile")
"""Peers whose peaks are budgets, too."""
LIMIT_SECONDS = 1800
DESCRIBE_SECONDS = 120
STOPPED = "the seconds for all cases were over"
ENOUGH_SECONDS, NEARLY_ALL = 300.0, 0.8
"""A case that had so long, and this share of the seconds for all, has failed if it is not done: another run would not
give it more."""
REFUSED = ("BudgetError", "LookupError: Liger")
"""Errors that are answers: memplan has no such plan, Liger no such layers."""
SOME_MISSING = 3
"""Exit code. An exception is exit code 1, so that is no sign that anything was measured."""
PAIRS = 5
COPY = 1 << 30
METRICS = {"TORCH_LOGS": "inductor_metrics", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
"""What makes Inductor count bytes: it does so while it compiles, and only then."""
Row = dict[str, Any]
Step = Callable[[], None]


# -- in a case's process


def measured(step: str, method: str, budget: int | None, pairs: int, emulated: bool = False) -> Row:
    """One case on this card. On an emulated one a plan goes without a proof, and times mean nothing."""
    import torch

    torch.cuda.init()
    subject = fit_steps.on("cuda", fit_steps.STEPS[step])
    row: Row = {}
    if method.startswith("fit-"):
        loss, row = (_planned if emulated else _fitted)(subject, method, budget)
    elif method == "liger":
        _apply_liger(subject.model)
        loss = lambda: subject.loss(subject.model(*subject.inputs), *subject.targets)  # noqa: E731
    else:
        from benchmarks.frontier.peers import peer

        loss = peer(subject, method)
    candidate = _step(subject, loss)
    by_inductor = method.startswith(("compile", "fit-inductor"))
    if "moved" not in row:
        reset_bytes()
    candidate()
    if by_inductor and "moved" not in row:
        row["moved"] = inductor_bytes()
    candidate()
    row |= peak(candidate)
    if not by_inductor:  # what is compiled is one op to the counter
        with fit_steps.Moved() as counter:
            candidate()
        row["moved"] = counter.bytes
    other = fit_steps.on("cuda", fit_steps.STEPS[step])
    eager = _step(other, lambda: other.loss(other.model(*other.inputs), *other.targets))
    row |= paired(eager, candidate, pairs)
    return row | {"copy_bytes_per_second": copy_rate()} | card()


def _step(subject: Any, loss: Callable[[], Any]) -> Step:
    def step() -> None:
        subject.model.zero_grad(set_to_none=True)
        loss().backward()

    return step


def _fitted(subject: Any, method: str, budget: int | None) -> tuple[Callable[[], Any], Row]:
    """The step as memplan makes it fit. Raises what `memplan.fit` raises."""
    import memplan
    from memplan.errors import BudgetError

    engine = method.split("-")[1]
    options: Row = {"targets": subject.targets, "loss": subject.loss, "pairs": 0}
    options |= {"engine": engine} if engine != "graph" else {}
    if budget is None:
        try:
            memplan.fit(subject.model, *subject.inputs, budget=1, **options)
        except BudgetError as error:
            budget = error.smallest_budget
    begun = time.perf_counter()
    fitted = memplan.fit(subject.model, *subject.inputs, budget=budget, **options)
    row: Row = {"given": budget, "predicted": fitted.plan.peak, "fit_seconds": time.perf_counter() - begun}
    row["proof"] = str(fitted.proof).split(":", 1)[0]
    if engine == "inductor":  # Inductor's own count has torch.compile in it, which the proof runs beside
        row["moved"] = None if fitted.plan.fusion is None else fitted.plan.fusion.bytes_after
    return (lambda: fitted.loss(*subject.inputs, *subject.targets)), row


def _planned(subject: Any, method: str, budget: int | None) -> tuple[Callable[[], Any], Row]:
    """The step as memplan plans it, unproven. Without a budget: the least."""
    from benchmarks.fit_dry import with_plan

    engine: Any = method.split("-")[1]
    planned, row = with_plan(subject, engine, lambda floor, _: max(floor, budget or 0))
    given: Row = {"given": row["budget"], "predicted": row["predicted"]} | (
        {"moved": None} if engine != "graph" else {}
    )
    return (lambda: planned(*subject.inputs, *subject.targets)), given


def _apply_liger(model: Any) -> None:
    """Put Liger's layers in the place of a transformers model's.

    Raises:
        LookupError: Liger knows no layers of this model.
    """
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance as apply,
    )

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "config"):
        raise LookupError("Liger replaces layers of transformers models alone, and this is none")
    apply(model=base)


def reset_bytes() -> None:
    """Begin to count what Inductor's kernels move."""
    from torch._inductor import metrics

    metrics.reset()


def inductor_bytes() -> int | None:
    """What the kernels that Inductor made since then read and write in a run, by its own count; None: it made none."""
    from torch._inductor import metrics

    return int(metrics.num_bytes_accessed) or None


def peak(step: Step) -> Row:
    """Allocated and reserved bytes at the peak of two steps, and what is there between steps."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def paired(reference: Step, candidate: Step, pairs: int) -> Row:
    """Medians over pairs, the one and the other first by turns, after a warm-up of each."""
    for step in (reference, candidate):
        seconds(step)
    taken: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            second = seconds(candidate)
            taken.append((seconds(reference), second))
        else:
            first = seconds(reference)
            taken.append((first, seconds(candidate)))
    ratios = [second / first for first, second in taken]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
    return {
        "pairs": pairs, "eager_seconds": statistics.median(first for first, _ in taken),
        "seconds": statistics.median(second for _, second in taken), "ratio": statistics.median(ratios),
        "quartiles": [low, high],
    }  # fmt: skip


def seconds(step: Step) -> float:
    """Of one step, until the card, where there is one, has done it."""
    import torch

    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    finish()
    begun = time.perf_counter()
    step()
    finish()
    return time.perf_counter() - begun


def copy_rate() -> float:
    """Bytes a second that a copy on the card reads and writes."""
    import torch

    source = torch.empty(COPY, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * COPY / min(seconds(lambda: target.copy_(source)) for _ in range(10))


def card() -> Row:
    """Which card and which versions it was."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "memory": found.total_memory,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }


def _child(arguments: Sequence[Any], emulated: bool = False) -> Row:
    return measured(*arguments, emulated=emulated) if arguments else card()


# -- the command


def case(
    step: str, method: str, budget: int | None, pairs: int, dry: DryCard | None = None, stop: float = float("inf"),
    total: float = float("inf"),
) -> Row:  # fmt: skip
    """A case's result from a process of its own.

    Args:
        step, method, budget, pairs: as of `measured`.
        dry: the emulated card.
        stop: when the process is ended, of `time.monotonic`.
        total: seconds that all cases together have.
    """
    head: Row = {"step": step, "method": method, "budget": budget}
    command, environment = _process([step, method, budget, pairs], f"{step}-{method}", dry)
    environment |= METRICS if "compile" in method or "inductor" in method else {}
    left = stop - time.monotonic()
    if left <= 0:
        return head | {"error": f"not started: {STOPPED}"}
    limit = min(left, LIMIT_SECONDS)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        enough = min(LIMIT_SECONDS, max(ENOUGH_SECONDS, NEARLY_ALL * total))
        return head | {"error": f"not done within {limit:.0f} s" if left >= enough else f"ended: {STOPPED}"}
    if done.returncode == 0:
        return head | json.loads(done.stdout.strip().splitlines()[-1])
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return head | {"error": (lines[-1] if lines else f"exit code {done.returncode}")[:2000]}


def _process(arguments: Sequence[Any], name: str, dry: DryCard | None) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of a process that sees the card: it measures a case, or without arguments only
    describes the card."""
    child = ["--child", json.dumps(arguments), *(["--dry", dry.name] if dry else [])]
    if dry is not None:
        return dry.command("fit", child), dry.variables(os.environ, name)
    return [sys.executable, str(Path(__file__).resolve()), *child], dict(os.environ)


def described(dry: DryCard | None) -> Row:
    """The card and the versions, from a process of its own, so that this one takes nothing of the card.

    Raises:
        RuntimeError: that process fails.
    """
    command, environment = _process([], "describe", dry)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=DESCRIBE_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"the card cannot be described: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def cases_of_ours(rows: Sequence[Row]) -> list[tuple[str, int | None]]:
    """Methods and budgets: the floor, shares of what eager mode reserves, and what peers reserve."""
    reserved = {row["method"]: row["reserved"] for row in rows if "error" not in row}
    budgets: dict[str, int | None] = {"floor": None}
    if "eager" in reserved:
        budgets |= {f"{share}": int(share * reserved["eager"]) for share in SHARES}
    budgets |= {name: reserved[name] for name in BESIDE if name in reserved}
    return [(f"fit-{engine}-{name}", budget) for engine in ENGINES for name, budget in budgets.items()]


def record(options: argparse.Namespace) -> int:
    """Measure, and write what was found. Returns the exit code."""
    steps, patterns = options.only or [*fit_steps.LARGE], options.methods.split(",")
    stop = time.monotonic() + (options.seconds or float("inf"))
    dry = golden.dry_card(options)
    found: list[Row] = []
    here, known = None, dict[tuple[str, str], Row]()
    if options.missing:
        here = described(dry)
        for row in stored(path_of(options.output, here["gpu"], here["torch"])):
            if not (was_stopped(row) or (options.again and "error" in row)):
                known[row["step"], row["method"]] = row

    def take(step: str, method: str, budget: int | None) -> Row | None:
        if not any(fnmatch.fnmatchcase(method, pattern) for pattern in patterns):
            return None
        if (step, method) in known:
            return known[step, method]
        row = case(step, method, budget, options.pairs, dry, stop, options.seconds or float("inf"))
        found.append(row)
        print(line(row), flush=True)
        write(options.output, found, here)  # each: the machine may be taken away
        return row

    for step in steps:
        rows = [row for method in PEERS if (row := take(step, method, None)) is not None]
        for method, budget in cases_of_ours(rows):
            take(step, method, budget)
    path = write(options.output, found, here)
    print(f"written: {path}" if path else "nothing was measured: no file was written")
    failed = [row for row in found if "error" in row or row["reserved"] > (row.get("given") or row["reserved"])]
    if not failed:
        return 0 if found or options.missing else 1
    return SOME_MISSING if any("error" not in row or was_stopped(row) for row in (*known.values(), *found)) else 1


def was_stopped(row: Row) -> bool:
    """Whether a case has no result because the seconds for all were over, so that a later run can have one."""
    return STOPPED in row.get("error", "")


def has_failed(row: Row) -> bool:
    """Whether a case has an error that is neither an answer nor due to the seconds for all."""
    return "error" in row and not was_stopped(row) and not any(one in row["error"] for one in REFUSED)


def stored(path: Path) -> list[Row]:
    """The cases in a file; none where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []


def path_of(folder: Path, gpu: str, torch_version: str) -> Path:
    """The file of a card's and a torch's cases."""
    return folder / f"{golden_format.slug(gpu)}.{golden_format.slug(torch_version)}.json"


def write(folder: Path, rows: Sequence[Row], here: Row | None = None) -> Path | None:
    """Store the results; those of earlier runs on the same card and torch stay where nothing new was measured. None
    where there are none, or it is not known of which card they are: none was measured, and ``here`` is None."""
    good = next((row for row in rows if "gpu" in row), here)
    if good is None or not rows:
        return None
    path = path_of(folder, good["gpu"], good["torch"])
    before = stored(path)
    new = {(row["step"], row["method"]) for row in rows}
    kept = [row for row in before if (row["step"], row["method"]) not in new]
    shared = {name: good[name] for name in ("gpu", "memory", "torch", "cuda")}
    own = [{name: value for name, value in row.items() if name not in shared} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a process that is ended leaves the whole file or the one before
    part.write_text(json.dumps(shared | {"cases": [*kept, *own]}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def line(row: Row) -> str:
    """A result for the terminal."""
    name = f"{row['step']:12} {row['method']:20}"
    if "error" in row:
        return f"{name} FAILED  {row['error']}"
    over = "" if row["reserved"] <= (row.get("given") or row["reserved"]) else "  OVER ITS BUDGET"
    times = f"{row['ratio']:.3f} of eager's {row['eager_seconds']:.3f} s"
    return f"{name} {row['reserved'] / 1e9:7.2f} GB reserved, {times}{over}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*fit_steps.STEPS], help="this step only")
    parser.add_argument("--methods", default="*", metavar="A,B", help="of these names only: eager,fit-graph-*")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"how often steps are timed (default {PAIRS})")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results/fit_gpu"
    )
    parser.add_argument("--missing", action="store_true", help="those alone that the file has no result of")
    parser.add_argument("--again", action="store_true", help="with --missing: those that failed, too")
    parser.add_argument("--seconds", type=float, metavar="S", help="for all cases: then the rest is named as missing")
    parser.add_argument("--dry", metavar="CARD", help="on this card, emulated: no GPU is needed, and no time is one")
    parser.add_argument("--torch", metavar="PATH", help="with --dry: environment with the CUDA build of torch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    reason = golden.no_gpu() if options.dry is None else None
    if reason is not None:
        print(f"fit.py: {reason}", file=sys.stderr)
        return 2
    if options.child and options.dry is not None:
        from golden_dry import emulated

        with emulated(options.dry):
            print(json.dumps(_child(json.loads(options.child), emulated=True)))
        return 0
    if options.child:
        print(json.dumps(_child(json.loads(options.child))))
        return 0
    return record(options)


if __name__ == "__main__":
    sys.exit(main())
