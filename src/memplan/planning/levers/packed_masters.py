"""Store only the low halves of float32 master weights, beside the bfloat16 weights."""

from __future__ import annotations

from memplan.planning.levers.lever import Lever, PlannedStep, Reason


class PackedMasters(Lever):
    """The optimizer `memplan.PackedMasters`, which takes 2 bytes for a master weight instead of 4."""

    name = "packed masters"

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Report the bytes that the master weights would take more in float32."""
        if not planned.packed_bytes:
            return None
        return Reason(  # as many bytes as are stored: 2 of 4 for each element
            planned.packed_bytes,
            "of each float32 master weight only the low half is stored: the high half is the bfloat16 weight",
            {"stored_bytes": planned.packed_bytes},
        )
