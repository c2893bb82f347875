"""How near to torch on emulated cards the predictions are, and how near these cards are to a real one.

    python benchmarks/dry_accuracy.py            # writes benchmarks/results/dry.json, dry.md and dry_short.md,
                                                 # goldens/dry/known_misses.json and docs/dry.md
    ENV/bin/python benchmarks/dry_accuracy.py --cudnn ENV   # instead: with that cuDNN's own answers, and with the
                                                 # torch that the files are of
    python benchmarks/dry_accuracy.py --check    # prints, writes nothing, exits 1 where the stored misses are others

The files are those of `goldens/dry/`, which `tools/gpu/golden.py --dry CARD` records. A prediction is compared as
`cuda_accuracy.py` does it for real cards, with the same limits. Where a real card's files of the same step and torch
are here, both are compared as well, event by event.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import cuda_accuracy  # noqa: E402  # found by the line above
from cuda_accuracy import ALLOCATED_LIMIT, RESERVED_LIMIT, RESULTS, ROOT, Comparison, key_of  # noqa: E402
from golden_file import DRY_FOLDER, Golden, find, read  # noqa: E402

DRY = ROOT / "goldens" / DRY_FOLDER
MISSES = DRY / "known_misses.json"
NEAR_ALLOCATED, NEAR_RESERVED = 0.005, 0.02
"""What one number with cuDNN's own answers is to be within."""
PAGE = ROOT / "docs" / "dry.md"


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction beside torch on an emulated card. Errors are relative, the largest among the run and its steps."""

    step: str
    card: str
    number: bool
    """Whether every workspace is known, so that the prediction is one number; else it is an interval."""
    inside: bool
    """Whether every peak lies between the low and the high case."""
    allocated: float | None
    """With each workspace as it was on the card, where that is known."""
    reserved: float | None
    holds: bool
    miss: str
    """How far off it is where it does not hold."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One step on an emulated card and on the real one. Errors are relative, the largest among building and steps."""

    step: str
    sizes: bool
    """Whether every allocation has the same size, in the same order."""
    allocated: float
    reserved: float


def row_of(path: Path, cudnn: str | Literal[False] = False) -> Row:
    """The comparison of one file; ``cudnn``: an environment whose cuDNN is asked for workspaces."""
    golden = read(path)
    found = cuda_accuracy.compare(golden, functools.partial(cuda_accuracy.predict, cudnn=cudnn))
    number = found.prediction is not None and found.prediction.low == found.prediction.high
    off = found.off("allocated"), found.off("reserved")
    why = "" if found.holds else miss(found, golden)
    return Row(golden.name, golden.gpu, number, found.inside, *off, found.holds, why)


def miss(row: Comparison, golden: Golden) -> str:
    """How far off a prediction is that does not hold, in words."""
    if row.prediction is None:
        return row.error
    decided = any(text.startswith(("branch: ", "bound: ")) for text in golden.assumed)
    return outside(row) + ("; values that the emulated card does not have decide what is allocated" if decided else "")


def outside(row: Comparison) -> str:
    """How far a prediction is from what was measured."""
    assert row.prediction is not None
    number = cuda_accuracy.miss(row)
    if number is not None:
        return number
    beyond = max(
        (max(low - real, real - high) / real, what)
        for what in ("allocated", "reserved")
        for low, real, high in (
            (getattr(low, what), getattr(real, what), getattr(high, what))
            for low, real, high in zip(row.prediction.low, row.measured, row.prediction.high, strict=True)
        )
    )
    return f"{beyond[1]} is {beyond[0]:.2%} outside of the interval"


def pairs() -> list[Pair]:
    """The steps that both an emulated and the real card have run, with the same torch and the same variables."""
    from memplan.devices import find as find_card

    dry = {(find_card(g.gpu).name, g.torch, g.name): g for g in map(read, find(DRY))}
    real = {(find_card(g.gpu).name, g.torch, g.name): g for g in map(read, find(ROOT / "goldens"))}
    both = [(dry[key], real[key]) for key in sorted(dry.keys() & real.keys())]
    return [pair_of(one, other) for one, other in both if one.environment == other.environment]


def pair_of(dry: Golden, real: Golden) -> Pair:
    """The comparison of two files of one step."""
    peaks = list(zip((dry.build, *dry.steps), (real.build, *real.steps), strict=True))
    off = ([getattr(d, what) / getattr(r, what) - 1 for d, r in peaks] for what in ("allocated", "reserved"))
    allocated, reserved = (max(errors, key=abs) for errors in off)
    return Pair(real.name, sizes(dry) == sizes(real), allocated, reserved)


def sizes(golden: Golden) -> list[int] | None:
    """Bytes of every allocation, in order; None where the file has no events."""
    if golden.events is None:
        return None
    entries = golden.snapshot()["device_traces"][0]
    return [entry["size"] for entry in entries if entry["action"] == "alloc"]


def missing() -> dict[str, dict[str, str]]:
    """Of each card, the steps that could not be run, and why."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(DRY.rglob("index.json")):
        index = json.loads(path.read_text(encoding="utf-8"))
        steps = index["steps"]
        found[index["gpu"]["name"]] = {name: row["error"] for name, row in steps.items() if "error" in row}
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Predictions with cuDNN's own answers."""

    torch: str
    rows: tuple[Row, ...]


def short(rows: Sequence[Row], beside: Sequence[Pair], asked: Asked) -> str:
    """What the docs show: a sentence and a table for the real card, and a row for each emulated one."""
    parts = []
    if beside:
        peaks = [pair for pair in beside if pair.allocated == pair.reserved == 0]
        same = sum(pair.sizes for pair in peaks)
        parts.append(
            f"Of {len(beside)} steps that ran on both, {len(peaks)} have all peaks equal, allocated and reserved, of "
            f"building and of every step; in {same} of these every allocation has the size that it really had. "
            f"{sum(abs(pair.allocated) > ALLOCATED_LIMIT for pair in beside)} differ by more than "
            f"{ALLOCATED_LIMIT:.0%} in allocated bytes. The others:\n"
        )
        parts += ["| step | allocated | reserved |", "|---|--:|--:|"]
        others = sorted((p for p in beside if p not in peaks), key=lambda p: -abs(p.allocated))
        parts += [f"| {pair.step} | {pair.allocated:+.2%} | {pair.reserved:+.2%} |" for pair in others]
        parts.append("")
    head = f"| emulated card | steps | within {ALLOCATED_LIMIT:.0%} allocated and {RESERVED_LIMIT:.0%} reserved |"
    parts += [f"{head} median error, allocated | largest | intervals | hold |", "|---|--:|--:|--:|--:|--:|--:|"]
    for card in cards(rows):
        chosen = [row for row in rows if row.card == card]
        unsure = [row for row in chosen if not row.number]
        off = [abs(row.allocated) for row in chosen if row.allocated is not None]
        parts.append(
            f"| {card} | {len(chosen)} | {sum(row.holds for row in chosen)} | {statistics.median(off):.3%} "
            f"| {max(off):.1%} | {len(unsure)} | {sum(row.inside for row in unsure)} |"
        )
    return "\n".join([*parts, *_answered(asked), ""])


def _answered(asked: Asked) -> list[str]:
    """The table of predictions with cuDNN's own answers."""
    within = f"within {NEAR_ALLOCATED:.1%} allocated and {NEAR_RESERVED:.0%} reserved"
    head = f"| with cuDNN's own answers, torch {asked.torch} | steps | one number"
    parts = ["", f"{head} | {within} | of these numbers |", "|---|--:|--:|--:|--:|"]
    for card in cards(asked.rows):
        chosen = [row for row in asked.rows if row.card == card]
        numbers = [row for row in chosen if row.number]
        near, of_numbers = sum(map(is_near, chosen)), sum(map(is_near, numbers)) / len(numbers)
        parts.append(f"| {card} | {len(chosen)} | {len(numbers)} | {near} | {of_numbers:.0%} |")
    return parts


def is_near(row: Row) -> bool:
    """Whether a prediction is within the closer limits."""
    if row.allocated is None or row.reserved is None:
        return False
    return abs(row.allocated) <= NEAR_ALLOCATED and abs(row.reserved) <= NEAR_RESERVED


def cards(rows: Iterable[Row]) -> list[str]:
    """The cards, in order of their names."""
    return sorted({row.card for row in rows})


def table(rows: Sequence[Row]) -> str:
    """Every step on every card: errors of allocated and reserved bytes."""
    names = cards(rows)
    found = {(row.step, row.card): row for row in rows}
    lines = [
        f"Error of allocated, of reserved bytes. `i`: low and high differ, and the error is that with each workspace "
        f"as the card took it. Bold: over {ALLOCATED_LIMIT:.0%} or {RESERVED_LIMIT:.0%}. `-`: not run there.\n",
        f"| step | {' | '.join(names)} |",
        f"|---|{'--:|' * len(names)}",
    ]
    for step in sorted({row.step for row in rows}):
        lines.append(f"| {step} | {' | '.join(cell(found.get((step, card))) for card in names)} |")
    return "\n".join([*lines, ""])


def cell(row: Row | None) -> str:
    """One step on one card."""
    if row is None:
        return "-"
    text = row.miss if row.allocated is None or row.reserved is None else f"{row.allocated:+.2%}, {row.reserved:+.2%}"
    text = (text or "inside") + ("" if row.number else " i")
    return text if row.holds else f"**{text}**"


def write(rows: Sequence[Row], beside: Sequence[Pair], misses: dict[str, str], asked: Asked) -> None:
    """Write the results, the list of misses and the page."""
    content = {
        "steps": [asdict(row) for row in rows],
        "asked": [asdict(row) for row in asked.rows],
        "asked with torch": asked.torch,
        "beside": [asdict(pair) for pair in beside],
        "missing": missing(),
    }
    (RESULTS / "dry.json").write_text(packed(content), encoding="utf-8")
    (RESULTS / "dry_short.md").write_text(short(rows, beside, asked), encoding="utf-8")
    (RESULTS / "dry.md").write_text(table(rows), encoding="utf-8")
    MISSES.write_text(json.dumps(misses, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(cuda_accuracy.filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def packed(content: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for name, value in content.items():
        body = json.dumps(value, indent=1)
        if isinstance(value, list):
            body = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]" if value else "[]"
        parts.append(f' "{name}": {body}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def stored() -> tuple[list[Row], Asked]:
    """The rows that were written last."""
    content = json.loads((RESULTS / "dry.json").read_text(encoding="utf-8"))
    rows, asked = ([Row(**row) for row in content[name]] for name in ("steps", "asked"))
    return rows, Asked(content["asked with torch"], tuple(asked))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this step only; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default 1)")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where the stored misses are others")
    parser.add_argument("--cudnn", metavar="ENV", help="predict with the answers of its cuDNN instead")
    options = parser.parse_args()
    paths = [p for p in find(DRY) if not options.only or p.name.removesuffix(".json.gz") in options.only]
    with contextlib.ExitStack() as stack:
        run: Any = map
        if options.jobs > 1:
            run = stack.enter_context(ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))).map
        rows, asked = stored()
        if options.cudnn:
            rows = [row for row in rows if not options.only or row.step in options.only]
            asked = Asked(version("torch"), tuple(run(functools.partial(row_of, cudnn=options.cudnn), paths)))
        else:
            rows = list(run(row_of, paths))
    misses = {key_of(path): row.miss for path, row in zip(paths, rows, strict=True) if not row.holds}
    beside = pairs()
    print(short(rows, beside, asked), table(rows), *(f"{name}: {why}" for name, why in misses.items()), sep="\n")
    if not options.check and not options.only:
        write(rows, beside, misses, asked)
    listed = json.loads(MISSES.read_text(encoding="utf-8")) if MISSES.exists() else {}
    return int(options.check and {key_of(p): listed[key_of(p)] for p in paths if key_of(p) in listed} != misses)


if __name__ == "__main__":
    sys.exit(main())
