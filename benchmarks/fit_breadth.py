"""Fitting other people's models: 79 of those that benchmarks/breadth.py runs, each in a tight budget.

    pip install transformers monai
    python benchmarks/fit_breadth.py                  # goes on where it was broken off; writes fit_breadth.json and .md
    python benchmarks/fit_breadth.py --anew           # all of them again
    python benchmarks/fit_breadth.py --only gpt2,UNet # these; others' rows stay
    python benchmarks/fit_breadth.py --report         # fit_breadth.md anew from fit_breadth.json

The 79 are evenly spaced among those that breadth.json has as running in eager mode. A budget is the floor and 0.3 of
what lies between it and the step without a plan, both with costs="roofline"; the loss is the sum of the outputs, and no
optimizer is counted. Each model has a process of its own, on one thread. Seconds are the processor's: of fit in whole,
and of planning until its proof begins; libraries are imported before. A model is proven (fit's proof: the same bits,
the measured peak within the budget), or refused by an error of memplan's, whose text is kept; anything else that is
raised, and a process that dies or takes more than its seconds, is a crash. What the installed library does not know,
or eager mode does not run, is left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import breadth
from benchmarks.accuracy import RESULTS
from benchmarks.breadth import Row

WHOLE, RESULT, PAGE = (RESULTS / name for name in ("breadth.json", "fit_breadth.json", "fit_breadth.md"))
MODELS = 79
SHARE = 0.3
"""Budget between the floor (0) and the step without a plan (1)."""
FAMILIES = ("transformers", "monai")
ENOUGH = 1 << 50
SECONDS = 300
"""Of the processor, which a model may take in whole."""
PATIENCE = 3600
"""Seconds on the clock, on a machine that does much else."""


def chosen() -> list[tuple[str, str]]:
    """Return family and name of the models: evenly spaced among those that run in eager mode."""
    rows = json.loads(WHOLE.read_text())["rows"]
    ran = [(row["family"], row["name"]) for row in rows if row["family"] in FAMILIES and "left_out" not in row]
    return [ran[at * len(ran) // MODELS] for at in range(MODELS)]


def child(connection: Any, family: str, name: str) -> None:
    """Send everything about one model, in this process."""
    import torch

    import memplan

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    torch.set_num_threads(1)
    row: Row = {}
    try:
        step: Any = breadth.runnable(family, name)()
    except Exception as error:
        connection.send({"left_out": f"{type(error).__name__}: {str(error)[:200]}"})
        return
    try:
        row |= bounds(*step.called)
        row |= fitted(*step.called, row["budget"])
    except memplan.MemplanError as error:
        row["refused"] = f"{type(error).__name__}: {str(error)[:600]}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        row["crashed"] = f"{type(error).__name__}: {str(error)[:200]} (at {Path(last.filename).name}:{last.lineno})"
    connection.send(row)


def bounds(model: Any, args: Any, kwargs: Any) -> Row:
    """Return the floor, the peak without a plan, and the budget between them."""
    import memplan

    plan = memplan.plan(model, *args, kwargs=kwargs, budget=ENOUGH, costs="roofline")
    budget = plan.floor + max(0, int(SHARE * (plan.eager_peak - plan.floor)))
    return {"floor": plan.floor, "eager": plan.eager_peak, "budget": budget}


def fitted(model: Any, args: Any, kwargs: Any, budget: int) -> Row:
    """Return the seconds of fit, and what its proof says."""
    import memplan
    from memplan.verification.fitting.prover import Prover

    begins: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begins.append(time.process_time())
            return function(*args)

        return run

    Prover.proof, Prover.unplanned = timed(Prover.proof), timed(Prover.unplanned)
    begin = time.process_time()
    made = memplan.fit(model, *args, kwargs=kwargs, budget=budget)
    seconds = {"plan_seconds": begins[0] - begin, "fit_seconds": time.process_time() - begin}
    return seconds | {"peak": made.proof.peak, "proven": made.proof.ok, "changed": made.changed}


def row_of(context: Any, family: str, name: str) -> Row:
    """Return everything about one model, from a process of its own."""
    row: Row = {"family": family, "name": name}
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(there, family, name))
    process.start()
    there.close()
    try:
        return row | (here.recv() if here.poll(PATIENCE) else {"crashed": f"it took more than {PATIENCE} s"})
    except EOFError:
        process.join()
        return row | {"crashed": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def report(rows: list[Row]) -> str:
    """Return how many are proven, the seconds, and each that is not proven, as Markdown."""
    proven = [row for row in rows if row.get("proven")]
    counts = (len(rows), len(proven), *(sum(key in row for row in rows) for key in ("refused", "crashed", "left_out")))
    lines = [
        "| models | proven | refused | crashed | left out | plan p50, s | plan p90, s | fit p50, s | fit p90, s |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| "
        + " | ".join([*map(str, counts), *_quantiles(rows, "plan_seconds"), *_quantiles(rows, "fit_seconds")])
        + " |",
        "",
        "Not proven: " + ("; ".join(_why(row) for row in rows if row not in proven) or "none"),
    ]
    return "\n".join(lines) + "\n"


def _quantiles(rows: list[Row], key: str) -> list[str]:
    seconds = sorted(row[key] for row in rows if key in row)
    return [f"{seconds[int(share * (len(seconds) - 1) + 0.5)]:.1f}" if seconds else "-" for share in (0.5, 0.9)]


def _why(row: Row) -> str:
    texts = (row[key] for key in ("refused", "crashed", "left_out") if key in row)
    return f"{row['name']} ({next(texts, 'over its budget')[:160]})"


def _write(rows: list[Row], write: Callable[[Path, str], Any] = Path.write_text) -> None:
    names = ("torch", *FAMILIES)
    versions = {name: importlib.import_module(name).__version__ for name in names}
    write(RESULT, json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    write(PAGE, report(rows))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas between; their rows are written anew")
    parser.add_argument("--anew", action="store_true", help="all, also those that have a row")
    parser.add_argument("--report", action="store_true", help="fit_breadth.md anew")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    known = {} if given.anew or not RESULT.exists() else _known()
    if given.report:
        PAGE.write_text(report(list(known.values())))
        return
    wanted = set(given.only.split(",")) if given.only else None
    models = chosen()
    todo = [one for one in models if (one not in known if wanted is None else one[1] in wanted)]
    context = breadth.server()
    with ThreadPoolExecutor(given.jobs) as pool:
        for row in pool.map(lambda one: row_of(context, *one), todo):
            print({key: value for key, value in row.items() if key != "family"}, flush=True)
            known[row["family"], row["name"]] = row
            _write([known[one] for one in models if one in known])


def _known() -> dict[tuple[str, str], Row]:
    return {(row["family"], row["name"]): row for row in json.loads(RESULT.read_text())["rows"]}


if __name__ == "__main__":
    main()
