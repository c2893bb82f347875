"""How often a real card took the workspace that cuDNN names for a described one, convolution by convolution.

    python benchmarks/cudnn_accuracy.py --cudnn ~/cuda-torch    # writes benchmarks/results/cudnn.json and cudnn.md, and
                                                                # docs/cuda.md

The path is an environment with the CUDA build of torch that the golden files were recorded with: other versions of
cuDNN choose otherwise. Each step is recorded as for a prediction; what cuDNN says of its convolutions is compared with
the allocations that the golden file has of them, in the allocator's blocks of 512 bytes, each question once. Steps
under `torch.backends.cudnn.benchmark`, which try all plans, are left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).resolve().parent)]
from cuda_accuracy import (  # noqa: E402  # by the line above
    PAGE,
    RESULTS,
    ROOT,
    calls_of,
    environment,
    filled,
    subjects,
    workspace_of_call,
)  # fmt: skip
from dry_accuracy import packed  # noqa: E402
from golden_file import Golden, Workspace, find, read  # noqa: E402

from memplan._bytes import format_bytes  # noqa: E402
from memplan.cudnn.ask import ask  # noqa: E402
from memplan.cudnn.cudnn_library import find_cudnn, title_of  # noqa: E402
from memplan.cudnn.questions import Question  # noqa: E402
from memplan.cudnn.recurrent import RecurrentQuestion  # noqa: E402
from memplan.trace.semantics.kinds import WorkspaceQuery  # noqa: E402

BLOCK = 512
BENCHMARK = ("conv2d_benchmark",)
KINDS = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True, slots=True)
class Row:
    """A convolution, or a gradient of it: what cuDNN says, and what the card took. Bytes."""

    kind: str
    key: str
    """Operands and options, as the golden files have them."""
    step: str
    """The first that asks it."""
    engine: str
    said: int
    took: int
    question: Question | None = None
    """As cuDNN was asked; not stored."""

    @property
    def equal(self) -> bool:
        """Whether both are the same number of blocks."""
        return blocks(self.said) == blocks(self.took)

    @property
    def pointwise(self) -> bool:
        """Whether each output looks at one position only."""
        weight = self.key.split(" ")[1 if self.kind == "forward" else 2]
        sizes = weight[weight.index("[") + 1 : weight.index("]")].split(",")
        return set(sizes[2:]) == {"1"}

    @property
    def format(self) -> str:
        """Type and memory format."""
        operands = [part for part in self.key.split(" ") if part[0] in "fb"]
        dtype = {"f32": "float32", "bf16": "bfloat16"}[operands[0].partition("[")[0]]
        return dtype + (", channels last" if any("/" in one for one in operands) else "")


def blocks(size: int) -> int:
    """How many blocks of the allocator hold it."""
    return -(-size // BLOCK)


def rows_of(golden: Golden, environment_of_cudnn: str) -> Iterator[Row | str]:
    """Each workspace of a step that cuDNN was asked for; a text for each op that the events do not tell apart."""
    import memplan
    from memplan.devices import find as find_card

    build = importlib.import_module("golden_steps").on_card(subjects()[golden.name].build)
    card = find_card(golden.gpu)
    with environment(golden.environment), questions_noted() as noted:
        trace = memplan.record(build, device=card.name, steps=len(golden.steps), cudnn=environment_of_cudnn)
    questions = {
        number: asked.question for number, asked in noted.get(trace.storages, {}).items()
        if asked.plan == "first" and isinstance(asked.question, Question)
    }  # fmt: skip
    library = find_cudnn(environment_of_cudnn)
    assert library is not None, "named"
    said = ask(library, card, questions.values()).plans  # without what a real card took
    plans = {number: said[question] for number, question in questions.items() if question in said}
    calls = calls_of(trace, golden)
    events, at = allocations(golden), 0
    for op in trace.ops:
        born = [storage for storage in trace.counted if storage.op == op.index]
        if not any(storage.id in plans for storage in born):
            continue
        expected = [None if storage.id in plans else storage.bytes for storage in born]
        row = calls.get(op.index)
        found = None if row is None else taken(events, at, expected, row)
        if row is None or found is None:
            yield f"{golden.name}: {op.name} at {op.where}"
            continue
        at, sizes = found
        asked = [storage for storage in born if storage.id in plans]
        for storage, size in zip(asked, sizes, strict=True):
            first, kind = plans[storage.id][0], kind_of(op.name, row.key, born.index(storage))
            yield Row(kind, row.key, golden.name, first.engine, first.workspace, size, questions[storage.id])


def recurrent_of(golden: Golden) -> Iterator[tuple[RecurrentQuestion, int]]:
    """Each call of a recurrent network, with the bytes that its workspace took."""
    import memplan
    from memplan.devices import find as find_card

    build = importlib.import_module("golden_steps").on_card(subjects()[golden.name].build)
    with environment(golden.environment), questions_noted() as noted:
        trace = memplan.record(
            build, device=find_card(golden.gpu).name, steps=len(golden.steps),
            cudnn=title_of(int(golden.versions["cudnn"] or 0)),
        )  # fmt: skip
    calls = calls_of(trace, golden)
    for number, asked in noted.get(trace.storages, {}).items():
        storage = trace.storages[number]
        if isinstance(asked.question, RecurrentQuestion) and storage.op in calls:
            yield asked.question, workspace_of_call(trace, storage, calls[storage.op])


@contextmanager
def questions_noted() -> Iterator[dict[Any, Mapping[int, WorkspaceQuery]]]:
    """Note what each recording asks cuDNN, by the storages of the Trace that it returns."""
    found: dict[Any, Mapping[int, WorkspaceQuery]] = {}
    recording = importlib.import_module("memplan.trace.record")
    answer = recording.with_workspaces

    def noting(trace: Any, asked: Mapping[int, WorkspaceQuery], *where: Any) -> Any:
        answered = answer(trace, asked, *where)
        found[answered.storages] = dict(asked)
        return answered

    with patch.object(recording, "with_workspaces", noting):
        yield found


def kind_of(op: str, key: str, place: int) -> str:
    """What is computed: of a backward, gradients that are wanted stand in the order input, weight."""
    if "backward" not in op:
        return "forward"
    wanted = key.rsplit("[", 1)[1].startswith("True")
    return "input gradient" if wanted and place < 2 else "weight gradient"


def allocations(golden: Golden) -> list[tuple[int, bool]]:
    """Of each allocation in order: bytes as requested, and whether it was freed before anything else happened."""
    entries = golden.snapshot()["device_traces"][0]
    entries = [entry for entry in entries if entry["action"] in ("alloc", "free_requested")]
    following = [*entries[1:], {"action": "", "addr": None}]
    return [
        (one["size"], after["action"] == "free_requested" and after["addr"] == one["addr"])
        for one, after in zip(entries, following, strict=True)
        if one["action"] == "alloc"
    ]


def taken(
    events: Sequence[tuple[int, bool]], start: int, expected: Sequence[int | None], row: Workspace
) -> tuple[int, list[int]] | None:
    """Where an op's allocations end among all, and what each workspace took; None where they are not found.

    ``expected`` has the sizes that are known, and None for a workspace: freed at once, or none at all. The most that
    lives, without the results, has to be what was measured of the op by itself.
    """
    for place in range(start, len(events)):
        at, sizes, held, most = place, list[int](), 0, 0
        for size in expected:
            if size is None:
                follows = at < len(events) and events[at][1]
                sizes.append(events[at][0] if follows else 0)
                at += follows
                most = max(most, held + sizes[-1])
            elif at < len(events) and events[at][0] == size:
                at, held = at + 1, held + size
                most = max(most, held)
            else:
                break
        else:
            if most - sum(row.results) == row.most:
                return at, sizes
    return None


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Each question once."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        found.setdefault((row.kind, row.key), row)
    return sorted(found.values(), key=lambda row: (KINDS.index(row.kind), row.pointwise, row.format, row.key))


def table(rows: Sequence[Row]) -> str:
    """What the docs show: a row for each kind of question."""
    lines = ["| | | asked | as named | more, at most | less, at most |", "|---|---|--:|--:|--:|--:|"]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kernel = "kernel of 1" if row.pointwise else "larger kernel"
        groups.setdefault((row.kind, kernel, row.format), []).append(row)
    for (kind, kernel, kept), group in groups.items():
        off = [(blocks(row.took) - blocks(row.said)) * BLOCK for row in group]
        more, less = ([sign * size for size in off if sign * size > 0] for sign in (1, -1))
        lines.append(
            f"| {kind}, {kernel} | {kept} | {len(group)} | {sum(row.equal for row in group)} "
            f"| {most(more)} | {most(less)} |"
        )
    return "\n".join([*lines, ""])


def most(sizes: Sequence[int]) -> str:
    """How many there are, and the largest, in words."""
    return f"{len(sizes)}, {format_bytes(max(sizes))}" if sizes else "-"


def sentence(rows: Sequence[Row]) -> str:
    """The same in short."""
    parts = []
    for kind in KINDS:
        large, one = ([row for row in rows if row.kind == kind and row.pointwise is p] for p in (False, True))
        counts = (f"{sum(row.equal for row in group)} of {len(group)}" for group in (large, one))
        parts.append("{} {} with larger kernels, {} with a kernel of 1".format(kind, *counts))
    largest = max(max(row.said, row.took) for row in rows)
    return f"As named: {'; '.join(parts)}. The largest workspace is {format_bytes(largest)}.\n"


def write(rows: Sequence[Row], unclear: Sequence[str]) -> None:
    """Write the results, and the page that shows them."""
    plain = ({name: value for name, value in asdict(row).items() if name != "question"} for row in rows)
    content = {"convolutions": list(plain), "unclear": list(unclear)}
    (RESULTS / "cudnn.json").write_text(packed(content), encoding="utf-8")
    (RESULTS / "cudnn.md").write_text(f"{sentence(rows)}\n{table(rows)}", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cudnn", required=True, metavar="PATH", help="environment whose cuDNN is asked")
    options = parser.parse_args()
    library = find_cudnn(options.cudnn)
    found: list[Row | str] = []
    for golden in map(read, find(ROOT / "goldens")):
        if golden.name in BENCHMARK or not any("convolution" in name for name in golden.calls or {}):
            continue
        if library is None or golden.versions["cudnn"] != library.version:
            parser.error(f"{golden.path.name} was recorded with cuDNN {golden.versions['cudnn']}, not {library}")
        found += rows_of(golden, options.cudnn)
    rows = distinct(row for row in found if isinstance(row, Row))
    unclear = [row for row in found if isinstance(row, str)]
    print(sentence(rows), table(rows), *unclear, sep="\n")
    write(rows, unclear)
    return 0


if __name__ == "__main__":
    sys.exit(main())
