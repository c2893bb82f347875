"""Store the moments of Adam and AdamW in 8 bits, in lossy plans."""

from __future__ import annotations

from memplan.planning.levers.lever import Lever, PlannedStep, Reason
from memplan.planning.ops.eight_bit_moments import library_of_moments


class EightBitMoments(Lever):
    """Let an optimizer of torchao or bitsandbytes update the parameters. `memplan.planning.precision_search` chooses it
    where no plan with moments in the parameters' dtype meets the budget."""

    name = "8-bit moments"

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Report the bytes by which the optimizer's state is smaller."""
        if not planned.moment_bytes_saved:
            return None
        return Reason(
            planned.moment_bytes_saved,
            f"{library_of_moments()}'s optimizer stores moments as 8-bit codes with a float32 scale for each block of "
            "256; memplan.fit makes it: train with fitted.optimizer",
            grade="lossy",
        )
