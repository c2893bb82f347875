"""How near to published peaks on CUDA the predictions are: steps in plain PyTorch that others measured on their cards.

    python benchmarks/published_cuda.py                 # writes benchmarks/results/published_cuda.json and .md
    python benchmarks/published_cuda.py --only rope     # prints the rows whose name has it, writes nothing
    python benchmarks/published_cuda.py --check         # exits 1 when a row that should be near is not, or the reverse

`published` is a figure of `published_figures`, in MiB, less what is known not to be of the step. `low` and `high` are
what memplan predicts for that card with the least and the most workspace; the error is that of the farther one.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT / "benchmarks"), str(ROOT / "src")):  # the latter where memplan is not installed
    if _path not in sys.path:
        sys.path.append(_path)

from published_figures import KNOWN, Row, Series, rows  # noqa: E402
from published_steps import STEPS  # noqa: E402

import memplan  # noqa: E402

LIMIT = 0.01
STEPS_RUN = 3
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Result:
    """A row beside its prediction, in MiB."""

    row: Row
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative, of the case farther from the published figure."""
        published = self.row.published
        return max(self.low / published - 1, self.high / published - 1, key=abs)

    @property
    def near(self) -> bool:
        return abs(self.error) <= LIMIT

    def to_dict(self) -> dict[str, Any]:
        series = self.row.series
        return {
            "step": self.row.name,
            "card": series.card,
            "gpu": series.gpu,
            "measured": series.date,
            "source": series.source.address,
            "published": self.row.published,
            "low": self.low,
            "high": self.high,
            "relative_error": self.error,
            **({"note": series.note} if series.note else {}),
            **({"known": KNOWN[self.row.name]} if self.row.name in KNOWN else {}),
        }


@functools.cache
def _predicted(step: str, card: str, measure: str, sizes: tuple[tuple[str, Any], ...]) -> tuple[float, float]:
    trace = memplan.record(STEPS[step](**dict(sizes)), device=card, steps=STEPS_RUN)
    return (
        figure(memplan.simulate(trace, workspace="low"), measure),
        figure(memplan.simulate(trace, workspace="high"), measure),
    )


def figure(timeline: memplan.Timeline, measure: str) -> float:
    last = timeline.steps[-1]
    if measure == "left":
        return timeline.events[-1][1] / MIB
    before = [allocated for tick, allocated, _ in timeline.events if tick < last.start] if measure == "growth" else []
    return (last.peak_allocated - (before[-1] if before else 0)) / MIB


def _at(series: Series, row: Row, size: Any) -> tuple[float, float]:
    return _predicted(series.step, series.card, series.measure, tuple(row.arguments(size).items()))


def predict(row: Row) -> Result:
    """What memplan says of the step of a row, in the low and the high case of its workspaces."""
    series = row.series
    low, high = _at(series, row, row.size)
    if series.increase:
        first_low, first_high = _at(series, row, next(iter(series.figures)))
        low, high = low - first_low, high - first_high
    return Result(row, low, high)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Of all rows, also those that are known to be off; None without any."""
    errors = [abs(result.error) for result in results]
    return {
        "rows": len(results),
        "series": len({id(result.row.series) for result in results}),
        "known": sum(result.row.name in KNOWN for result in results),
        "max_error": max(errors, default=None),
        "median_error": statistics.median(errors) if errors else None,
        "within_limit": sum(error <= LIMIT for error in errors),
    }


def violations(results: Sequence[Result]) -> list[str]:
    """Rows that are off without a reason that is known, and those that are near although one is."""
    found = []
    for result in results:
        name = result.row.name
        if not result.near and name not in KNOWN:
            found.append(f"{name} is {result.error:+.3%} off")
        if result.near and name in KNOWN:
            found.append(f"{name} is near now: take it out of KNOWN")
    return found


def markdown(results: Sequence[Result], versions: str) -> str:
    """The summary, the table, and what is known of the rows."""
    total = summary(results)
    lines = ["# Predicted and published peaks on CUDA", ""]
    lines.append(f"Most that is allocated in a step, as `torch.cuda.max_memory_allocated` counts, in MiB; {versions}.")
    if total["max_error"] is not None:
        lines += [
            "",
            f"**{total['rows']} figures of {total['series']} series: {total['within_limit']} within {LIMIT:.0%}, "
            f"largest error {total['max_error']:.3%}, median {total['median_error']:.4%}; "
            f"{total['known']} known to be off.**",
        ]
    lines += ["", "| step | card | published | predicted | error | note |", "|---|---|--:|--:|--:|---|"]
    notes: dict[str, int] = {}
    for result in results:
        lines.append(f"| {' | '.join(_cells(result, notes))} |")
    lines += ["", *(f"{number}. {note}." for note, number in notes.items())]
    addresses = dict.fromkeys(result.row.series.source.address for result in results)
    return "\n".join([*lines, "", "Published at:", "", *(f"- <{address}>" for address in addresses), ""])


def by_series(results: Sequence[Result], versions: str) -> str:
    """The same in a line for each step and card: how many figures, from where to where, the largest error."""
    total, groups = summary(results), dict[tuple[str, str], list[Result]]()
    for result in results:
        groups.setdefault((result.row.series.step, result.row.series.gpu), []).append(result)
    adjusted = sum(bool(result.row.series.held or result.row.series.increase) for result in results)
    lines = [
        f"**{total['rows']} published figures: {total['within_limit']} within {LIMIT:.0%}, median error "
        f"{total['median_error']:.4%}, largest {total['max_error']:.2%}** ({versions}). Of {adjusted} of them, what "
        "earlier runs of the process had left was taken off, or the growth over the smallest size is compared.",
        "",
        "| step | card | figures | published, MiB | largest error |",
        "|---|---|--:|--:|--:|",
    ]
    for (step, gpu), group in groups.items():
        sizes = sorted(result.row.published for result in group)
        worst = max((result.error for result in group), key=abs)
        span = f"{sizes[0]:,.1f}" + (f" to {sizes[-1]:,.1f}" if len(sizes) > 1 else "")
        lines.append(f"| {step} | {gpu} | {len(group)} | {span} | {worst:+.3%} |")
    return "\n".join([*lines, ""])


def _cells(result: Result, notes: dict[str, int]) -> list[str]:
    series, name = result.row.series, result.row.name
    said = [note for note in (series.note, KNOWN.get(name, "")) if note]
    numbers = [str(notes.setdefault(note, len(notes) + 1)) for note in said]
    low, high = f"{result.low:,.3f}", f"{result.high:,.3f}"
    predicted = high if low == high else f"{low} to {high}"
    gpu = f"{series.gpu}, {series.date}"
    return [name, gpu, f"{result.row.published:,.3f}", predicted, f"{result.error:+.4%}", ", ".join(numbers)]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a row is not as expected")
    options = parser.parse_args()
    chosen = [row for row in rows() if (options.only or "") in row.name]
    if not chosen:
        steps = ", ".join(sorted({row.series.step for row in rows()}))
        parser.error(f"no row with {options.only!r} in its name; the steps are {steps}")
    results = []
    for row in chosen:
        result = predict(row)
        results.append(result)
        print(f"{row.name:60} {row.series.card:8} {row.published:12.3f} {result.high:12.3f} {result.error:+.4%}")
    if not options.only and not options.check:
        import torch

        versions = f"predicted by memplan on torch {torch.__version__}, measured on torch 2.0 to 2.12"
        RESULTS.mkdir(exist_ok=True)
        content = {"versions": versions, "summary": summary(results), "rows": [r.to_dict() for r in results]}
        (RESULTS / "published_cuda.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "published_cuda.md").write_text(markdown(results, versions), encoding="utf-8")
        (RESULTS / "published_cuda_short.md").write_text(by_series(results, versions), encoding="utf-8")
    found = violations(results)
    print(*found, sep="\n")
    return 1 if options.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
