"""Precisions in which a step is computed and its values saved: what a lossy plan changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan._display import Printed

Compute = Literal["", "bfloat16", "float16"]
Save = Literal["exact", "bfloat16", "int8"]

SMALLEST_HALF = 2.0**-24
"""The smallest number above 0 that float16 holds, about 6e-8. bfloat16 reaches as far down as float32 does."""


@dataclass(frozen=True, slots=True)
class Precision(Printed):
    """Dtypes that a step computes in, and in which it may save values from the forward to the backward pass."""

    compute: Compute = ""
    """Dtype of convolutions and matrix products, as under autocast; weights keep theirs and are cast where they are
    used. Empty: the dtype that the step is written in."""
    save: Save = "exact"
    """Encodings of saved values: only exact ones, bfloat16, or eight bits an element with a scale for every group."""
    apart: tuple[str, ...] = ()
    """Layers that compute in what they are written in all the same, with all that is in them: where that is faster."""
    whole: bool = False
    """Convolutions run in one go, where they would run a few samples at a time (chunk_convolutions.py): as near,
    faster, and they hold more."""

    @property
    def lossy(self) -> bool:
        """Return whether anything differs from the step as it is written."""
        return bool(self.compute) or self.save != "exact"

    def __str__(self) -> str:
        parts = [f"computing in {self.compute}"] if self.compute else []
        parts += [f"in {', '.join(self.apart)} as written"] if self.apart else []
        parts += {"exact": [], "bfloat16": ["saving in bfloat16"], "int8": ["saving in 8 bits"]}[self.save]
        return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1] if parts else "exact"


EXACT = Precision()

UNSCALED = (
    f"float16 holds nothing between 0 and {SMALLEST_HALF:.0e}: small gradients vanish unless the loss is scaled; call "
    "backward() on what torch.amp.GradScaler makes of the loss, or use bfloat16, which reaches as far as float32"
)
"""Note for every step that computes in float16: whether its loss is scaled is unknown here."""
