"""Write initial values and frozen weights to NAME_weights.h, or to NAME.bin, which the caller of the code reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from memplan.exporting.c_text import comment
from memplan.exporting.kernels.call_writer import number
from memplan.exporting.source.step_layout import Memory, StepLayout

COLUMNS = 8
"""Numbers on a line of an initializer."""
ARRAY_NAMES: Mapping[str, str] = {
    "trained": "trained", "statistics": "initial_statistics", "frozen": "frozen", "scales": "scales", "int8": "int8",
    "trained_int8": "trained_int8",
}  # fmt: skip
"""The kinds of tensors of `Memory` in the order of NAME.bin, with the array's name in NAME_weights.h."""

INT8 = ("int8", "trained_int8")
"""Those of them in eight bits, which lie behind all floats."""


def pointers(layout: StepLayout) -> dict[str, str]:
    """Return C for a pointer to the first element of each kind; the state is `s`."""
    if not layout.weights_file:
        return {kind: f"{layout.name}_{name}" for kind, name in ARRAY_NAMES.items()}
    pointer_of, floats, int8_elements = dict[str, str](), 0, 0  # so many elements lie before a kind
    for kind in ARRAY_NAMES:
        float_pointer = f"s->flash + {floats}" if floats else "s->flash"
        if kind in INT8:
            pointer = f"(const signed char *)({float_pointer})"
            pointer_of[kind] = pointer + (f" + {int8_elements}" if int8_elements else "")
            int8_elements += layout.memory.elements(kind)
        else:
            pointer_of[kind] = float_pointer
            floats += layout.memory.elements(kind)
    return pointer_of


def weights_text(layout: StepLayout) -> str:
    """Return the text of NAME_weights.h: an array of each kind that has elements, tensor by tensor."""
    memory, name = layout.memory, layout.name
    flash = f"{name.upper()}_FLASH"
    lines = [
        f"/* Weights of {name}, in flash. Only {name}.c includes this. {flash}: attributes, such as of a section. */",
        *(f"#ifndef {flash}", f"#define {flash}", "#endif"), "",
    ]  # fmt: skip
    for kind, array in ARRAY_NAMES.items():
        if not memory.elements(kind):
            continue
        c_type = "signed char" if kind in INT8 else "float"
        lines.append(f"{flash} static const {c_type} {name}_{array}[{memory.elements(kind)}] = {{")
        for path, elements in named_arrays(memory, kind):
            lines.append(comment(f"{'x'.join(map(str, elements.shape)) or 'a number'}: {path}"))
            lines += lines_of(elements.reshape(-1))
        lines.append("};")
    return "\n".join(lines) + "\n"


def weights_bytes(layout: StepLayout) -> bytes:
    """Return NAME.bin: little-endian floats, then int8 weights."""
    parts = [
        elements.astype("i1" if kind in INT8 else "<f4").tobytes()
        for kind in ARRAY_NAMES
        for _, elements in named_arrays(layout.memory, kind)
    ]
    return b"".join(parts)


def named_arrays(memory: Memory, kind: str) -> Iterable[tuple[str, np.ndarray]]:
    """Yield name and elements of each tensor of a kind."""
    for tensor in getattr(memory, kind):
        if kind == "scales":
            yield tensor.path, memory.quantized[tensor.path].scales
        elif kind in INT8:
            yield tensor.path, memory.quantized[tensor.path].numbers
        else:
            yield tensor.path, memory.initial_values[tensor.path]


def lines_of(array: Iterable[float]) -> list[str]:
    """Return the lines of a C initializer with these elements."""
    values = [str(int(x)) if isinstance(x, (int, np.integer)) else number(float(x)) for x in array]
    return [", ".join(values[at : at + COLUMNS]) + "," for at in range(0, len(values), COLUMNS)]
