"""Read mutated files as memplan does, and report errors that are not its own, hangs, memory, and control characters.

    python tools/fuzz/fuzz.py --mutations 200000 --out benchmarks/results/fuzz.json    every kind, one after the other
    python tools/fuzz/fuzz.py --mutations 5000 --seed 1 --out benchmarks/results/fuzz.json    and a share more of each
    python tools/fuzz/fuzz.py plans --mutations 5000 --seed 7 --keep /tmp/found        one kind; failing files are kept

The same seed gives the same mutants. Exit code 1: something was found.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kinds import OWN, Kind, kinds

MOST_SECONDS, MOST_BYTES, MOST_CHARACTERS = 10.0, 1 << 30, 3500


class _Hang(BaseException):
    pass


@dataclass
class Result:
    """What came of the mutants of one kind. Bytes of memory are those of the process, with torch in it."""

    mutations: int = 0
    read: int = 0
    """Those that were read and shown; the others were refused by one of memplan's errors."""
    seconds: float = 0.0
    """CPU time, of all of them."""
    slowest: float = 0.0
    """CPU seconds of the slowest."""
    memory: int = 0
    foreign: dict[str, int] = field(default_factory=dict)
    """Errors that are not memplan's: type and innermost line -> how many."""
    hangs: int = 0
    """Those that took more than 10 seconds of CPU time."""
    steering: int = 0
    """Texts with characters that steer a terminal."""
    seeds: list[int] = field(default_factory=list)
    traceback: str = field(default="", repr=False, compare=False)
    """Of the last foreign error."""

    @property
    def clean(self) -> bool:
        """Return whether nothing was found."""
        return not (self.foreign or self.hangs or self.steering) and self.memory <= MOST_BYTES

    @property
    def plain(self) -> dict[str, Any]:
        """Return the figures."""
        return {name: value for name, value in asdict(self).items() if name != "traceback"}

    def and_more(self, other: Result) -> Result:
        """Return both together."""
        foreign = Counter(self.foreign) + Counter(other.foreign)
        return Result(
            self.mutations + other.mutations, self.read + other.read, round(self.seconds + other.seconds, 1),
            max(self.slowest, other.slowest), max(self.memory, other.memory), dict(foreign), self.hangs + other.hangs,
            self.steering + other.steering, sorted({*self.seeds, *other.seeds}),
        )  # fmt: skip


def fuzz(kind: Kind, mutations: int, seed: int, keep: Path | None = None) -> Result:
    """Read so many mutants of one kind; files that fail are written into the folder ``keep``."""
    result, found = Result(mutations, seeds=[seed]), Counter[str]()
    signal.signal(signal.SIGPROF, _stop)
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(mutations):
            data = kind.mutant(Random(f"{seed}-{number}"))
            at = time.process_time()
            problem = _problem(kind, data, Path(folder, "mutant"), result)
            seconds = time.process_time() - at
            result.slowest = max(result.slowest, seconds)
            result.hangs += problem is None and seconds > MOST_SECONDS
            if problem is not None:
                found[problem] += 1
                if keep is not None and found[problem] == 1:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{seed}-{number}").write_bytes(data)
                    (keep / f"{seed}-{number}.txt").write_text(f"{problem}\n{result.traceback}")
    result.hangs += found.pop("hang", 0)
    result.steering = found.pop("steering", 0)
    result.foreign = dict(found)
    result.seconds = round(time.process_time() - begin, 1)
    result.slowest = round(result.slowest, 3)
    result.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return result


def _stop(*_: Any) -> None:
    raise _Hang


def _problem(kind: Kind, data: bytes, file: Path, result: Result) -> str | None:
    """Return what went wrong with a mutant, None where it was shown or refused as it should be."""
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        texts = list(kind.use(data, file))
        result.read += 1
    except OWN as error:
        texts = [str(error)]
        if "\n" in texts[0] or len(texts[0]) > MOST_CHARACTERS:
            return f"{type(error).__name__} of several lines, or a long one"
    except _Hang:
        return "hang"
    except Exception as error:
        result.traceback = traceback.format_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None if all(one.isprintable() for text in texts for one in text.split("\n")) else "steering"


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="*", help="default: every one")
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path, help="JSON; results of other seeds in it are added to")
    given = parser.parse_args()
    every, clean = kinds(), True
    for name in given.kind or every:
        result = fuzz(every[name], given.mutations, given.seed, given.keep and given.keep / name)
        clean = clean and result.clean
        print(name, result.plain, flush=True)
        if given.out is not None:
            results = json.loads(given.out.read_text()) if given.out.exists() else {}
            if name in results and given.seed not in results[name]["seeds"]:
                result = Result(**results[name]).and_more(result)
            given.out.write_text(json.dumps(results | {name: result.plain}, indent=1) + "\n")
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
