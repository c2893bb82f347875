"""What a device starts with, and what never changes: in NAME_weights.h, or in a file that the caller reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from memplan.exporting.c_text import comment
from memplan.exporting.kernels.call_writer import number
from memplan.exporting.source.step_layout import Memory, StepLayout

COLUMNS = 8
"""Numbers in a line."""
KINDS: Mapping[str, str] = {
    "trained": "trained", "statistics": "initial_statistics", "frozen": "frozen", "scales": "scales", "int8": "int8",
}  # fmt: skip
"""Kinds of `Memory`, in a file's order, and the name of each kind's array in NAME_weights.h."""


def pointers(layout: StepLayout) -> dict[str, str]:
    """Return C for a pointer to the first element of each kind, where `s` is the state."""
    if not layout.weights_file:
        return {kind: f"{layout.name}_{name}" for kind, name in KINDS.items()}
    found, at = dict[str, str](), 0
    for kind in KINDS:
        start = f"s->flash + {at}" if at else "s->flash"
        found[kind] = f"(const signed char *)({start})" if kind == "int8" else start
        at += layout.memory.floats(kind)
    return found


def weights_text(layout: StepLayout) -> str:
    """Return NAME_weights.h."""
    memory, name = layout.memory, layout.name
    lines = [f"/* Weights of {name}, in flash. Only {name}.c includes this. */", ""]
    for kind, array in KINDS.items():
        if not memory.floats(kind):
            continue
        element = "signed char" if kind == "int8" else "float"
        lines.append(f"static const {element} {name}_{array}[{memory.floats(kind)}] = {{")
        for path, elements in _arrays(memory, kind):
            lines.append(comment(f"{'x'.join(map(str, elements.shape)) or 'a number'}: {path}"))
            lines += lines_of(elements.reshape(-1))
        lines.append("};")
    return "\n".join(lines) + "\n"


def weights_bytes(layout: StepLayout) -> bytes:
    """Return NAME.bin: floats, little-endian, then weights in eight bits."""
    parts = [
        elements.astype("i1" if kind == "int8" else "<f4").tobytes()
        for kind in KINDS
        for _, elements in _arrays(layout.memory, kind)
    ]
    return b"".join(parts)


def _arrays(memory: Memory, kind: str) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensors of a kind by name."""
    for one in getattr(memory, kind):
        if kind == "scales":
            yield one.path, memory.quantized[one.path].scales
        elif kind == "int8":
            yield one.path, memory.quantized[one.path].numbers
        else:
            yield one.path, memory.values[one.path]


def lines_of(array: Iterable[float]) -> list[str]:
    """Return lines of an initializer."""
    values = [str(int(one)) if isinstance(one, (int, np.integer)) else number(float(one)) for one in array]
    return [", ".join(values[at : at + COLUMNS]) + "," for at in range(0, len(values), COLUMNS)]
