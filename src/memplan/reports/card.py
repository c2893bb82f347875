"""Part of reports about a step's GPU: the memory that nvidia-smi would show, and on which GPUs the step fits."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.explanation.model import CardUse, Charge, smaller_plans_sentence, verdict_sentence
from memplan.reports.document import Field, Line, Part, Style, number_field, table_of

_LABELS = {
    "tensors": "tensors",
    "workspace": "workspaces of libraries",
    "rounding": "rounding to blocks",
    "fragmentation": "cached, in fragments",
    "context": "CUDA context",
}
_WHY = {
    "tensors": "more at the peak of the high case",
    "workspace": "cuDNN chooses when it runs",
    "context": "grows as kernels are loaded",
}
_ANSWERS = {"fits": "fits on", "low only": "fits in the low case only on", "does not fit": "does not fit on"}


_STYLES: dict[str, Style] = {"fits": "good", "low only": "warning", "does not fit": "bad"}


def parts(use: CardUse) -> Iterator[Part]:
    """Yield a table of the memory that nvidia-smi would show, with a low and a high case; the verdict; the other GPUs
    by verdict; and memory that is not counted."""

    def why_not_one_number(charge: Charge) -> str:
        return _WHY.get(charge.name, "") if charge.low != charge.high else ""

    fields = [Field("On the card", lambda charge: _LABELS[charge.name])]
    if use.verdict.band is not None:  # bytes are expected values: low and high are equal
        fields.append(number_field("bytes", lambda charge: charge.low))
    else:
        fields += [
            number_field("low", lambda charge: charge.low),
            number_field("high", lambda charge: charge.high),
            Field("why not one number", why_not_one_number, shrinks_to=10, drop=1),
        ]
    charges = [charge for charge in use.charges if charge.high or charge.name in ("tensors", "context")]
    yield table_of(charges, fields, total="nvidia-smi would show")
    yield Line(verdict_sentence(use), _STYLES[use.verdict.answer])
    if text := smaller_plans_sentence(use):
        yield text
    for answer, words in _ANSWERS.items():
        names = [other.device for other in use.others if other.answer == answer]
        if names:
            yield Line(f"{words} {', '.join(names)}", "dim")
    if use.other_kernels:
        names = ", ".join(use.other_kernels)
        yield Line(f"takes other kernels on {names}: name one of them as the device", "dim")
    for line in use.not_modelled:
        yield Line(f"not in this sum: {line}", "dim")
