"""How near the one number that is said by default is to what real cards did, over all golden files.

    python benchmarks/cuda_numbers.py                  # writes benchmarks/results/cuda_numbers.json and .md, and
                                                       # docs/cuda.md
    python benchmarks/cuda_numbers.py --only lstm      # prints, writes nothing

The default of a CPU build of torch without cuDNN: a workspace is what a real card took or what cuDNN answered, where
memplan has that stored, and else the expected one. Most convolutions of the golden files are stored, since the stored
workspaces of real cards were read from them; so each step is predicted again without any stored answer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
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
    Comparison,
    Prediction,
    environment,
    filled,
    measured,
    spans,
    subjects,
)
from golden_file import Golden, find, read  # noqa: E402

CAUSES = {
    "batch_norm_channels_last_bf16": "native batch norm's input gradient in the first step",
    "conv2d_benchmark": "cudnn.benchmark: which plan is the fastest shows on the card alone",
    "lstm_lm": "the blocks of the weights before torch put them into one buffer stay reserved",
    "t5": "another release of transformers, 5.17, made the file",
    "unetr": "another release of MONAI, 1.5.2, made the file: its blocks have weights more",
}
"""Step -> why its number is off with stored answers, too."""
OF_WORKSPACES = "workspaces that the model of cuDNN's choice does not expect"


@dataclass(frozen=True)
class Row:
    """A step of a golden file, with and without stored answers."""

    step: str
    card: str
    within: bool
    allocated: float
    """Relative error, the largest among the whole run and its steps."""
    reserved: float
    inside: bool
    """Whether the allocated peaks lie in the band; True where there is none and the number is within 1 %."""
    stored: bool


def rows_of(golden: Golden) -> list[Row]:
    """Return a row with, and one without stored answers."""
    return [row_of(golden, stored=stored) for stored in (True, False)]


def row_of(golden: Golden, *, stored: bool) -> Row:
    import memplan
    from memplan.cudnn.cudnn_library import title_of
    from memplan.devices import find as find_card

    build = importlib.import_module("golden_steps").on_card(subjects()[golden.name].build)
    version = title_of(int(golden.versions["cudnn"] or 0))
    with environment(golden.environment), answers(stored):
        trace = memplan.record(
            build, device=find_card(golden.gpu).name, steps=len(golden.steps), cudnn=version
        )  # fmt: skip
    low, high, number = (spans(trace, golden, case) for case in ("low", "high", "expected"))
    prediction = Prediction(low, high, number, trace.torch)
    compared = Comparison(golden.name, golden.set, golden.gpu, golden.torch, measured(golden), prediction)
    inside = all(
        min(a.allocated, n.allocated) * 0.99 <= peak.allocated <= max(b.allocated, n.allocated) * 1.01
        for a, b, n, peak in zip(low, high, number, compared.measured, strict=True)
    )
    off = [compared.off(what) or 0.0 for what in ("allocated", "reserved")]
    return Row(golden.name, golden.gpu, compared.within(), off[0], off[1], inside, stored)


@contextmanager
def answers(stored: bool) -> Iterator[None]:
    """Hide the stored answers, unless they count."""
    if stored:
        yield
        return
    with (
        patch("memplan.cudnn.ask.measured", lambda *_, **__: {}),
        patch("memplan.cudnn.ask.shipped", lambda *_, **__: {}),
    ):
        yield


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return counts and shares with and without stored answers."""
    return {
        name: {
            "steps": len(part),
            "within": sum(row.within for row in part),
            "share": sum(row.within for row in part) / max(1, len(part)),
            "inside the band": sum(row.inside for row in part),
        }
        for name, part in (("stored", [r for r in rows if r.stored]), ("not stored", [r for r in rows if not r.stored]))
    }


def table(rows: Sequence[Row]) -> str:
    """Return Markdown: the shares, then each step that is further off."""
    total = summary(rows)
    lines = ["| | steps | within 1 % allocated and 3 % reserved | allocated peak in the band |", "|---|--:|--:|--:|"]
    for name, title in (("stored", "as said by default"), ("not stored", "without any stored answer")):
        part = total[name]
        lines.append(
            f"| {title} | {part['steps']} | {part['within']} ({part['share']:.0%}) | {part['inside the band']} |"
        )
    lines += ["", "| further off | card | stored answers | allocated | reserved | cause |", "|---|---|---|--:|--:|---|"]
    for row in sorted(rows, key=lambda row: (not row.stored, row.step, row.card)):
        if not row.within:
            cause = CAUSES.get(row.step, OF_WORKSPACES)
            lines.append(
                f"| {row.step} | {row.card} | {'yes' if row.stored else 'no'} | {row.allocated:+.1%} | "
                f"{row.reserved:+.1%} | {cause} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this step only; may be repeated")
    options = parser.parse_args()
    rows = list[Row]()
    for golden in map(read, find(ROOT / "goldens")):
        if golden.name in subjects() and (not options.only or golden.name in options.only):
            rows += rows_of(golden)
    print(table(rows))
    if options.only:
        return
    content: dict[str, Any] = {"summary": summary(rows), "rows": [asdict(row) for row in rows]}
    (RESULTS / "cuda_numbers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "cuda_numbers.md").write_text(table(rows), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
