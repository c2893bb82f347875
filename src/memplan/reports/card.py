"""What a step takes from its card, for the terminal: the sum that nvidia-smi would show, and where it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from memplan._bytes import format_bytes
from memplan.explanation.model import CardUse, Charge, Verdict, verdict_sentence
from memplan.reports.columns import Column

_LABELS = {
    "tensors": "tensors",
    "workspace": "workspaces of libraries",
    "rounding": "rounding to blocks",
    "fragmentation": "cached, in fragments",
    "context": "CUDA context",
}
_WHY = {
    "tensors": "each at the peak of its case",
    "workspace": "cuDNN chooses when it runs",
    "context": "grows as kernels are loaded",
}
_ANSWERS = {"fits": "fits on", "low only": "fits in the low case only on", "does not fit": "does not fit on"}


def charge_columns(use: CardUse) -> list[Column]:
    """The sum as columns; one column of numbers where the low and the high case are the same."""
    charges = [charge for charge in use.charges if charge.high or charge.name in ("tensors", "context")]
    total = Charge("total", sum(c.low for c in use.charges), sum(c.high for c in use.charges))
    rows = [*charges, total]
    names = (*(_LABELS[charge.name] for charge in charges), "nvidia-smi would show")
    highs = Column("high", tuple(format_bytes(row.high) for row in rows), right=True)
    lows = Column("low", tuple(format_bytes(row.low) for row in rows), right=True)
    reasons = (*(_WHY.get(c.name, "") if c.low != c.high else "" for c in charges), "")
    return [Column("On the card", names), lows, highs, Column("why not one number", reasons, drop=1, shrinks_to=10)]


def sums_from(use: CardUse) -> int:
    """The index of the last row of `charge_columns`."""
    return len(charge_columns(use)[0].cells) - 1


def verdict_lines(use: CardUse) -> Iterator[RenderableType]:
    """The verdict, the other cards by answer, and what is not in the sum."""
    style = {"fits": "bold green", "low only": "bold yellow", "does not fit": "bold red"}[use.verdict.answer]
    yield Text(verdict_sentence(use), style)
    for answer, words in _ANSWERS.items():
        names = [other.device for other in _of(use.others, answer)]
        if names:
            yield Text(f"{words} {', '.join(names)}", "dim")
    if use.other_kernels:
        names = ", ".join(use.other_kernels)
        yield Text(f"takes other kernels on {names}: name one of them as the device", "dim")
    for line in use.not_modelled:
        yield Text(f"not in this sum: {line}", "dim")


def _of(verdicts: Sequence[Verdict], answer: str) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.answer == answer]
