"""Does a planned step keep its budget on a card, and is its peak the predicted one? On the dry card, without a GPU.

    python benchmarks/fit_dry.py --torch PATH/TO/ENV [--card h100] [--steps "3D U-Net"] [--engines graph] [--shares 0.4]

Each cell is a process of its own: a step is planned for a budget, the plan is put in its place, and it runs on the CUDA
build of torch against the emulated card (docs/dry.md). Both engines, three budgets: the least for which there is a
plan, and 0.4 and 0.8 of the way from there to what eager mode is predicted to reserve. No proof is made, as no kernel
computes anything, so that a plan is never made a second time for less, as `fit` does. Counted is what torch's own
allocator says; kernels are tuned in the first of the steps. No times. Writes benchmarks/results/fit_dry.json and
fit_dry.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src"), str(ROOT / "tools" / "gpu")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

from benchmarks.frontier.models import Subject  # noqa: E402
from torch import nn  # noqa: E402

import memplan  # noqa: E402
from memplan import _torch  # noqa: E402
from memplan.errors import BudgetError, MemplanError  # noqa: E402
from memplan.planning.planner import Planner  # noqa: E402
from memplan.planning.request import Request, request  # noqa: E402
from memplan.planning.settings import Allow, Engine, PlanOptions  # noqa: E402
from memplan.rewriting.compiled import compile_parts  # noqa: E402
from memplan.rewriting.install import install  # noqa: E402
from memplan.trace.records import Counters  # noqa: E402
from memplan.trace.step import StepOptions  # noqa: E402
from memplan.verification.fitting.plan_cache import Plans  # noqa: E402

fit_steps: Any = importlib.import_module("fit_steps")  # tools/gpu is no package
ENGINES: tuple[Engine, ...] = ("graph", "inductor")
SHARES = (0.0, 0.4, 0.8)
NEAR = 0.01
Row = dict[str, Any]
Cell = tuple[str, Engine, float]


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with a squeeze between them, as mobile networks have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm, self.wide = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.SiLU(),
                                     nn.Conv2d(width // 4, width, 1), nn.Sigmoid())  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (N, C, H, W) -> (N, C, H, W)."""
        y = nn.functional.silu(self.norm(self.deep(x)))
        return x + self.wide(y * self.squeeze(y))


def mobile(batch: int = 16) -> Subject:
    """Eight separable blocks on 32 channels of 64 x 64."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *(Separable(32) for _ in range(8)), nn.Conv2d(32, 10, 64))
    data = torch.randn(batch, 3, 128, 128)
    return Subject(model, (data,), (torch.randint(10, (batch, 1, 1)),), nn.functional.cross_entropy, {})


STEPS: dict[str, Callable[[], Subject]] = {
    "variational decoder": lambda: _decoder(4),
    "separable convolutions": mobile,
    "GPT with dropout, 6 layers of 512": partial(fit_steps.gpt2_medium, 2, 6, 512),
    "3D U-Net, 64 x 64 x 64": partial(fit_steps.unet3d, 1, 64, (16, 32, 64, 128)),
    "ResNet-50, batch 8": partial(fit_steps.resnet50, 8),
}
"""The quick ones first: each cell plans anew."""


def _decoder(batch: int) -> Subject:
    layers: list[nn.Module] = [nn.Conv2d(4, 128, 3, padding=1)]
    for wide, narrow in ((128, 128), (128, 64), (64, 32)):
        layers += [nn.GroupNorm(8, wide), nn.SiLU(), nn.ConvTranspose2d(wide, narrow, 4, 2, 1)]
    model = nn.Sequential(*layers, nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1))
    data = torch.randn(batch, 4, 32, 32)
    return Subject(model, (data,), (torch.randn(batch, 3, 256, 256),), nn.functional.mse_loss, {})


# ---------------------------------------------------------------- in the process that sees the card


def build(step: str, engine: Engine, share: float, out: str) -> Callable[[], None]:
    """Plan a step, put the plan in its place, and return what runs it; ``out`` is the file for what was counted."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(out).with_suffix(""))  # of its own: nothing in it is tuned yet
    subject = fit_steps.on("cuda", STEPS[step])
    planned, row = with_plan(subject, engine, lambda floor, eager: floor + max(0, int(share * (eager - floor))))
    Path(out).write_text(json.dumps(row), encoding="utf-8")

    return partial(run_step, planned, subject)


def run_step(planned: nn.Module, subject: Subject) -> None:
    """Run a planned step, with nothing cached before and counters that begin with it."""
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    planned(*subject.inputs, *subject.targets).backward()
    planned.zero_grad(set_to_none=True)


def with_plan(
    subject: Subject,
    engine: Engine,
    budget_of: Callable[[int, int], int],
    *,
    allow: Allow = "exact",
    costs: str | None = None,
) -> tuple[nn.Module, Row]:
    """Plan a step on the card and put the plan in its place, without a proof: the step, called with inputs and targets
    for its loss, and eager mode's predicted peak, the budget, the plan's predicted peak and its kinds of kernels.

    Args:
        subject: on the card.
        engine, allow, costs: of `memplan.fit`.
        budget_of: the budget in bytes, of the least for which there is a plan and eager mode's predicted peak.
    """
    inputs, targets = subject.inputs, subject.targets

    def asked(budget: int) -> Request:
        options = PlanOptions(budget=budget, engine=engine, allow=allow, costs=costs)
        return request(subject.model, StepOptions(inputs, {}, targets, subject.loss, None, None), options, fake=False)

    request_ = asked(1)
    planner = Planner(request_.step)
    eager = planner.study(request_.call, request_.settings, key=0).eager_peak(request_.settings)
    try:
        floor = planner.planned(request_.call, request_.settings, 1, key=0, remedies=False).plan.peak
    except BudgetError as error:
        floor = error.smallest_budget
    budget = budget_of(floor, eager)
    request_ = asked(budget)
    planned = planner.planned(request_.call, request_.settings, budget, key=0, remedies=False)
    if planned.fused is not None:
        compile_parts(planned.fused)
    plans = Plans(request_.step, request_.settings, budget, lambda _: None)
    plans.expect(planned)
    install(request_.step, plans)
    kernels = sorted({group.kernel for group in planned.plan.kernels})
    return request_.step, {"eager": eager, "budget": budget, "predicted": planned.plan.peak, "kernels": kernels}


# ---------------------------------------------------------------- here


def run_dry(
    build: Callable[..., Any], card: str, environment: str, *, steps: int = 2
) -> tuple[Row, Sequence[Counters]]:
    """Run a step on the emulated card. An error is the row's, and then there are no counters.

    Args:
        build: returns the step, given a file to write its row to.
        card: name of the card.
        environment: of a CUDA build of torch.
        steps: their number.

    Returns:
        The row, and the counters of the run that nothing but torch watches, each since its own reset.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "row.json")
        try:
            trace = memplan.measure(partial(build, out), device=card, dry=True, environment=environment, steps=steps)
        except MemplanError as error:
            return {"error": f"{type(error).__name__}: {error}"}, ()
        return json.loads(Path(out).read_text(encoding="utf-8")) | {"torch": trace.torch}, trace.counters[1:]


def highest(counters: Sequence[Counters]) -> Row:
    """Return the largest reserved and allocated bytes; an empty row without counters."""
    names = ("reserved", "allocated") if counters else ()
    return {name: max(getattr(counter, name) for counter in counters) for name in names}


def cell(step: str, engine: Engine, share: float, card: str, environment: str) -> Row:
    """Run one cell; an error is an entry."""
    row, counters = run_dry(partial(sys.modules["fit_dry"].build, step, engine, share), card, environment)
    return {"step": step, "engine": engine, "share": share, "card": card} | row | highest(counters)


def line(row: Row) -> str:
    """Return a row of the table."""
    head = f"| {row['step']} | {row['engine']} | {row['share']:.1f} |"
    if "error" in row:
        return f"{head} {row['error'][:80]} | | | |"
    mib = (f"{row[name] / 2**20:,.0f}" for name in ("eager", "budget", "predicted", "reserved"))
    return f"{head} {' | '.join(mib)} | {row['reserved'] / row['predicted'] - 1:+.2%} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells and write the results; 0 where all keep their budget and are near."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, metavar="ENV", help="an environment with a CUDA build of torch")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--steps", help="those whose name has this in it")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    options = parser.parse_args(arguments)
    shares = [float(share) for share in options.shares.split(",")]
    rows: list[Row] = []
    cells: list[Cell] = [(step, engine, share) for engine in ENGINES for step in STEPS for share in SHARES]
    for step, engine, share in cells:
        if engine in options.engines.split(",") and share in shares and (options.steps or "") in step:
            rows.append(cell(step, engine, share, options.card, options.torch))
            print(line(rows[-1]), flush=True)
            write(rows, cells)
    print(said(rows, len(rows)))
    counted = [row for row in rows if "error" not in row]
    return 0 if len(counted) == len(rows) and not over(counted) and not far(counted) else 1


def over(counted: Sequence[Row]) -> list[Row]:
    """Cells that take more than their budget."""
    return [row for row in counted if row["reserved"] > row["budget"]]


def far(counted: Sequence[Row]) -> list[Row]:
    """Cells that are not near what was predicted."""
    return [row for row in counted if abs(row["reserved"] / row["predicted"] - 1) > NEAR]


def said(rows: Sequence[Row], asked: int) -> str:
    """The results in short."""
    counted = [row for row in rows if "error" not in row]
    return (
        f"{len(counted)} of {asked} cells ran; {len(over(counted))} over the budget, {len(far(counted))} over 1 % from "
        "the prediction"
    )


def write(new: Sequence[Row], cells: Sequence[Cell]) -> None:
    """Write both files; cells of this card that did not run now stay as they were."""
    known: list[Row] = json.loads((RESULTS / "fit_dry.json").read_text(encoding="utf-8"))
    of = {(row["step"], row["engine"], row["share"]): row for row in [*known, *new] if row["card"] == new[0]["card"]}
    rows = [of[cell] for cell in cells if cell in of]
    (RESULTS / "fit_dry.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    head = ["| step | engine | budget | eager, MiB | budget, MiB | predicted | reserved | off |",
            "|---|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    text = [*head, *map(line, rows), "", said(rows, len(cells)), ""]
    (RESULTS / "fit_dry.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import fit_dry  # the other process loads it by this name

    sys.exit(fit_dry.main())
