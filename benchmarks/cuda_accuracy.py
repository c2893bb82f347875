"""How near to what CUDA really did the predictions are, over all golden files.

    python benchmarks/cuda_accuracy.py            # writes benchmarks/results/cuda.json, cuda.md, docs/cuda.md and
                                                  # goldens/known_misses.json
    python benchmarks/cuda_accuracy.py --check    # prints, writes nothing, and exits 1 when a limit is passed
    python benchmarks/cuda_accuracy.py --root goldens/nvidia-h200 --only gpt2 --check

A golden file is one step as a real card ran it (`tools/gpu/golden.py` records them). The same step is predicted for
that card, here, without it. Where no workspace of the step is known as an interval only, or the golden file says what
each took, the prediction is one number and has to be near; else the measured peak has to lie between the low and the
high case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "cuda.md"
MISSES = ROOT / "goldens" / "known_misses.json"
sys.path[:0] = [str(path) for path in (ROOT / "benchmarks", ROOT / "tools" / "gpu") if str(path) not in sys.path]
sys.path.append(str(ROOT / "src"))  # where memplan is not installed
from golden_file import Golden, GoldenError, Peak, Workspace, find, read  # noqa: E402

ALLOCATED_LIMIT, RESERVED_LIMIT = 0.01, 0.03
INSIDE_LIMIT = 0.95
OTHER_TORCH = 3 << 20
"""Bytes that a prediction made with another version of torch may be off besides: in 2.11 two threads take a workspace
of 1 MiB each for cuBLASLt, which later versions share with cuBLAS, and Adam's counters are on the default device."""
NOT_YET = "not yet measured"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_", "CUBLASLT_", "TORCH_CUBLAS")

Span = tuple[Peak, ...]
"""The whole run, then each step."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The peaks of the whole run and of each step, in the low and in the high case."""

    low: Span
    high: Span
    best: Span | None
    """With every workspace known: by formula, or as the golden file says. None where one is not."""
    torch: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A golden file and the prediction for it, or why there is none."""

    name: str
    set: str
    gpu: str
    torch: str
    measured: Span
    prediction: Prediction | None = None
    error: str = ""

    @property
    def inside(self) -> bool:
        """Whether every measured peak lies between the low and the high case."""
        if self.prediction is None:
            return False
        cases = zip(self.measured, self.prediction.low, self.prediction.high, strict=True)
        return all(
            low.allocated <= peak.allocated <= high.allocated and low.reserved <= peak.reserved <= high.reserved
            for peak, low, high in cases
        )

    @property
    def holds(self) -> bool:
        """Whether a number is near enough, or the interval holds what was measured."""
        return self.within() if self.is_number else self.inside

    @property
    def is_number(self) -> bool:
        """Whether the prediction is one number rather than an interval."""
        return self.prediction is not None and self.prediction.best is not None

    def off(self, what: Literal["allocated", "reserved"]) -> float | None:
        """The relative error that is largest among the whole run and its steps; None where there is no number."""
        if self.prediction is None or self.prediction.best is None:
            return None
        pairs = [(getattr(p, what), getattr(m, what)) for p, m in zip(self.prediction.best, self.measured, strict=True)]
        return max((predicted / measured - 1 for predicted, measured in pairs), key=abs)

    @property
    def width(self) -> float:
        """How wide the interval of allocated bytes is over the whole run, relative to what was measured."""
        assert self.prediction is not None
        low, high = self.prediction.low[0], self.prediction.high[0]
        return (high.allocated - low.allocated) / self.measured[0].allocated

    def within(self) -> bool:
        """Whether a prediction that is one number is as near as it has to be."""
        assert self.prediction is not None
        assert self.prediction.best is not None
        slack = 0 if _minor(self.prediction.torch) == _minor(self.torch) else OTHER_TORCH
        return all(
            abs(best.allocated - peak.allocated) <= max(slack, ALLOCATED_LIMIT * peak.allocated)
            and abs(best.reserved - peak.reserved) <= max(slack, RESERVED_LIMIT * peak.reserved)
            for best, peak in zip(self.prediction.best, self.measured, strict=True)
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def key_of(path: Path) -> str:
    """A file's name in a list of misses: card, torch and step."""
    return "/".join(path.parts[-3:])


def measured(golden: Golden) -> Span:
    """The peaks of the whole run and of each step."""
    return golden.peak, *golden.steps


@functools.cache
def subjects() -> dict[str, Any]:
    """The steps by name, as far as their libraries are installed here."""
    return importlib.import_module("golden_steps").subjects(more=True)[0]


def predict(golden: Golden, cudnn: str | Literal[False] = False) -> Prediction:
    """What memplan says of a golden file's step, for its card; ``cudnn`` as in `memplan.record`.

    Raises:
        LookupError: no such step here, or its libraries are missing.
        memplan.MemplanError: the card is not known, or the step cannot be recorded.
    """
    import torch

    import memplan
    from memplan.devices import find as find_card

    subject = subjects().get(golden.name)
    if subject is None:
        raise LookupError(f"there is no step {golden.name} here, or its libraries are not installed")
    build = importlib.import_module("golden_steps").on_card(subject.build)
    with environment(golden.environment), patch("memplan.cudnn.ask.measured", return_value={}):
        card = find_card(golden.gpu).name  # nor may the prediction have what the card itself took
        trace = memplan.record(build, device=card, steps=len(golden.steps), cudnn=cudnn)
    low, high = (spans(trace, golden, case) for case in ("low", "high"))
    filled = filled_in(trace, golden)
    best = None if filled is None else spans(filled, golden, "high")
    return Prediction(low, high, best, str(torch.__version__))


def spans(trace: Any, golden: Golden, workspace: Literal["low", "high", "expected"]) -> Span:
    """The predicted peaks of the whole run and of each step."""
    import memplan

    variables = golden.environment
    settings = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF") or None
    timeline = memplan.simulate(trace, settings=settings, workspace=workspace)
    steps = [Peak(step.peak_allocated, step.peak_reserved) for step in timeline.steps]
    return Peak(timeline.peak_allocated, timeline.peak_reserved), *steps


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """The golden file's settings instead of those that are set here."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def filled_in(trace: Any, golden: Golden) -> Any:
    """The trace with the golden file's bytes for every storage that is known as an interval only.

    None where it does not tell of one. The k-th call of an op in a step is the k-th that was measured; there have to be
    as many.
    """
    unsure = [s for s in trace.counted if s.low is not None and s.low != s.bytes]
    if not unsure:
        return None if any(s.used_on for s in trace.counted) else trace
    calls = calls_of(trace, golden)
    changed: dict[int, Any] = {}
    for storage in unsure:
        workspace = calls.get(storage.op)
        size = None if workspace is None else _size(trace, storage, workspace)
        if size is None:
            return None
        known = {"bytes": size, "low": None} if size else {"device": "cpu"}  # what takes nothing does not count
        changed[storage.id] = dataclasses.replace(storage, **known)
    storages = tuple(changed.get(s.id, s) for s in trace.storages)
    return dataclasses.replace(trace, storages=storages)


def calls_of(trace: Any, golden: Golden) -> dict[int | None, Workspace]:
    """Index of an op of the trace -> what was measured of it."""
    found: dict[int | None, Workspace] = {}
    rows, calls = golden.workspaces or (), golden.calls or {}
    for step in range(len(trace.steps)):
        ops: dict[str, list[int]] = {}
        for op in trace.ops:
            if op.step == step and op.name in calls:
                ops.setdefault(op.name, []).append(op.index)
        for name, indices in ops.items():
            if len(indices) == len(calls[name]):
                found.update((index, rows[row]) for index, row in zip(indices, calls[name], strict=True))
    return found


def _size(trace: Any, storage: Any, workspace: Workspace) -> int | None:
    """Bytes of a storage: the op's workspace, where it is one; else the only result that it can be."""
    if storage.cause == "workspace":
        return workspace_of_call(trace, storage, workspace)
    fitting = [size for size in workspace.results if storage.low <= size <= storage.bytes]
    return fitting[0] if len(fitting) == 1 else None


def workspace_of_call(trace: Any, storage: Any, workspace: Workspace) -> int:
    """Bytes of the workspace of an op.

    The peak of a recurrent network's op also has copies of its operands. Its gradients are computed one after the
    other, with a workspace of the same size each, and not all of them exist at the peak, while ``most`` is beyond all.
    """
    if "_cudnn_rnn" not in trace.ops[storage.op].name:
        return workspace.most
    born = [one for one in trace.counted if one.op == storage.op]
    others = [one for one in born if one.cause != "workspace"]
    results = sum(one.bytes for one in others if one.cause != "temporary")
    beside = (
        sum(one.bytes for one in others if one.born < each.died and (one.died is None or one.died > each.born))
        for each in born if each.cause == "workspace" and each.died is not None
    )  # fmt: skip
    return max(0, workspace.most + results - max(beside))


def compare(golden: Golden, predicted: Callable[[Golden], Prediction] = predict) -> Comparison:
    """A golden file beside the prediction for it."""
    card = f"emulated {golden.gpu}" if golden.dry else golden.gpu
    head = golden.name, golden.set, card, golden.torch, measured(golden)
    try:
        return Comparison(*head, predicted(golden))
    except Exception as error:  # a step that memplan cannot record is a row of the table, not the end of it
        return Comparison(*head, error=f"{type(error).__name__}: {error}")


def compared(path: Path) -> Comparison | str:
    """As `compare`, from a path; the message where the file cannot be read."""
    try:
        return compare(read(path))
    except GoldenError as error:
        return str(error)


def violations(rows: Sequence[Comparison]) -> list[str]:
    """The limits that are passed, in words."""
    found = [f"{row.name}: no prediction: {row.error}" for row in rows if row.prediction is None]
    for row in rows:
        if row.is_number and not row.within():
            allocated, reserved = row.off("allocated"), row.off("reserved")
            found.append(
                f"{row.name} on {row.gpu} with torch {row.torch}: allocated is {allocated:+.2%} off, reserved "
                f"{reserved:+.2%}; the limits are {ALLOCATED_LIMIT:.0%} and {RESERVED_LIMIT:.0%}"
            )
    unsure = intervals(rows)
    inside = sum(row.inside for row in unsure)
    if unsure and inside < INSIDE_LIMIT * len(unsure):
        outside = ", ".join(row.name for row in unsure if not row.inside)
        found.append(f"{inside} of {len(unsure)} intervals hold what was measured; not those of {outside}")
    return found


def miss(row: Comparison) -> str | None:
    """How far off a number is that is not near enough, or why there is no prediction; else None."""
    if row.prediction is None:
        return row.error
    allocated, reserved = row.off("allocated"), row.off("reserved")
    if allocated is None or reserved is None or row.within():
        return None
    return f"allocated {allocated:+.2%} off, reserved {reserved:+.2%}"


def intervals(rows: Iterable[Comparison]) -> list[Comparison]:
    """Those whose low and high case differ: what was measured has to lie between them."""
    return [row for row in rows if row.prediction is not None and row.prediction.low != row.prediction.high]


def summary(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Counts, the largest errors, the share inside of the intervals and their median width."""
    numbers, unsure = [row for row in rows if row.is_number], intervals(rows)
    return {
        "steps": len(rows),
        "numbers": len(numbers),
        "max_allocated_error": max((abs(row.off("allocated") or 0.0) for row in numbers), default=None),
        "max_reserved_error": max((abs(row.off("reserved") or 0.0) for row in numbers), default=None),
        "intervals": len(unsure),
        "inside": sum(row.inside for row in unsure),
        "median_width": statistics.median(row.width for row in unsure) if unsure else None,
    }


def markdown(rows: Sequence[Comparison]) -> str:
    """The table of the docs."""
    if not rows:
        lines = ["| steps | card | allocated | reserved | inside of intervals |", "|---|---|--:|--:|--:|"]
        for name in ("the zoo's training steps", "single layers"):
            lines.append(f"| {name} | - | {NOT_YET} | {NOT_YET} | {NOT_YET} |")
        return "\n".join([*lines, ""])
    parts = []
    for gpu, version in sorted({(row.gpu, row.torch) for row in rows}):
        chosen = [row for row in rows if (row.gpu, row.torch) == (gpu, version)]
        parts.append(f"**{gpu}, torch {version}.** {_sentence(summary(chosen))}\n\n{_table(chosen)}")
    return "\n".join(parts)


def _sentence(total: dict[str, Any]) -> str:
    said = [f"{total['steps']} steps"]
    if total["numbers"]:
        said.append(
            f"{total['numbers']} predicted as a number: allocated at most {total['max_allocated_error']:.2%} off, "
            f"reserved {total['max_reserved_error']:.2%}"
        )
    if total["intervals"]:
        said.append(
            f"{total['intervals']} as an interval: {total['inside']} hold what was measured, median width "
            f"{total['median_width']:.1%}"
        )
    return "; ".join(said) + "."


def _table(rows: Sequence[Comparison]) -> str:
    lines = ["| step | allocated | predicted | error | reserved | predicted | error | holds |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|---|")
    for row in rows:
        if row.prediction is None:
            lines.append(f"| {row.name} | {row.measured[0].allocated:,d} | {row.error} | | | | | |")
            continue
        cells = [part for what in ("allocated", "reserved") for part in _cells(row, what)]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {'yes' if row.holds else 'no'} |")
    return "\n".join([*lines, ""])


def _cells(row: Comparison, what: Literal["allocated", "reserved"]) -> tuple[str, str, str]:
    assert row.prediction is not None
    low, high = getattr(row.prediction.low[0], what), getattr(row.prediction.high[0], what)
    span = f"{low:,d}" if low == high else f"{low:,d} to {high:,d}"
    off = row.off(what)
    return f"{getattr(row.measured[0], what):,d}", span, "-" if off is None else f"{off:+.2%}"


def content(rows: Sequence[Comparison]) -> dict[str, Any]:
    """The same as JSON."""
    return {"summary": summary(rows), "steps": [dataclasses.asdict(row) for row in rows]}


def write(rows: Sequence[Comparison], misses: dict[str, str]) -> None:
    """Write the table, the same as JSON, the list of misses, and the page of the docs that shows the table."""
    MISSES.write_text(json.dumps(misses, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "cuda.json").write_text(json.dumps(content(rows), indent=1) + "\n", encoding="utf-8")
    (RESULTS / "cuda.md").write_text(markdown(rows), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """A page with its tables made anew, as those of the README are."""
    return page_tool().filled(page)


def page_tool() -> Any:
    """The tool that fills the pages."""
    spec = importlib.util.spec_from_file_location("readme_tool", ROOT / "tools" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", action="append", type=Path, metavar="DIR", help="of golden files (default goldens/)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this step only; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default 1)")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a limit is passed")
    options = parser.parse_args()
    paths = [path for root in options.root or [ROOT / "goldens"] for path in find(root)]
    paths = [path for path in paths if not options.only or path.name.removesuffix(".json.gz") in options.only]
    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterable[Comparison | str]] = map
        if options.jobs > 1 and len(paths) > 1:
            pool = ProcessPoolExecutor(min(options.jobs, len(paths)), mp_context=get_context("spawn"))
            run = stack.enter_context(pool).map
        results = list(run(compared, paths))
    broken = [row for row in results if isinstance(row, str)]
    rows = [row for row in results if not isinstance(row, str)]
    found = broken + violations(rows)
    print(markdown(rows) if rows or paths else f"No golden files: {NOT_YET}.")
    for line in found:
        print(line)
    if not options.check and not options.only:
        found_misses = ((path, miss(row)) for path, row in zip(paths, results, strict=True) if not isinstance(row, str))
        write(rows, {key_of(path): why for path, why in found_misses if why is not None})
    return 1 if options.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
