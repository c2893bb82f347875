"""Run groups of calls as fused kernels, forward and backward, that save less for the backward pass."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.planning.graph.joint_graph import SavedForm
from memplan.planning.levers.lever import Grade, Lever, Reason


class Kernel(Lever):
    """Replace groups of calls by ops of `memplan.kernels`. `memplan.planning.kernel_search` chooses them."""

    name = "kernel"

    def grade(self, form: SavedForm | None = None) -> Grade:
        """Return ``reordered``: a kernel rounds less often, and adds in another order."""
        return "reordered"

    def reason_of(self, kernel: str, saved_bytes_before: int, saved_bytes_after: int, workspace_bytes: int) -> Reason:
        """Describe what a group's kernel saves, for the plan's table. The group's calls save ``saved_bytes_before`` for
        the backward pass, the kernel ``saved_bytes_after``; it allocates and frees ``workspace_bytes``."""
        before, after = format_bytes(saved_bytes_before), format_bytes(saved_bytes_after)
        text = f"by memplan.kernels.{kernel}, which saves {after} instead of {before}"
        text += f"; its workspace is {format_bytes(workspace_bytes)}" if workspace_bytes else ""
        details = {"kernel": kernel, "kept_bytes": saved_bytes_after, "workspace": workspace_bytes}
        return Reason(max(0, saved_bytes_before - saved_bytes_after), text, details, self.grade())
