"""Write NAME_save and NAME_load: what lasts of a state, behind a header by which a state of another export is known."""

from __future__ import annotations

import json
import zlib

from memplan.exporting.kernels.templates import filled
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.source.stored_weights import named_arrays
from memplan.exporting.weights_file import HEADER_BYTES, MAGIC

CRC_TABLE = 64
"""Bytes of the constant table of CRC-32."""
STATUS = ("NO_STATE", "OTHER_EXPORT", "DAMAGED", "NO_ACCESS")
"""What NAME_load returns besides 0, after the values of `input_checks.STATUS`."""


def layout_number(layout: StepLayout) -> int:
    """Return a number of 32 bits by which an export knows its saved states.

    It depends on the members of the state, names and shapes of the tensors, the kind of optimizer, and the frozen
    weights, which the trained ones were trained beside. It does not depend on the budget, learning rates or weights
    that are trained: a newer export of the same model resumes from a state of an older one.
    """
    memory = layout.memory
    contents = {
        "tensors": [[tensor.path, tensor.shape] for tensor in memory.weights],
        "state": layout.saved_members,
        "optimizer": [group.template for group in layout.rules.groups],
    }
    checksum = zlib.crc32(json.dumps(contents).encode())
    for kind in ("frozen", "scales", "int8"):
        for path, elements in named_arrays(memory, kind):
            little_endian = elements.astype(elements.dtype.newbyteorder("<"))
            checksum = zlib.crc32(path.encode() + little_endian.tobytes(), checksum)
    return checksum


def saved_bytes(layout: StepLayout) -> int:
    """Return the bytes that NAME_save writes, with the header."""
    return HEADER_BYTES + 4 * sum(count for _, count in layout.saved_members)


def functions_text(layout: StepLayout) -> str:
    """Return the C functions NAME_save and NAME_load."""
    replacements = {
        "NAME": layout.name,
        "UPPER": layout.name.upper(),
        "MAGIC": f"0x{int.from_bytes(MAGIC, 'little'):08X}",
        "LAST": layout.saved_members[-1][0],
    }
    return filled("saved_state", replacements).rstrip()


def macros(layout: StepLayout) -> list[str]:
    """Return the macros of NAME.h about saved states."""
    upper, number = layout.name.upper(), f"0x{layout_number(layout):08X}u"
    return [
        f"#define {upper}_SAVED_BYTES {saved_bytes(layout)}    /* that save writes */",
        f"#define {upper}_LAYOUT {number}    /* load refuses states of exports with another one */",
    ]


def declarations(layout: StepLayout) -> list[str]:
    """Return the declarations of NAME_save and NAME_load in NAME.h."""
    name, upper = layout.name, layout.name.upper()
    return [
        "/* Weights, the optimizer's state, statistics, random numbers and counters, to go on later as if nothing had",
        f"   been. `page` is memory of `size` bytes, at least 16. Page after page, {name}_save calls write, and",
        f"   {name}_load read, with the offset of a page and its length: `size`, or less for the last one, behind",
        "   which the page holds 0xFF. They return 0, or another number if they fail.",
        f"   {name}_load, after {name}_init, reads twice: it checks everything before it changes s. It returns 0, or",
        f"   {upper}_NO_STATE (nothing was saved there), {upper}_OTHER_EXPORT, {upper}_DAMAGED (its CRC-32 differs),",
        f"   {upper}_NO_ACCESS (write or read failed, or the page is too small), and s is as it was. */",
        f"typedef int {name}_write(void *context, size_t offset, const void *page, size_t length);",
        f"typedef int {name}_read(void *context, size_t offset, void *page, size_t length);",
        f"int {name}_save(const {name}_state *s, void *page, size_t size, {name}_write *write, void *context);",
        f"int {name}_load({name}_state *s, void *page, size_t size, {name}_read *read, void *context);",
    ]  # fmt: skip
