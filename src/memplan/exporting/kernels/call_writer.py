"""Write calls of kernels: which templates they need, their tables of sizes, and where their operands lie."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.exporting.kernels.elementwise import form_of
from memplan.exporting.kernels.templates import NEEDS, element_functions, template
from memplan.exporting.lowering.device_graph import refusal
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import is_dense

LOOPS = 4


@dataclass
class CallWriter:
    """What the calls of one C file share: each template and each table is written once."""

    graph: JointGraph
    place: Callable[[int], str]
    """Return C for a pointer to the first element of a value."""
    emits: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """By gradient that exists one element at a time: the function that applies it, and its first arguments."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Text of each kernel, by name, in the order in which they are needed."""
    tables: dict[str, str] = field(default_factory=dict)
    """Name of each table of sizes, by its declaration without the name."""
    scales: Mapping[int, str] = field(default_factory=dict)
    """By weight in eight bits: C for a pointer to its scales."""

    # -- values

    def value(self, ref: Ref) -> Value:
        """Return what an argument is."""
        return self.graph.values[ref.value]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return self.graph.values[ref.value].shape

    def scales_of(self, ref: Ref) -> str | None:
        """Return C for a pointer to an argument's scales; None where it is in float32."""
        return self.scales.get(self.graph.base(ref.value))

    def at(self, given: Any) -> str:
        """Return C for an argument or a result: a pointer, or 0 where it is missing."""
        if given is None:
            return "0"
        return self.place(given.value if isinstance(given, Ref) else given)

    # -- text

    def kernel(self, name: str, text: str | None = None) -> str:
        """Note that a kernel is needed, and all that it needs; return its name."""
        if name not in self.kernels:
            for needed in NEEDS.get(name, ()):
                self.kernel(needed)
            self.kernels[name] = template(name) if text is None else text
        return name

    def instance(self, source: str, name: str, defines: Mapping[str, str]) -> str:
        """Note a kernel that is a template with names filled in by the preprocessor; return its name."""
        if name not in self.kernels:
            for needed in NEEDS.get(source, ()):
                self.kernel(needed)
            given = {"KERNEL": name, **defines}
            before = "".join(f"#define {macro} {text}".rstrip() + "\n" for macro, text in given.items())
            after = "".join(f"#undef {macro.partition('(')[0]}\n" for macro in given)
            self.kernels[name] = before + template(source) + after
        return name

    def table(self, kind: str, *rows: Any) -> str:
        """Return C for a pointer to a constant table of sizes."""
        text = ", ".join(
            "{" + ", ".join(map(str, row)) + "}" if isinstance(row, (list, tuple)) else str(row) for row in rows
        )
        declaration = f"static const {kind} NAME = {{{text}}};"
        name = self.tables.setdefault(declaration, f"{kind}_{len(self.tables)}")
        return f"&{name}"

    def call(self, name: str, *given: Any) -> str:
        """Return a call of a kernel; values as pointers, numbers as C."""
        return f"{name}({', '.join(self.argument(one) for one in given)});"

    def argument(self, given: Any) -> str:
        """Return C for one argument."""
        if isinstance(given, float):
            return number(given)
        return (
            given
            if isinstance(given, str)
            else self.at(given)
            if isinstance(given, Ref) or given is None
            else str(int(given))
        )

    # -- elementwise

    def elementwise(self, op: GraphOp) -> str:
        """Return the call of an op that goes element by element."""
        found = form_of(op.target, op.args, op.kwargs)
        if found is None or len(found[1]) > 2:
            raise refusal(op, " with these arguments")
        form, operands, numbers = found
        result = op.outputs[0]
        assert result is not None, "somebody reads it"
        self._element(form.function)
        names = "pqrs"[: len(numbers)]
        letters = ("a", "b")[: len(operands)]
        defines = {
            f"RESULT({', '.join(letters)})": f"{form.function}({', '.join((*letters, *names))})",
            "PARAMETERS": "".join(f", float {name}" for name in names),
        }
        every = [self.graph.values[result], *(self.value(one) for one in operands)]
        pointers = [self.at(Ref(result)), *map(self.at, operands)]
        flat = all(one.shape == every[0].shape and one.stride == every[0].stride for one in every) and is_dense(
            every[0]
        )
        count = len(operands)
        if flat or all(math.prod(one.shape) == 1 for one in every):
            name = self.instance(f"elementwise{count}", f"each_{form.function}", defines)
            return self.call(name, *pointers, math.prod(every[0].shape), *numbers)
        name = self.instance(f"strided{count}", f"strided_{form.function}", defines)
        return self.call(name, *pointers, self._strided(op, every), *numbers)

    def _element(self, function: str) -> None:
        """Note the function that computes an element, and those that it calls."""
        known = element_functions()
        for called in re.findall(r"\b(\w+)\(", known[function].partition(")")[2]):
            if called in known and called != function:
                self._element(called)
        self.kernels.setdefault(function, known[function])

    def _strided(self, op: GraphOp, every: Sequence[Value]) -> str:
        shape = every[0].shape
        steps = [_broadcast(value, shape) for value in every]
        sizes, merged = merged_loops(shape, steps)
        if len(sizes) > LOOPS:
            raise refusal(
                op,
                f" over {len(sizes)} dimensions that do not follow one another",
                near="the same of a contiguous() tensor",
            )
        missing = LOOPS - len(sizes)
        rows = [[1] * missing + sizes, *([0] * missing + step for step in merged)]
        while len(rows) < 4:
            rows.append([0] * LOOPS)
        return self.table("strided", *rows)

    def strided_copy(self, op: GraphOp, to: str, like: Value, start: int, source: str, steps: Sequence[int]) -> str:
        """Return a copy into a part of a value: ``like`` has the part's shape and strides, after ``start`` elements."""
        self._element("copy")
        name = self.instance("strided1", "strided_copy", {"RESULT(a)": "copy(a)", "PARAMETERS": ""})
        sizes, merged = merged_loops(like.shape, [list(like.stride), list(steps)])
        if len(sizes) > LOOPS:
            raise refusal(op, f" over {len(sizes)} dimensions")
        missing = LOOPS - len(sizes)
        rows = [[1] * missing + sizes, *([0] * missing + step for step in merged), [0] * LOOPS]
        return self.call(name, f"{to} + {start}" if start else to, source, self.table("strided", *rows))


def _broadcast(value: Value, shape: tuple[int, ...]) -> list[int]:
    """Return the step of a value in each dimension of a result."""
    missing = len(shape) - len(value.shape)
    steps = [0 if size == 1 else step for size, step in zip(value.shape, value.stride, strict=True)]
    return [0] * missing + steps


def merged_loops(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the same loops, with those merged in which every operand goes on where the inner one ends.

    Example:
        >>> merged_loops((2, 3, 4), [(12, 4, 1), (0, 4, 1)])
        ([2, 12], [[12, 1], [0, 1]])
    """
    sizes, found = list[int](), [list[int]() for _ in steps]
    for at, size in enumerate(shape):
        if size == 1:
            continue
        goes_on = bool(sizes) and all(own[-1] == step[at] * size for own, step in zip(found, steps, strict=True))
        if goes_on:
            sizes[-1] *= size
        else:
            sizes.append(size)
        for own, step in zip(found, steps, strict=True):
            if goes_on:
                own[-1] = step[at]
            else:
                own.append(step[at])
    return (sizes, found) if sizes else ([1], [[0] for _ in steps])


def number(value: float) -> str:
    """Return C for a float, exact.

    Example:
        >>> number(0.1), number(float("-inf")), number(2)
        ('0.1f', '-INFINITY', '2.0f')
    """
    import numpy as np

    if math.isnan(value):
        return "NAN"
    if math.isinf(value) or abs(value) > 3.4028235e38:
        return "INFINITY" if value > 0 else "-INFINITY"
    text = str(np.float32(value))
    return (text if any(mark in text for mark in ".e") else f"{text}.0") + "f"
