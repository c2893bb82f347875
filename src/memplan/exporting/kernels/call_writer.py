"""Write calls of C kernels, and collect the templates and tables of sizes that the calls need."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memplan.exporting.kernels.elementwise import element_call_of
from memplan.exporting.kernels.templates import REQUIRED_TEMPLATES, element_functions, template
from memplan.exporting.lowering.device_graph import first_output, refusal
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
from memplan.planning.graph.op_schema import is_dense

C_BYTES = {"uint8": "unsigned char", "int8": "signed char"}
"""C types of inputs of eight bits."""
STRIDED_LOOPS = 4
"""Nested loops of kernels for strided operands."""


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """How a kernel calls the C function that updates one element of a weight."""

    function: str
    parameters: str
    """C declarations of the kernel's parameters for it."""
    update_element: str
    """C for the update of element ``k`` by gradient ``g``."""
    arguments: str
    """C for the arguments that the kernel's call has for these parameters."""
    zero_gradients_matter: bool = True
    """Whether a gradient of zero changes anything, too: by weight decay or moments."""

    @property
    def macros(self) -> dict[str, str]:
        """Macros of a kernel that hands on each element."""
        return {"TARGET": self.parameters, "EMIT(k, g)": self.update_element}


@dataclass
class CallWriter:
    """Kernels and tables of one C file; each is written once, however many calls need it."""

    graph: JointGraph
    pointer_to: Callable[[int], str]
    """Return C for a pointer to the first element of a value."""
    update_calls: Mapping[int, UpdateCall] = field(default_factory=dict)
    """By gradient of a fused update: how a kernel hands on its elements."""
    kernels: dict[str, str] = field(default_factory=dict)
    """C text by kernel name, each kernel after those that it calls."""
    tables: dict[str, str] = field(default_factory=dict)
    """Name of each table of sizes, by its declaration with NAME in place of the name."""
    int8_scales: Mapping[int, str] = field(default_factory=dict)
    """By int8 weight: C for a pointer to its scales."""

    # -- values

    def value(self, ref: Ref) -> Value:
        """Return the value that an argument refers to."""
        return self.graph.values[ref.value]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return self.graph.values[ref.value].shape

    def scales_of(self, ref: Ref) -> str | None:
        """Return C for a pointer to the scales of an int8 weight; None for an argument in float32."""
        return self.int8_scales.get(self.graph.base(ref.value))

    def pointer(self, value: Ref | int | None) -> str:
        """Return C for a pointer to a value; a null pointer for None."""
        if value is None:
            return "0"
        return self.pointer_to(value.value if isinstance(value, Ref) else value)

    # -- text

    def kernel(self, name: str) -> str:
        """Add the kernel of a template after those that it calls; return its name."""
        if name not in self.kernels:
            for needed in REQUIRED_TEMPLATES.get(name, ()):
                self.kernel(needed)
            self.kernels[name] = template(name)
        return name

    def instance(self, source: str, name: str, defines: Mapping[str, str]) -> str:
        """Add kernel `name`, which is template `source` with these preprocessor macros defined; return the name."""
        if name not in self.kernels:
            for needed in REQUIRED_TEMPLATES.get(source, ()):
                self.kernel(needed)
            self.kernels[name] = with_macros(template(source), {"KERNEL": name, **defines})
        return name

    def table(self, kind: str, *rows: Any) -> str:
        """Add a constant struct of type `kind`; return C for a pointer to it."""
        text = ", ".join(
            "{" + ", ".join(map(str, row)) + "}" if isinstance(row, (list, tuple)) else str(row) for row in rows
        )
        declaration = f"static const {kind} NAME = {{{text}}};"
        name = self.tables.setdefault(declaration, f"{kind}_{len(self.tables)}")
        return f"&{name}"

    def array(self, kind: str, rows: Sequence[Sequence[Any]]) -> str:
        """Add a constant array of structs of type `kind`; return its name."""
        text = ",\n    ".join("{" + ", ".join(map(str, row)) + "}" for row in rows)
        declaration = f"static const {kind} NAME[] = {{\n    {text},\n}};"
        return self.tables.setdefault(declaration, f"{kind}_{len(self.tables)}")

    def call(self, name: str, *arguments: Any) -> str:
        """Return the call of a kernel: values become pointers, numbers and flags literals; strings are C already."""
        return f"{name}({', '.join(map(self.argument, arguments))});"

    def argument(self, argument: Any) -> str:
        """Return C for one argument; see `call`."""
        if isinstance(argument, str):
            return argument
        if isinstance(argument, float):
            return number(argument)
        return self.pointer(argument) if isinstance(argument, Ref) or argument is None else str(int(argument))

    def byte_input(self, op: GraphOp) -> tuple[str, dict[str, str], tuple[Any, ...]]:
        """Return how a kernel reads the input of an op, which may be bytes: suffix of its name, macros, arguments. The
        latter are factor and addend of the normalization (see `byte_inputs.NORMALIZE`), () for an input in floats."""
        factor_and_addend = op.kwargs.get("bytes")
        if factor_and_addend is None:
            return "", {"INPUT": "float", "CONSTANTS": "", "FLOATS": "1", "VALUE(v, channel)": "(v)"}, ()
        dtypes = [self.value(argument).dtype for argument in op.args if isinstance(argument, Ref)]
        dtype = next(dtype for dtype in dtypes if dtype in C_BYTES)
        by_channel = math.prod(self.shape(factor_and_addend[0])) > 1
        index = "channel" if by_channel else "0"
        macros = {
            "INPUT": C_BYTES[dtype], "CONSTANTS": ", const float *gain, const float *offset", "FLOATS": "0",
            "VALUE(v, channel)": f"(gain[{index}] * (float)(v) + offset[{index}])",
        }  # fmt: skip
        return f"_of_{dtype}{'_channels' if by_channel else ''}", macros, factor_and_addend

    # -- elementwise

    def elementwise(self, op: GraphOp) -> str:
        """Return the call of an elementwise op, with one loop where all operands have the result's dense layout.

        Raises:
            RecordingError: no kernel takes these arguments.
        """
        match = element_call_of(op.target, op.args, op.kwargs)
        if match is None:
            raise refusal(op, " with these arguments")
        function, operands, numbers = match[0].function, match[1], match[2]
        output = Ref(first_output(op))
        result, *_ = values = [self.value(ref) for ref in (output, *operands)]
        pointers = [self.pointer(ref) for ref in (output, *operands)]
        same_layout = all(value.shape == result.shape and value.stride == result.stride for value in values)
        one_loop = (same_layout and is_dense(result)) or all(math.prod(value.shape) == 1 for value in values)
        kernel = self._loop_kernel(function, operands=len(operands), numbers=len(numbers), strided=not one_loop)
        if one_loop:
            return self.call(kernel, *pointers, math.prod(result.shape), *numbers)
        strides = [_broadcast_strides(value, result.shape) for value in values]
        return self._strided_call(kernel, result.shape, strides, pointers, numbers)

    def _loop_kernel(self, function: str, *, operands: int, numbers: int, strided: bool) -> str:
        """Add the kernel that calls the C function of one element for all elements; return its name.

        Args:
            function: name in templates/element_functions.c.
            operands, numbers: how many tensors, and how many floats behind them, the function takes.
            strided: whether the operands have strides of their own; else all are read in one loop.
        """
        self.element_function(function)
        letters, parameters = "abc"[:operands], "pqrs"[:numbers]  # names in the C text
        elements = [f"row_{letter}[l * s->{letter}[3]]" if strided else f"{letter}[i]" for letter in letters]
        defines = {
            "OPERANDS": ", ".join(f"const float *{letter}" for letter in letters),
            "PARAMETERS": "".join(f", float {name}" for name in parameters),
            "VALUE": f"{function}({', '.join((*elements, *parameters))})",
        }
        if not strided:
            return self.instance("elementwise", f"each_{function}", defines)
        defines["ROW(x)"] = "i * s->x[0] + j * s->x[1] + k * s->x[2]"
        defines["ROWS"] = " ".join(f"const float *row_{letter} = {letter} + ROW({letter});" for letter in letters)
        return self.instance("strided", f"strided_{function}", defines)

    def element_function(self, function: str) -> None:
        """Add the C function that computes one element, after those that it calls."""
        functions = element_functions()
        body = functions[function].partition(")")[2]  # behind the parameters
        for called in re.findall(r"\b(\w+)\(", body):
            if called in functions and called != function:
                self.element_function(called)
        self.kernels.setdefault(function, functions[function])

    def _strided_call(
        self, kernel: str, shape: Sequence[int], strides: Sequence[Sequence[int]], pointers: Sequence[str],
        numbers: Sequence[float] = (),
    ) -> str:  # fmt: skip
        """Return the call of a kernel of `LOOPS` nested loops over a shape, within for loops over what it has more.

        `strides` and `pointers` are of the result, then of each operand.
        """
        sizes, merged_strides = merged_loops(shape, strides)
        outer_count = max(len(sizes) - STRIDED_LOOPS, 0)
        outer_loops = "".join(
            f"for (int d{loop} = 0; d{loop} < {sizes[loop]}; d{loop}++)\n{'    ' * (loop + 2)}"
            for loop in range(outer_count)
        )
        offsets = ["".join(f" + d{loop} * {steps[loop]}" for loop in range(outer_count)) for steps in merged_strides]
        first_elements = [pointer + offset for pointer, offset in zip(pointers, offsets, strict=True)]
        missing = max(STRIDED_LOOPS - len(sizes), 0)  # loops of the kernel that run once
        rows = [[1] * missing + sizes[outer_count:], *([0] * missing + steps[outer_count:] for steps in merged_strides)]
        unused_rows = [[0] * STRIDED_LOOPS] * (5 - len(rows))  # the C struct has sizes, and strides of four tensors
        table = self.table("strided", *rows, *unused_rows)
        return outer_loops + self.call(kernel, *first_elements, table, *numbers)

    def strided_copy(self, to: str, like: Value, start: int, source: str, strides: Sequence[int]) -> str:
        """Return the call that copies the elements at C pointer `source`, with these strides, to pointer `to` from
        element `start` on. The copy has the shape and strides of `like`."""
        kernel = self._loop_kernel("copy", operands=1, numbers=0, strided=True)
        first_element = f"{to} + {start}" if start else to
        return self._strided_call(kernel, like.shape, (like.stride, strides), (first_element, source))


def with_macros(text: str, macros: Mapping[str, str]) -> str:
    """Return C text with macros defined before and undefined behind it."""
    before = "".join(f"#define {macro} {body}".rstrip() + "\n" for macro, body in macros.items())
    return before + text + "".join(f"#undef {macro.partition('(')[0]}\n" for macro in macros)


def _broadcast_strides(value: Value, shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a value expanded to a shape."""
    new_dims = len(shape) - len(value.shape)
    strides = [0 if size == 1 else stride for size, stride in zip(value.shape, value.stride, strict=True)]
    return [0] * new_dims + strides


def merged_loops(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Merge nested loops over successive dimensions where every operand is contiguous across them.

    `strides`: of each operand by dimension. Returns the sizes of the loops, and each operand's strides in them.

    Example:
        >>> merged_loops((2, 3, 4), [(12, 4, 1), (0, 4, 1)])
        ([2, 12], [[12, 1], [0, 1]])
    """
    sizes, loop_strides = list[int](), [list[int]() for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        operands = list(zip(loop_strides, strides, strict=True))
        if sizes and all(of_loops[-1] == by_dim[dim] * size for of_loops, by_dim in operands):
            sizes[-1] *= size  # one loop over this dimension and the one before it
            for of_loops in loop_strides:
                of_loops.pop()
        else:
            sizes.append(size)
        for of_loops, by_dim in operands:
            of_loops.append(by_dim[dim])
    return (sizes, loop_strides) if sizes else ([1], [[0] for _ in strides])


def number(value: float) -> str:
    """Return a float literal of C that is read as exactly this float32.

    Example:
        >>> number(0.1), number(float("-inf")), number(2)
        ('0.1f', '-INFINITY', '2.0f')
    """
    if math.isnan(value):
        return "NAN"
    if math.isinf(value) or abs(value) > 3.4028235e38:  # the largest float32
        return "INFINITY" if value > 0 else "-INFINITY"
    text = str(np.float32(value))
    return (text if any(mark in text for mark in ".e") else f"{text}.0") + "f"
