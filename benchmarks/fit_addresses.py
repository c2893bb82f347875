"""What could other addresses save of what a planned step reserves on a card, and which way to them is sound?

    python benchmarks/fit_addresses.py --torch PATH/TO/ENV [--card h100] [--steps "3D U-Net"] [--engines graph]

Each cell is a planned step of benchmarks/fit_dry.py in a process of its own, on the CUDA build of torch against the
emulated card (docs/dry.md): torch's own allocator counts, and nothing is computed. The same plan runs

* as it is (``default``);
* after a segment was reserved for it (``first``): a block is allocated and freed, which the allocator then cuts up. Of
  13 sizes, from what the step allocates to what it reserves, the one counts with which it reserves least;
* with expandable segments (``expandable``).

Then it trains for three steps in loops that allocate beside the plan: SGD without a state (``sgd``), AdamW (``adamw``),
AdamW with an evaluation of the model after each step (``eval``), and the same with 4 MiB that stay after each step
(``keep``). There the segment is reserved before the first step (``first``), before each (``each``), or in a
`torch.cuda.MemPool` that both passes have for themselves (``pool``). Writes fit_addresses.json and fit_addresses.md in
benchmarks/results.

With ``--planned`` the cells that ran are planned anew by processes that have expandable segments from the beginning,
whose plans count by them: is what is reserved what was predicted, and how much is the least budget?
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tools" / "gpu")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

import fit_dry  # noqa: E402

from memplan import _torch  # noqa: E402

MIB = 1 << 20
SIZES = 13
"""Sizes of the reserved segment that are tried."""
LOOPS = ("sgd", "adamw", "eval", "keep")
WAYS = ("default", "first", "each", "pool", "expandable")
SOUND = ("first", "pool", "expandable")
"""Ways in the report: ``each`` is never better than ``first``."""
STEPS = 3
Cell = dict[str, Any]


# ---------------------------------------------------------------- in the process that sees the card


def build(step: str, engine: Any, share: float, out: str) -> Callable[[], Any]:
    """Plan a step, run it in all ways, and write what was counted to the file ``out``. The returned step does nothing
    of it; where the file exists already, that is all."""
    if not Path(out).exists():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(out).with_suffix(""))
        subject = fit_dry.fit_steps.on("cuda", fit_dry.STEPS[step])
        planned, row = fit_dry.with_plan(
            subject, engine, lambda floor, eager: floor + max(0, int(share * (eager - floor)))
        )  # fmt: skip
        Path(out).write_text(json.dumps(row | counted(subject, planned)), encoding="utf-8")
    return lambda: torch.empty(512, device="cuda").add_(1)


def counted(subject: Any, planned: Any) -> Cell:
    """Return what torch counts of a planned step in all ways, in bytes."""

    def run() -> None:
        planned(*subject.inputs, *subject.targets).backward()
        planned.zero_grad(set_to_none=True)

    def peak(size: int = 0) -> tuple[int, int]:
        """Return the most allocated and reserved bytes of a step, after a segment of this size was reserved."""
        with emptied():
            reserve(size)
            torch.cuda.reset_peak_memory_stats()
            run()
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    run()  # kernels are tuned
    with emptied():
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    allocated, reserved = peak()
    sizes = [_in_pages(allocated - before[0] + (reserved - before[1] - allocated + before[0]) * k // (SIZES - 1))
             for k in range(SIZES)]  # fmt: skip
    first, size = min((peak(size)[1], size) for size in sizes)
    with expandable():
        _, by_pages = peak()
    loops = {kind: {way: _loop(subject, planned, kind, way, size) for way in WAYS} for kind in LOOPS}
    return {"allocated": allocated, "reserved": reserved, "size": size, "first": first, "expandable": by_pages,
            "loops": loops}  # fmt: skip


def reserve(size: int) -> None:
    """Allocate a block and free it: its segment stays in the allocator's cache."""
    if size:
        torch.empty(size, dtype=torch.uint8, device="cuda")


def _in_pages(size: int) -> int:
    return -(-size // (2 * MIB)) * 2 * MIB


@contextmanager
def emptied() -> Iterator[None]:
    """Within this context the allocator begins without a cache, and with new counters."""
    gc.collect()
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield


@contextmanager
def expandable() -> Iterator[None]:
    """Within this context new segments are expandable."""
    set_settings: Any = torch._C._accelerator_setAllocatorSettings  # pyright: ignore  # since torch 2.9
    set_settings("expandable_segments:True")
    try:
        yield
    finally:
        set_settings("expandable_segments:False")


def _loop(subject: Any, planned: Any, kind: str, way: str, size: int) -> int:
    """Return the most bytes that a training loop reserves; ``size``: of the segment that is reserved for the step."""
    parameters, stays = list(planned.parameters()), list[torch.Tensor]()
    with emptied(), ExitStack() as stack:
        if way == "expandable":
            stack.enter_context(expandable())
        pool = torch.cuda.MemPool() if way == "pool" else None
        optimizer = torch.optim.SGD(parameters, lr=0.1) if kind == "sgd" else torch.optim.AdamW(parameters)
        for step in range(STEPS):
            with ExitStack() as passes:
                if pool is not None:  # the pool is that of a thread
                    passes.enter_context(torch.autograd.set_multithreading_enabled(False))
                    passes.enter_context(torch.cuda.use_mem_pool(pool))
                if way == "each" or (way in ("first", "pool") and not step):
                    reserve(size)
                planned(*subject.inputs, *subject.targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if kind in ("eval", "keep"):
                with torch.no_grad():
                    subject.model(*subject.inputs)
            if kind == "keep":
                stays.append(torch.empty(4 * MIB, dtype=torch.uint8, device="cuda"))
        del optimizer, pool
        stays.clear()
        return torch.cuda.max_memory_reserved()


# ---------------------------------------------------------------- here


def cell(step: str, engine: str, share: float, card: str, environment: str) -> Cell:
    """Run one cell; an error is an entry."""
    build = partial(sys.modules["fit_addresses"].build, step, engine, share)
    row, _ = fit_dry.run_dry(build, card, environment, steps=1)
    return {"step": step, "engine": engine, "share": share, "card": card} | row


def planned_for_expandable(
    ran: Mapping[tuple[str, str, float], Cell], step: str, engine: Any, share: float, card: str, environment: str
) -> Cell:
    """Return a cell that ran, with a run of a plan that was made and runs with expandable segments."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    row = fit_dry.cell(step, engine, share, card, environment)
    anew = {name: row[name] for name in ("budget", "predicted", "reserved") if name in row}
    return dict(ran[step, engine, share]) | ({"planned": anew} if anew else {})


def known() -> dict[tuple[str, str, float], Cell]:
    """Return the cells in the results, by step, engine and share."""
    file = RESULTS / "fit_addresses.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return {(row["step"], row["engine"], row["share"]): row for row in rows}


def change(after: int, before: int) -> float:
    """Return the relative change of bytes."""
    return after / before - 1


def worst(loops: Mapping[str, Mapping[str, int]], way: str) -> float:
    """Return the change by a way in the loop in which it saves least, or costs most."""
    return max(change(bytes_of[way], bytes_of["default"]) for bytes_of in loops.values())


def report(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the report's text. Cells that ended in an error do not count."""
    ran = [cell for cell in cells if "error" not in cell]
    lines = [
        "| step | engine | budget | reserved, MiB | not allocated | a segment first | expandable "
        "| in a loop, at worst: a segment first | a pool | expandable |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ran:
        reserved, loops = row["reserved"], row["loops"]
        shares = [1 - row["allocated"] / reserved]
        changes = [change(row["first"], reserved), change(row["expandable"], reserved)]
        changes += [worst(loops, way) for way in SOUND]
        lines.append(
            f"| {row['step']} | {row['engine']} | {row['share']:.1f} | {reserved / MIB:,.0f} | "
            f"{' | '.join([f'{share:.1%}' for share in shares] + [f'{part:+.1%}' for part in changes])} |"
        )
    unallocated = statistics.median(1 - row["allocated"] / row["reserved"] for row in ran)
    said = [
        f"{len(ran)} planned steps: in the median {unallocated:.1%} of the reserved bytes are not allocated at the "
        "peak."
    ]
    for way, title in (("first", "A segment that is reserved first"), ("expandable", "Expandable segments")):
        median = statistics.median(change(row[way], row["reserved"]) for row in ran)
        said.append(f"{title}: {median:+.1%} in the median of steps,")
        said[-1] += f" {_raised(ran, way)}."
    said.append(f"A pool of its own: {_raised(ran, 'pool')}.")
    anew = [row for row in ran if "planned" in row]
    if anew:
        exact = sum(row["planned"]["reserved"] == row["planned"]["predicted"] for row in anew)
        said.append(f"Planned with expandable segments: {exact} of {len(anew)} reserve what is predicted, to the byte;")
        least = [
            f"{row['step']}, {row['engine']}, {row['planned']['reserved'] / MIB:,.0f} instead of "
            f"{row['reserved'] / MIB:,.0f} MiB"
            for row in anew
            if not row["share"]
        ]
        said[-1] += f" at the least budget {'; '.join(least)}." if least else " none at the least budget."
    return "\n".join([*lines, "", " ".join(said), ""])


def _raised(ran: Sequence[Mapping[str, Any]], way: str) -> str:
    """Return in how many loops a way reserves more than the step as it is."""
    loops = [loop for row in ran for loop in row["loops"].values()]
    more = [change(loop[way], loop["default"]) for loop in loops if loop[way] > loop["default"]]
    return f"more in {len(more)} of {len(loops)} loops" + (f", by up to {max(more):.0%}" if more else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells and write the results; 0 where all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, metavar="ENV", help="an environment with a CUDA build of torch")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--steps", default="", help="those whose name has this in it")
    parser.add_argument("--engines", default=",".join(fit_dry.ENGINES))
    parser.add_argument("--shares", default=",".join(map(str, fit_dry.SHARES)))
    parser.add_argument("--planned", action="store_true", help="plan cells that ran for expandable segments")
    options = parser.parse_args(arguments)
    run = partial(planned_for_expandable, known()) if options.planned else cell
    rows = list[Cell]()
    for engine in options.engines.split(","):
        for step in (name for name in fit_dry.STEPS if options.steps in name):
            for share in map(float, options.shares.split(",")):
                rows.append(run(step, engine, share, options.card, options.torch))
                write(rows)
    return 1 if any("error" in row for row in rows) else 0


def write(new: Sequence[Cell]) -> None:
    """Write both files; cells that did not run now stay as they were."""
    by_key = known() | {(row["step"], row["engine"], row["share"]): row for row in new}
    keys = [(step, engine, share) for engine in fit_dry.ENGINES for step in fit_dry.STEPS for share in fit_dry.SHARES]
    rows = [by_key[key] for key in keys if key in by_key]
    (RESULTS / "fit_addresses.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "fit_addresses.md").write_text(report(rows), encoding="utf-8")


if __name__ == "__main__":
    import fit_addresses  # the other process loads it by this name

    sys.exit(fit_addresses.main())
