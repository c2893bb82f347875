"""Precision in which a step computes and saves values: what a lossy plan changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan._display import Printed

Compute = Literal["", "bfloat16", "float16"]
Save = Literal["exact", "bfloat16", "int8"]
Moments = Literal["", "int8"]

SMALLEST_HALF = 2.0**-24
"""The smallest positive number of float16, about 6e-8. bfloat16 has the exponent range of float32."""


@dataclass(frozen=True, slots=True)
class Precision(Printed):
    """Dtypes in which a step computes, in which it may save values for the backward pass, and of Adam's moments."""

    compute: Compute = ""
    """Dtype of convolutions and matrix products, as under autocast: weights keep their dtype and are cast on use.
    Empty: the dtypes of the model."""
    save: Save = "exact"
    """Encodings of saved values: only exact ones, bfloat16, or eight bits an element with a scale for every group."""
    apart: tuple[str, ...] = ()
    """Layers that still compute in the dtypes of the model, with all their submodules, because that is faster."""
    whole: bool = False
    """Run convolutions on the whole batch that would run on a few samples at a time (chunk_convolutions.py): equally
    accurate, faster, and with more workspace."""
    moments: Moments = ""
    """Dtype of the moments of Adam and AdamW: "int8" is eight bits an element with a scale for every block. Empty: as
    the optimizer has them."""

    @property
    def lossy(self) -> bool:
        """Whether anything differs from the step as the model is written."""
        return bool(self.compute) or self.save != "exact" or bool(self.moments)

    def __str__(self) -> str:
        parts = [f"computing in {self.compute}"] if self.compute else []
        parts += [f"in {', '.join(self.apart)} as written"] if self.apart else []
        parts += {"exact": [], "bfloat16": ["saving in bfloat16"], "int8": ["saving in 8 bits"]}[self.save]
        parts += ["moments in 8 bits"] if self.moments else []
        if len(parts) < 2:
            return parts[0] if parts else "exact"
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


EXACT = Precision()

UNSCALED = (
    f"float16 holds nothing between 0 and {SMALLEST_HALF:.0e}: small gradients vanish unless the loss is scaled; call "
    "backward() on what torch.amp.GradScaler makes of the loss, or use bfloat16, which reaches as far as float32"
)
"""Note for every step that computes in float16. Whether the user scales the loss is unknown to the planner."""
