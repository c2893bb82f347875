"""Compile both halves of a planned step into fused kernels: the engine ``inductor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memplan._torch import inductor
from memplan.errors import CompileError
from memplan.planning.inductor.partition import CompiledPasses, Fused, Part, lowering


def compile_parts(step: Fused) -> CompiledPasses:
    """Compile all parts of a step, through Inductor's on-disk cache. Raises CompileError if there is no compiler, or it
    fails."""
    return CompiledPasses(step, _compile_part)


def _compile_part(part: Part) -> inductor.Boxed:
    """Return the function of a part's fused kernels. Its first run raises CompileError if the compiler fails, or if an
    op's result has another layout than its fake implementation says."""
    with lowering(part.name):
        function = inductor.kernels_of(part.lowerable)

    def run(inputs: list[Any]) -> Sequence[Tensor]:
        """Run the kernels, and convert errors of a compiler or of an op's layout."""
        try:
            return function(inputs)
        except Exception as error:
            if inductor.is_of_compiler(error):  # Triton compiles launchers and autotunes in the first run
                with lowering(part.name):  # converts the error
                    raise
            if not isinstance(error, AssertionError) or not inductor.is_of_other_layout(error):
                raise
            reason = "; ".join(str(error).splitlines()[:2])
            raise CompileError(
                f"An op of the {part.name} pass does not return what its fake implementation says: {reason:.300}",
                expected="ops that return shapes and strides as their fake implementations say",
                do="Mend the op's register_fake (torch.library.opcheck tests it), or leave engine out",
            ) from error

    return run
