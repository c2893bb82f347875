"""What a byte budget costs in time: memplan.fit beside eager, torch.utils.checkpoint, torch.compile and autocast.

    python benchmarks/fit_frontier.py                         # everything that has no result yet, then the report
    python benchmarks/fit_frontier.py --models gpt,resnet18   # these only
    python benchmarks/fit_frontier.py --peers-only            # without memplan
    python benchmarks/fit_frontier.py --methods "compile*,fit-inductor-*"   # these only
    python benchmarks/fit_frontier.py --quick                 # two pairs each; such results are replaced by a full run
    python benchmarks/fit_frontier.py --again ours            # memplan's anew, the peers' as they are
    python benchmarks/fit_frontier.py --report                # the report alone, from the results that are there

Every case has a process of its own with two threads, and a file in benchmarks/results/fit_frontier/. `total` is what
the step holds at its peak, by the events of the CPU's allocator; `above` is that less weights, buffers, inputs and
targets, gradients held before the step and the optimizer's state. `ratio` is the median over pairs of candidate and
eager, alternating in that process. What is not equal to eager mode bit by bit has its gradients held against the same
step in float64 (`memplan.verification.proof.float64_gradients`): where they are wrong, it is no peer to beat.
The report is benchmarks/results/fit_frontier.md, fit_frontier_short.md and .png.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for _path in (str(ROOT), str(ROOT / "src")):  # the latter where memplan is not installed
    if _path not in sys.path:
        sys.path.insert(0, _path)

from benchmarks.frontier.cases import (  # noqa: E402
    FLOOR,
    INDUCTOR_FLOOR,
    MODES,
    Case,
    Mode,
    Row,
    Shards,
    compiled_cases,
    fit_cases,
    lossy_cases,
    modes_of,
    peer_cases,
    reordered_cases,
)
from benchmarks.frontier.models import MODELS  # noqa: E402
from benchmarks.frontier.peers import PLAIN  # noqa: E402
from benchmarks.frontier.run import THREADS, run  # noqa: E402

PAIRS, QUICK_PAIRS = 5, 2
SECONDS = 10.0
"""In which there are more pairs, of short steps."""
LIMIT_SECONDS = 1800
REFUSED = "refused: "


class Bench:
    """Runs the cases that have no result yet."""

    def __init__(self, shards: Shards, *, quick: bool, again: str | None, methods: Sequence[str] = ("*",)) -> None:
        self.shards, self.quick, self.again, self.methods = shards, quick, again, methods
        self.refused: dict[tuple[str, str], str] = {}
        """By engine and grade: why memplan does not take them."""

    def chosen(self, case: Case) -> bool:
        """Whether its method is among those to run."""
        return any(fnmatch.fnmatchcase(case.method, pattern) for pattern in self.methods)

    def result(self, case: Case) -> Row:
        """The result of a case, from its file or from a process of its own."""
        again = self.chosen(case) and (self.again == "all" or (self.again == "ours" and case.ours))
        found = None if again else self.shards.read(case, quick=self.quick or not self.chosen(case))
        if found is None and not self.chosen(case):
            return {"error": "not asked for"}
        if found is None:
            kind = (case.engine, case.allow)
            measured = {"error": self.refused[kind]} if case.ours and kind in self.refused else self._measured(case)
            found = self.shards.write(case, measured)
            print(line(found), flush=True)
        if case.ours and found.get("error", "").startswith(REFUSED):
            self.refused[case.engine, case.allow] = found["error"]
        return found

    def _measured(self, case: Case) -> Row:
        threads = {key: str(THREADS) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        # with held gradients the peak is what is asked: kernels, and so the time, are those without
        pairs = QUICK_PAIRS if self.quick or case.mode == "held" else PAIRS
        command = [sys.executable, __file__, "--child", json.dumps(asdict(case)), "--pairs", str(pairs)]
        mark = {"quick": True} if self.quick else {}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | threads, check=False, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {LIMIT_SECONDS} s"}
        if done.returncode:
            lines = [text for text in done.stderr.strip().splitlines() if not text.startswith("USDT")]
            return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
        return json.loads(done.stdout.strip().splitlines()[-1]) | mark

    def peers(self, model: str, mode: Mode) -> list[Row]:
        """Every peer of a model."""
        return [self.result(case) for case in peer_cases(model, mode)]

    def ours(self, model: str, mode: Mode, peers: list[Row]) -> None:
        """For each engine our floor, then every budget above it; then what may be added in another order, and the lossy
        ones."""
        if self.again:
            self.shards.remove(model, mode, lambda case: case.ours and self.chosen(case))  # their budgets may be others
        good = [row for row in peers if "error" not in row]
        if not any(row["method"] == "eager" for row in good):
            return
        floor = self.result(Case(model, mode, FLOOR))
        cases = [] if "error" in floor else fit_cases(model, mode, good, floor["given"])
        if mode == "fresh":
            floor = self.result(Case(model, mode, INDUCTOR_FLOOR))
            cases += [] if "error" in floor else compiled_cases(model, mode, good, floor["given"])
        for case in (*cases, *reordered_cases(model, mode, good), *lossy_cases(model, mode, good)):
            self.result(case)


def line(row: Row) -> str:
    """A result for the terminal."""
    name = f"{row['model']:12} {row['mode']:7} {row['method']:16}"
    if "error" in row:
        return f"{name} {row['error']}"
    equal = "equal" if row["gradients_equal"] else f"gradients {row.get('gradients', 'differ in their bits')}"
    low, high = row["quartiles"]
    text = f"{name} {row['total'] / 1e6:8.1f} MB, above {row['above'] / 1e6:8.1f}"
    text += f", time x {row['ratio']:.3f} [{low:.3f}, {high:.3f}] of {row['eager_seconds']:.3f} s, {equal}"
    return text + (f", predicted {row['predicted'] / 1e6:.1f}" if "predicted" in row else "")


def child(case: Case, pairs: int, plain: Row | None) -> Row:
    """The result of a case in this process; an engine or a grade that memplan does not have is no failure."""
    from memplan.errors import BudgetError, UsageError

    try:
        return run(case, pairs, plain, SECONDS if pairs >= PAIRS else 0.0)
    except BudgetError:
        raise
    except UsageError as error:
        return {"error": f"{REFUSED}{error}"}


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B", help="these only")
    parser.add_argument("--modes", default=",".join(MODES), metavar="A,B", help="fresh, held, update")
    parser.add_argument("--methods", default="*", metavar="A,B", help="of these names only: compile*, fit-inductor-*")
    parser.add_argument("--peers-only", action="store_true", help="leave memplan out")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs instead of {PAIRS}")
    parser.add_argument("--again", choices=("all", "ours"), help="run what has a result already too")
    parser.add_argument("--report", action="store_true", help="write the report, run nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 where a result falls short of what is promised")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shards = Shards(RESULTS / "fit_frontier")
    if options.child:
        case = Case(**json.loads(options.child))
        print(json.dumps(child(case, options.pairs, shards.read(Case(case.model, case.mode, PLAIN)))))
        return 0
    models = options.models.split(",")
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"no model named {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if not options.report:
        bench = Bench(shards, quick=options.quick, again=options.again, methods=options.methods.split(","))
        for model in models:
            for mode in (mode for mode in modes_of(model) if mode in options.modes.split(",")):
                peers = bench.peers(model, mode)
                if not options.peers_only:
                    bench.ours(model, mode, peers)
    from benchmarks.frontier.report import write

    complaints = write(shards, RESULTS)
    print(*complaints, sep="\n")
    return 1 if options.check and complaints else 0


if __name__ == "__main__":
    sys.exit(main())
