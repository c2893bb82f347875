"""In how many bits a step is computed and kept: what a lossy plan changes, before anything is searched for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Compute = Literal["", "bfloat16", "float16"]
Save = Literal["exact", "bfloat16", "int8"]

SMALLEST_HALF = 2.0**-24
"""The smallest number above 0 that float16 holds, about 6e-8. bfloat16 reaches as far down as float32 does."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a step computes in, and what its values may be kept in from the forward to the backward pass."""

    compute: Compute = ""
    """What convolutions and matrix products run in, as under autocast; weights stay what they are, and are cast where
    they are used. Nothing: what the step is written in."""
    save: Save = "exact"
    """What a value may be kept in that a plan encodes: only what gives it back bit for bit, bfloat16, or eight bits an
    element with a scale for every group (see planning.levers.encode)."""
    apart: tuple[str, ...] = ()
    """Layers that compute in what they are written in all the same, with all that is in them: where that is faster."""
    whole: bool = False
    """Convolutions run in one go, where they would run a few samples at a time (planning.chunks): as near, faster, and
    they hold more."""

    @property
    def lossy(self) -> bool:
        """Whether anything differs from the step as it is written."""
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
"""To be said wherever a step computes in float16: nothing here knows whether there is a scaler."""
