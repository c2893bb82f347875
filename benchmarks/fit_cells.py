"""Is a fused step ever over its budget, or wrong? Every kind of model and call, in three budgets and three modes.

    python benchmarks/fit_cells.py [--cells "dropout,batch norm"] [--modes plain,held,early]

The kinds are those of tests/rewriting/cells.py, two in a row each; the budgets are the least that memplan takes, and
0.4 and 0.8 of the way from there to eager's peak; in mode `held` gradients are there before the step, in `early` SGD
updates each parameter as its gradient comes. The peak is measured by the events of the CPU's allocator. Gradients, in
`early` what the update took off, are held against the same step in float64, each parameter's: at most twice the error
of eager mode, or of `torch.compile` where it draws no random numbers, and 64 eps of the largest of its module. No
times: what else runs on the machine does not matter. Writes benchmarks/results/fit_cells.json and fit_cells.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src"), str(ROOT / "tests")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

from benchmarks.frontier.measure import live_bytes, peak_above, storage_bytes  # noqa: E402
from rewriting.cells import BATCH, CELLS, Twice, total  # noqa: E402
from verification.fitting.quick import QUICK  # noqa: E402

import memplan  # noqa: E402
from memplan import _torch  # noqa: E402
from memplan.errors import BudgetError  # noqa: E402

Mode = Literal["plain", "held", "early"]
MODES: tuple[Mode, ...] = ("plain", "held", "early")
SHARES = (0.0, 0.4, 0.8)
RATE = 1e-3
FACTOR, SLACK = 2.0, 64 * torch.finfo(torch.float32).eps
WITHIN = 0.05
Row = dict[str, Any]
Loss = Callable[[], Tensor]


class Kind:
    """A cell's model twice, with what it is called with, and its step by hand."""

    def __init__(self, cell: str, mode: Mode) -> None:
        torch.manual_seed(0)
        self.mode: Mode = mode
        self.model: nn.Module = Twice(CELLS[cell].make(), CELLS[cell].make())
        self.inputs, self.kwargs = CELLS[cell].arguments(BATCH)

    def in_float64(self) -> Kind:
        """A copy of it."""
        other = copy.deepcopy(self)
        other.model.double()
        widen = lambda one: one.double() if isinstance(one, Tensor) and one.is_floating_point() else one  # noqa: E731
        other.inputs, other.kwargs = _torch.tree_map(widen, (self.inputs, self.kwargs))
        return other

    def loss(self) -> Tensor:
        """Of the model as it is."""
        return total(self.model(*self.inputs, **self.kwargs))

    def prepare(self) -> None:
        """Gradients are taken away, or there."""
        for one in self.model.parameters():
            if self.mode != "held" or not one.requires_grad:
                one.grad = None
            elif one.grad is None:
                one.grad = torch.ones_like(one)
            else:
                one.grad.fill_(1)  # no memory is taken

    def gradients(self, loss: Loss, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], bool]:
        """Of one step, as far as it shows them; and whether random numbers were drawn. The model is as before after it.

        Where an optimizer updates early, they are what it took off, divided by its rate.
        """
        kept = {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        torch.manual_seed(5)
        before = torch.get_rng_state()
        self.prepare()
        loss().backward()
        if optimizer is not None:
            optimizer.step()
        drawn = not torch.equal(before, torch.get_rng_state())
        found = dict[str, Tensor]()
        for name, one in self.model.named_parameters():
            if not one.requires_grad:
                continue
            if self.mode == "early":
                found[name] = (kept[name].double() - one.detach().double()) / RATE
            elif one.grad is not None:
                found[name] = one.grad.clone()
        self.model.load_state_dict(kept)
        return found, drawn

    @property
    def resident(self) -> int:
        """Bytes that are there before the step."""
        self.prepare()
        model = self.model
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        inputs = [one for one in _torch.tree_leaves((self.inputs, self.kwargs)) if isinstance(one, Tensor)]
        return storage_bytes([*model.parameters(), *model.buffers(), *inputs, *gradients])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of mode ``early``."""
    return torch.optim.SGD(parameters, lr=RATE)


def by_hand(kind: Kind) -> torch.optim.Optimizer | None:
    return sgd(kind.model.parameters()) if kind.mode == "early" else None


def references(cell: str, mode: Mode) -> tuple[Mapping[str, Tensor], list[Mapping[str, Tensor]]]:
    """The step in float64, and those that a fused one may be twice as far off as."""
    plain, compiled = Kind(cell, mode), Kind(cell, mode)
    wide = plain.in_float64()
    truth, _ = wide.gradients(wide.loss, by_hand(wide))
    eager, drawn = plain.gradients(plain.loss, by_hand(plain))
    if drawn:
        return truth, [eager]  # torch.compile draws other numbers
    call = torch.compile(compiled.loss)
    return truth, [eager, compiled.gradients(call, by_hand(compiled))[0]]


def worst(found: Mapping[str, Tensor], truth: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> float:
    """The largest error of a parameter's gradient, as a share of what is allowed."""
    norms = {name: float(one.double().norm()) for name, one in truth.items()}
    shares = list[float]()
    for name, exact in truth.items():
        module = name.rpartition(".")[0]
        largest = max(norm for other, norm in norms.items() if other.rpartition(".")[0] == module)
        error, *errors = (float((one[name].double() - exact.double()).norm()) for one in (found, *others))
        shares.append(error / (FACTOR * max(errors) + SLACK * largest))
    return max(shares)


def rows_of(cell: str, mode: Mode) -> Iterator[Row]:
    """One for each budget."""
    truth, others = references(cell, mode)
    options: dict[str, Any] = {"loss": total, "engine": "inductor", "heuristics": QUICK, "pairs": 0}
    options |= {"accumulate": 2} if mode == "held" else {}
    options |= {"optimizer": sgd, "early": True} if mode == "early" else {}
    probe = Kind(cell, mode)
    with_eager = memplan.plan(
        probe.model, *probe.inputs, kwargs=probe.kwargs, budget="1TB", costs="roofline",
        **{name: value for name, value in options.items() if name in ("loss", "accumulate", "optimizer", "early")},
    )  # fmt: skip
    try:
        memplan.fit(probe.model, *probe.inputs, kwargs=probe.kwargs, budget=1, **options)
        raise AssertionError("no step fits in one byte")
    except BudgetError as error:
        floor = error.smallest_budget
    for share in SHARES:
        budget = int(floor + share * max(0, with_eager.eager_peak - floor))
        row = {"cell": cell, "mode": mode, "share": share, "budget": budget, "eager": with_eager.eager_peak}
        yield row | point(Kind(cell, mode), budget, options, lambda found: worst(found, truth, others))


def point(kind: Kind, budget: int, options: dict[str, Any], error: Callable[[Mapping[str, Tensor]], float]) -> Row:
    """One step in one budget."""
    base, before = kind.resident, live_bytes()
    fitted = memplan.fit(kind.model, *kind.inputs, kwargs=kind.kwargs, budget=budget, **options)
    planned = fitted.loss
    assert planned is not None, "a loss was given"
    call = lambda: planned(*kind.inputs, **kind.kwargs)  # noqa: E731
    off = round(error(kind.gradients(call, fitted.optimizer)[0]), 4)

    def step() -> None:
        call().backward()
        if fitted.optimizer is not None:
            fitted.optimizer.step()

    kind.prepare()
    kept = live_bytes() - before
    measured = base + kept + peak_above(kind.prepare, step)
    return {"predicted": fitted.plan.peak, "measured": measured, "error": off}


def complaints(rows: Sequence[Row]) -> list[str]:
    """What falls short, in words."""
    found = list[str]()
    for row in rows:
        name = f"{row['cell']}, {row['mode']}, {row['share']}"
        if row["measured"] > row["budget"]:
            found.append(f"{name}: {row['measured']:,} bytes measured, {row['budget']:,} given")
        if abs(row["predicted"] / row["measured"] - 1) > WITHIN:
            found.append(f"{name}: {row['predicted']:,} bytes predicted, {row['measured']:,} measured")
        if not row["error"] <= 1:
            found.append(f"{name}: a gradient is {row['error']:.2f} times as far off as is allowed")
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: a row for each cell, of all its budgets and modes."""
    lines = ["| cell | points | over budget | largest error of the prediction | largest error, of what is allowed |"]
    lines.append("| --- | --: | --: | --: | --: |")
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        over = sum(row["measured"] > row["budget"] for row in own)
        off = max(abs(row["predicted"] / row["measured"] - 1) for row in own)
        lines.append(f"| {cell} | {len(own)} | {over} | {off:.2%} | {max(row['error'] for row in own):.2f} |")
    return lines


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--cells", default=",".join(CELLS), metavar="A,B", help="these only")
    parser.add_argument("--modes", default=",".join(MODES), metavar="A,B", help="plain, held, early")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "fit_cells.json"
    known: list[Row] = json.loads(path.read_text(encoding="utf-8"))["points"] if path.exists() else []
    for cell in options.cells.split(","):
        for mode in (mode for mode in MODES if mode in options.modes.split(",")):
            fresh = list(rows_of(cell, mode))
            known = [row for row in known if (row["cell"], row["mode"]) != (cell, mode)] + fresh
            print(cell, mode, *complaints(fresh) or ["right"], sep=": ", flush=True)
            written = {"torch": torch.__version__, "points": known}
            path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    lines = [f"Engine `inductor`, torch {torch.__version__}.", "", *table(known)]
    (RESULTS / "fit_cells.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(*complaints(known), sep="\n")
    return 1 if complaints(known) else 0


if __name__ == "__main__":
    sys.exit(main())
