"""How long the model of the caching allocator takes for a million requests and returns.

    python benchmarks/allocator_speed.py                    # writes benchmarks/results/allocator_speed.json
    python benchmarks/allocator_speed.py --events 100000 --repeats 1

Three mixes of a million events each, under several settings, without torch:

* steps: training steps of a deep network with ever new batch sizes: activations kept from forward to backward,
  temporaries in between;
* random: 2000 blocks held on average, from 1 byte to 64 MiB, given back in any order;
* fragmented: the same with 2000 larger blocks of the small pool, beside about 100,000 free blocks that are too small
  for them and lie between blocks that stay (these are made before).

A timing holds the calls alone, each with a tick and an owner; the lists of events are made before.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.settings import parse_settings

RESULTS = Path(__file__).resolve().parent / "results"
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:128,roundup_power2_divisions:4")
MIB = 1 << 20


class Event(NamedTuple):
    """A request for ``size`` bytes, or with 0 the return of the block of this number."""

    number: int
    size: int


def steps() -> Iterator[Event]:
    draw = random.Random(0)
    number = 0
    while True:
        batch, kept = draw.randrange(8, 64), []
        for layer in range(48):
            for _ in range(3):  # a temporary and an activation
                yield Event(number, batch * 4096 * (1 + layer % 5))
                yield Event(number + 1, batch * 16384 * (1 + layer % 3))
                yield Event(number, 0)
                kept.append(number + 1)
                number += 2
            yield Event(number, 4 * batch)
            kept.append(number)
            number += 1
        for saved in reversed(kept):
            yield Event(number, batch * 16384)
            yield Event(saved, 0)
            yield Event(number, 0)
            number += 1


def size_of(draw: random.Random) -> int:
    kind = draw.random()
    if kind < 0.4:
        return draw.randrange(1, 4096)
    return int(2 ** draw.uniform(9, 20)) if kind < 0.7 else int(2 ** draw.uniform(20, 26))


def scattered(draw: random.Random, held: list[int], following: int, size: Callable[[], int]) -> Iterator[Event]:
    """Requests, and returns in any order, so that as many blocks are held as at the start."""
    level = len(held)
    while True:
        if held and (len(held) > level or draw.random() < 0.5):
            at = draw.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            yield Event(held.pop(), 0)
        else:
            yield Event(following, size())
            held.append(following)
            following += 1


def random_mix() -> tuple[list[Event], Iterator[Event]]:
    draw = random.Random(1)
    first = [Event(number, size_of(draw)) for number in range(2000)]
    return first, scattered(draw, list(range(2000)), 2000, lambda: size_of(draw))


def fragmented_mix() -> tuple[list[Event], Iterator[Event]]:
    draw = random.Random(2)
    first = [Event(number, draw.randrange(1, 20_000)) for number in range(200_000)]
    first += [Event(number, 0) for number in range(0, 200_000, 2)]
    size = lambda: draw.randrange(50_000, MIB)  # noqa: E731 - larger than any of the gaps, and of the same pool
    first += [Event(number, size()) for number in range(200_000, 202_000)]
    return first, scattered(draw, list(range(200_000, 202_000)), 202_000, size)


MIXES: dict[str, Callable[[], tuple[list[Event], Iterator[Event]]]] = {
    "steps": lambda: ([], steps()),
    "random": random_mix,
    "fragmented": fragmented_mix,
}


def drive(allocator: CachingAllocator, events: list[Event], addresses: dict[int, int]) -> float:
    """Seconds for these events."""
    malloc, free = allocator.malloc, allocator.free
    start = time.perf_counter()
    for tick, (number, size) in enumerate(events):
        if size:
            addresses[number] = malloc(size, owner=number, tick=tick)
        else:
            free(addresses.pop(number), tick=tick)
    return time.perf_counter() - start


def timed(mix: str, settings: str, events: int) -> dict[str, Any]:
    before, after = MIXES[mix]()
    measured = list(islice(after, events))
    allocator = CachingAllocator(parse_settings(settings))
    addresses: dict[int, int] = {}
    drive(allocator, before, addresses)
    free_before = free_blocks(allocator)
    gc.collect()
    seconds = drive(allocator, measured, addresses)
    return {
        "seconds": seconds,
        "blocks_at_end": len(addresses),
        "free_blocks_at_start": free_before,
        "free_blocks_at_end": free_blocks(allocator),
        "logged": len(allocator.log),
    }


def free_blocks(allocator: CachingAllocator) -> int:
    return sum(block.state == "inactive" for segment in allocator.segments() for block in segment.blocks)


def row(mix: str, settings: str, events: int, repeats: int) -> dict[str, Any]:
    found = [timed(mix, settings, events) for _ in range(repeats)]
    seconds = [each["seconds"] for each in found]
    return {
        "mix": mix,
        "settings": settings,
        "events": events,
        "repeats": repeats,
        **found[0],
        "seconds": round(statistics.median(seconds), 3),
        "range": [round(min(seconds), 3), round(max(seconds), 3)],
        "microseconds_per_event": round(statistics.median(seconds) / events * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "allocator_speed.json")
    given = parser.parse_args()
    rows = []
    for mix in MIXES:
        for settings in SETTINGS:
            rows.append(row(mix, settings, given.events, given.repeats))
            print(f"{mix:11} {settings or 'defaults':52} {rows[-1]['seconds']:7.2f} s", flush=True)
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    given.output.parent.mkdir(exist_ok=True)
    given.output.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
