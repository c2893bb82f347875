"""What the caller passes to the C functions: type, number and range of the elements of each argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memplan.exporting.lowering.byte_inputs import BYTES
from memplan.exporting.source.input_checks import index_ranges
from memplan.exporting.source.step_layout import StepLayout


@dataclass(frozen=True, slots=True)
class Argument:
    """An input of the model or a target of the loss."""

    name: str
    c_type: str
    shape: tuple[int, ...]
    macro: str
    """Name of the macro with the number of elements."""
    meaning: str
    """What the elements are, where a type does not say it: a range of indices, or bytes."""
    in_arena: bool
    """Whether it lies in the arena: then a macro has its address."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> str:
        """The shape as text, such as "1x3x8x8"."""
        return "x".join(map(str, self.shape)) or "a number"


def arguments_of(layout: StepLayout) -> list[Argument]:
    """Return the arguments of the step, in the order of its C function."""
    graph = layout.step.device.graph
    arena_name = None if layout.arena_input is None else layout.arena_input[0]
    arguments = list[Argument]()
    for value, name in layout.step.inputs.items():
        ranges = [
            f"0 to {count - 1}" + ("" if ignored is None or 0 <= ignored < count else f", or {ignored}: left out")
            for count, ignored in index_ranges(graph, value)
        ]
        meaning = "as recorded, not normalized" if graph.values[value].dtype in BYTES else ""
        arguments.append(
            Argument(
                name, layout.step.c_type(value), graph.values[value].shape,
                macro=f"{layout.name.upper()}_{name.upper()}_ELEMENTS",
                meaning=f"an index: {' and '.join(ranges)}" if ranges else meaning, in_arena=name == arena_name,
            )
        )  # fmt: skip
    return arguments
