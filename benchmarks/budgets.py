"""Is a plan ever over its budget? Peaks of planned steps, measured beside predicted, at every tenth of eager's total.

    python benchmarks/budgets.py [--models gpt,resnet18]

For every model of the frontier benchmark, with and without gradients held before the step: plans for 0.9, 0.8 ... of
eager's total down to the floor, and for the floor itself; each runs through the engine, its peak is measured by the
events of the CPU's allocator, and its gradients are compared with eager's bit by bit. No times: what else runs on the
machine does not matter. Writes benchmarks/results/budgets.json and budgets.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

from benchmarks.frontier.models import MODELS, TITLES  # noqa: E402

from memplan.planning.capture.flat_call import Call, call_of  # noqa: E402
from memplan.planning.capture.loss_module import with_loss  # noqa: E402
from memplan.planning.graph.joint_graph import RESIDENT  # noqa: E402
from memplan.planning.levers.lever import GradientUse  # noqa: E402
from memplan.planning.planner import Planner  # noqa: E402
from memplan.planning.settings import Settings  # noqa: E402
from memplan.planning.study import Planned  # noqa: E402
from memplan.rewriting.engine import Engine  # noqa: E402
from memplan.verification.measurement.peak_and_time import measure_step  # noqa: E402

THREADS = 2
Row = dict[str, Any]


def prepare(step: nn.Module, *, held: bool) -> None:
    for parameter in step.parameters():
        parameter.grad = torch.zeros_like(parameter) if held and parameter.requires_grad else None


def gradients(step: nn.Module, call: Call, engine: Engine | None, *, held: bool) -> list[torch.Tensor | None]:
    """Of one step, from the same random state and the same buffers whoever makes it."""
    kept = [buffer.clone() for buffer in step.buffers()]
    torch.manual_seed(1)
    prepare(step, held=held)
    (step(*call.tensors) if engine is None else engine.run(step, call)).backward()
    with torch.no_grad():
        for buffer, value in zip(step.buffers(), kept, strict=True):
            buffer.copy_(value)
    return [parameter.grad for parameter in step.parameters()]


def same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def measured(planned: Planned, step: nn.Module, call: Call, *, held: bool) -> Row:
    """One plan, run."""
    engine = Engine(planned.captured, planned.schedule)
    equal = same(gradients(step, call, engine, held=held), gradients(step, call, None, held=held))
    prepare(step, held=held)
    growth = measure_step(lambda: engine.run(step, call).backward()).growth_peak
    graph = planned.captured.graph
    resident = sum(value.bytes for value in graph.values if value.kind in RESIDENT)
    if held:
        resident += sum(graph.values[of].bytes for of, _ in graph.gradients if graph.values[of].kind == "parameter")
    return {"predicted": planned.plan.peak, "measured": resident + growth, "resident": resident, "equal": equal}


def rows_of(model: str) -> Iterator[Row]:
    subject = MODELS[model]()
    step = with_loss(subject.model, subject.loss, len(subject.targets))
    call = call_of((*subject.inputs, *subject.targets), {})
    study = Planner(step).study(call, Settings(costs="roofline"))
    for held in (False, True):
        settings = Settings(gradients=GradientUse(accumulates=held), costs="roofline")
        eager, floor = study.eager_peak(settings), study.search(settings).floor().peak
        budgets = {f"{tenth / 10}": eager * tenth // 10 for tenth in range(9, 0, -1) if eager * tenth // 10 >= floor}
        for name, budget in {**budgets, "floor": floor}.items():
            found = measured(study.planned(settings, budget), step, call, held=held)
            yield {"model": model, "held": held, "budget": budget, "of_eager": name, "eager": eager, **found}


def table(rows: list[Row]) -> str:
    over = [row for row in rows if row["measured"] > row["budget"]]
    worst = max(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    unequal = sum(not row["equal"] for row in rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [
        f"**{len(rows)} plans of {len(models)} models: {len(over)} over their budget, predicted "
        f"within {100 * worst:.3f} % of measured, {unequal} with other gradients than eager** (torch "
        f"{torch.__version__}, {THREADS} threads)",
        "",
        "| model | gradients held before | plans | eager, MB | floor, MB | largest error of the prediction |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for model in models:
        for held in (False, True):
            some = [row for row in rows if row["model"] == model and row["held"] == held]
            if some:
                error = max((row["predicted"] / row["measured"] - 1 for row in some), key=abs)
                lines.append(
                    f"| {TITLES[model]} | {'yes' if held else 'no'} | {len(some)} | {some[0]['eager'] / 1e6:,.1f} "
                    f"| {some[-1]['measured'] / 1e6:,.1f} | {100 * error:+.4f} % |"
                )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B", help="these only")
    models = parser.parse_args().models.split(",")
    torch.set_num_threads(THREADS)
    path = RESULTS / "budgets.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if row["model"] not in models] if path.exists() else []
    for model in models:
        for row in rows_of(model):
            rows.append(row)
            print(row, flush=True)
        rows.sort(key=lambda row: (list(MODELS).index(row["model"]), row["held"]))
        path.write_text(json.dumps({"torch": torch.__version__, "threads": THREADS, "rows": rows}, indent=1) + "\n")
        (RESULTS / "budgets.md").write_text(table(rows))
    return int(any(row["measured"] > row["budget"] or not row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
