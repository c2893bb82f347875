"""The engine ``inductor``: both halves of a planned step as fused kernels."""

from __future__ import annotations

from memplan._torch import inductor
from memplan.planning.fused import Fused, Halves, Part, lowering


def compiled(of: Fused) -> Halves:
    """Compile all parts of a step. What was compiled before, in whatever process, is found in Inductor's cache.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    return Halves(of, _kernels)


def _kernels(part: Part) -> inductor.Boxed:
    with lowering(part):
        return inductor.kernels_of(part.lowerable)
