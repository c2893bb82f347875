"""How near addresses come to the smallest arena: on instances of known optimum, and on those of MiniMalloc.

    python benchmarks/offsets.py                              # writes benchmarks/results/offsets.json and .md
    python benchmarks/offsets.py --instances FOLDER           # MiniMalloc's, too: its files named NAME.CAPACITY.csv

MiniMalloc's instances (github.com/google/minimalloc, benchmarks; Moffitt, ASPLOS 2023) are not part of this repository:
columns buffer, start, end (exclusive) and size; each is known to fit its capacity. The generated ones cut an arena over
time into pieces without a gap: every piece is a buffer, and nothing smaller than the arena holds them. Cuts go all the
way through (guillotine), or five pieces turn about one another (pinwheel).

A search ends when it is within the goal of the optimum, or its time is over. Seconds are the processor's.
"""

import argparse
import csv
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memplan.exporting.arena.lifetimes import Buffer, Lifetimes
from memplan.exporting.arena.offset_check import check_offsets
from memplan.exporting.arena.offsets import choose_offsets

RESULTS = Path(__file__).resolve().parent / "results"
ARENA, STEPS = 1 << 20, 1 << 12
UNIT = 256
"""Sizes are multiples of so many bytes."""


@dataclass(frozen=True)
class Rectangle:
    """A piece of the arena over time."""

    low: int
    high: int
    first: int
    end: int


def pieces(count: int, pinwheels: bool, drawn: random.Random) -> list[Buffer]:
    """Cut an arena over time into so many buffers, or a few more."""
    cut = [Rectangle(0, ARENA // UNIT, 0, STEPS)]
    while len(cut) < count:
        cut.sort(key=lambda one: (one.high - one.low) * (one.end - one.first))
        largest = cut.pop(drawn.randrange(len(cut) // 2, len(cut)))
        cut += _pinwheel(largest, drawn) if pinwheels and drawn.random() < 0.5 else _halves(largest, drawn)
    drawn.shuffle(cut)
    return [Buffer((one.high - one.low) * UNIT, one.first, one.end - 1) for one in cut]


def _halves(one: Rectangle, drawn: random.Random) -> list[Rectangle]:
    if (drawn.random() < 0.5 or one.end - one.first < 2) and one.high - one.low > 1:
        at = drawn.randrange(one.low + 1, one.high)
        return [Rectangle(one.low, at, one.first, one.end), Rectangle(at, one.high, one.first, one.end)]
    if one.end - one.first < 2:
        return [one]
    at = drawn.randrange(one.first + 1, one.end)
    return [Rectangle(one.low, one.high, one.first, at), Rectangle(one.low, one.high, at, one.end)]


def _pinwheel(one: Rectangle, drawn: random.Random) -> list[Rectangle]:
    if one.high - one.low < 3 or one.end - one.first < 3:
        return _halves(one, drawn)
    a, b = sorted(drawn.sample(range(one.low + 1, one.high), 2))
    s, t = sorted(drawn.sample(range(one.first + 1, one.end), 2))
    return [
        Rectangle(one.low, a, one.first, t), Rectangle(one.low, b, t, one.end), Rectangle(b, one.high, s, one.end),
        Rectangle(a, one.high, one.first, s), Rectangle(a, b, s, t),
    ]  # fmt: skip


def instances(folder: Path | None) -> Iterator[tuple[str, int, list[Buffer]]]:
    """Yield names, optima (or capacities) and buffers."""
    for count in (50, 100, 200):
        for pinwheels in (False, True):
            kind = "pinwheel" if pinwheels else "guillotine"
            yield f"{kind} {count}", ARENA, pieces(count, pinwheels, random.Random(count))
    for file in sorted(folder.glob("*.csv")) if folder else ():
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
        found = [Buffer(int(row["size"]), int(row["start"]), int(row["end"]) - 1) for row in rows]
        yield f"MiniMalloc {file.name.split('.')[0]}", int(file.name.split(".")[1]), found


def main() -> None:
    """Place every instance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--goal", type=float, default=1.05, help="Where a search ends, in shares of the optimum.")
    parser.add_argument("--only", default="", help="Instances with this in their name; the results of others stay.")
    given = parser.parse_args()
    file = RESULTS / "offsets.json"
    before = json.loads(file.read_text(encoding="utf-8"))["instances"] if given.only and file.exists() else []
    found = {one["name"]: one for one in before}
    for name, optimum, buffers in instances(given.instances):
        if given.only not in name:
            continue
        peak, began = Lifetimes(tuple(buffers), ()).peak_bytes, time.process_time()
        made = choose_offsets(buffers, max(peak, int(optimum * given.goal)), given.seconds)
        seconds = time.process_time() - began
        check_offsets(buffers, made.offsets, made.bytes)
        found[name] = {"name": name, "buffers": len(buffers), "at_once": peak, "optimum": optimum, "arena": made.bytes,
                       "seconds": round(seconds, 1)}  # fmt: skip
        print(
            f"{name}: {len(buffers)} buffers, {made.bytes / optimum:.3f} of the optimum in {seconds:.1f} s", flush=True
        )
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    data = {"goal": given.goal, "seconds": given.seconds, **machine, "instances": [*found.values()]}
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    heads = ("instance", "buffers", "bytes at once", "optimum, or capacity", "arena", "of the optimum", "seconds")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * 7]
    lines += [
        f"| {one['name']} | {one['buffers']} | {one['at_once']:,} | {one['optimum']:,} | {one['arena']:,} "
        f"| {one['arena'] / one['optimum']:.3f} | {one['seconds']} |"
        for one in found.values()
    ]
    (RESULTS / "offsets.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
