"""Write NAME.c: the kernels that are needed, and the functions that call them in the schedule's order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from memplan.exporting.c_text import comment
from memplan.exporting.kernels.call_writer import CallWriter, number
from memplan.exporting.kernels.kernel_calls import calls_of
from memplan.exporting.kernels.templates import template
from memplan.exporting.source.step_layout import Held, Pass, StepLayout
from memplan.exporting.source.stored_weights import pointers
from memplan.planning.graph.joint_graph import Ref, Value
from memplan.planning.graph.op_schema import arguments_of, is_contiguous, short
from memplan.planning.levers.encode import DIRECT
from memplan.planning.schedule.actions import Action

INDENT = "    "


def program_text(layout: StepLayout) -> str:
    """Return the text of NAME.c."""
    writer = _ProgramWriter(layout)
    infer, step = writer.infer(), writer.step()
    return "\n\n".join([writer.head(), *writer.parts(), infer, step, writer.interface()]) + "\n"


class _ProgramWriter:
    """Writes both functions with the same kernels and tables."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout, self.name = layout, layout.name
        self.held: dict[str, str] = {}
        memory = layout.memory
        for kind, tensors in (("s->weights", memory.trained), ("s->statistics", memory.statistics)):
            self.held |= {one.path: _plus(kind, one.offset) for one in tensors}
        self.flash = pointers(layout)
        self.held |= {one.path: _plus(self.flash["frozen"], one.offset) for one in memory.frozen}
        self.held |= {one.path: _plus(self.flash["int8"], one.offset) for one in memory.int8}
        self.scales = {one.path: _plus(self.flash["scales"], one.offset) for one in memory.scales}
        self.offset_of = {one.path: one.offset for one in memory.trained}
        self.constants: dict[str, str] = {}
        self.kernels: dict[str, str] = {}
        self.tables: dict[str, str] = {}

    # -- functions

    def step(self) -> str:
        """Return the function that runs a step."""
        of = self.layout.step
        arguments = ", ".join(
            f"const {_c_type(of.device.graph.values[value].dtype)} *{name}" for value, name in of.inputs.items()
        )
        lines = ["s->step++;", *self._corrections(), *self._body(of)]
        loss = self._place(of, len(of.lifetimes.placed) - 1, of.schedule.graph.outputs[0])
        lines.append(f"return ({loss})[0];")
        return f"float {self.name}_step({self.name}_state *s, {arguments})\n{{\n" + _indented(lines) + "}"

    def infer(self) -> str:
        """Return the function that runs the model alone."""
        of = self.layout.infer
        arguments = ", ".join(
            f"const {_c_type(of.device.graph.values[value].dtype)} *{name}" for value, name in of.inputs.items()
        )
        lines = self._body(of)
        result = of.schedule.graph.values[of.schedule.graph.outputs[0]]
        assert is_contiguous(result), "the lowering made it so"
        source = self._place(of, len(of.lifetimes.placed) - 1, result.id)
        lines += [f"for (int k = 0; k < {math.prod(result.shape)}; k++)", f"{INDENT}output[k] = ({source})[k];"]
        return (
            f"void {self.name}_infer({self.name}_state *s, {arguments}, float *output)\n{{\n" + _indented(lines) + "}"
        )

    def _corrections(self) -> list[str]:
        lines = []
        for at, group in enumerate(self.layout.rules.groups):
            for position, logarithm in enumerate(group.logarithms):
                lines.append(f"s->correction[{2 * at + position}] = -expm1f((float)s->step * {number(logarithm)});")
        return lines

    def _body(self, of: Pass) -> list[str]:
        scales = {value.id: _plus(self.scales[value.path], of.device.offsets.get(value.id, 0) // value.stride[0])
                  for value in of.schedule.graph.values
                  if value.kind == "parameter" and value.path in self.scales}  # fmt: skip
        writer = CallWriter(of.schedule.graph, lambda value: "", self._emits(of), self.kernels, self.tables, scales)
        lines, before = list[str](), ""
        for at, action in enumerate((*of.schedule.forward, *of.schedule.backward)):
            writer.place = lambda value, at=at: self._place(of, at, value)
            calls = self._calls(of, writer, action)
            said = _said(of, action) if calls else ""
            if said and said != before:
                lines.append(comment(said))
                before = said
            lines += calls
        return lines

    # -- actions

    def _calls(self, of: Pass, writer: CallWriter, action: Action) -> list[str]:
        graph = of.schedule.graph
        if action.kind == "run":
            op = action.called(graph)
            return calls_of(writer, op) if action.form is None else self._from_bits(of, writer, action)
        if action.kind == "store":
            form = graph.form[action.form or 0]
            count = math.prod(graph.values[form.value].shape)
            kernel = writer.kernel("pack_bits")
            return [writer.call(kernel, Ref(form.kept), Ref(form.value), form.how == "positive", count)]
        if action.kind == "write":
            assert action.value is not None, "a write has a target"
            assert action.source is not None, "and a source"
            count = math.prod(graph.values[action.value].shape)
            to, source = writer.place(action.value), writer.place(action.source)
            return [f"for (int k = 0; k < {count}; k++)", f"{INDENT}({to})[k] = ({source})[k];"]
        if action.kind == "give":
            return self._update(of, writer, action)
        assert action.kind == "receive", f"{action.kind} is for larger machines"
        return []

    def _from_bits(self, of: Pass, writer: CallWriter, action: Action) -> list[str]:
        graph = of.schedule.graph
        op, form = action.called(graph), graph.form[action.form or 0]
        given = arguments_of(op.target, op.args, op.kwargs)
        slope = float(given.get("negative_slope", 0.0))
        beside, made = given[DIRECT[op.target].same], op.outputs[0]
        assert made is not None, "somebody reads it"
        count = math.prod(graph.values[made].shape)
        kernel = writer.kernel("scaled_by_bits")
        return [writer.call(kernel, Ref(made), beside, Ref(form.kept), slope, count)]

    def _update(self, of: Pass, writer: CallWriter, action: Action) -> list[str]:
        graph = of.schedule.graph
        assert action.value is not None, "what is given is the gradient of something"
        assert action.source is not None, "and is there"
        value = graph.values[action.value]
        if graph.base(action.source) in of.device.fused or value.path not in self.offset_of:
            return []
        one = self._rule(value.path)
        name = writer.instance("update_all", f"{one}_all", {"UPDATE": one})
        count = math.prod(value.shape)
        return [writer.call(name, "s", self._first(of, value), Ref(action.source), count)]

    def _first(self, of: Pass, parameter: Value) -> int:
        """Return the position of a parameter's first element among all weights: it can be a part of one."""
        return self.offset_of[parameter.path] + of.device.offsets.get(parameter.id, 0)

    def _rule(self, path: str) -> str:
        """Note the function that updates one weight of a parameter; return its name."""
        at = self.layout.rules.group_of[path]
        name, rule = f"update_{at}", self.layout.rules.groups[at]
        if name not in self.kernels:
            defines = {"KERNEL": name, **rule.defines}
            before = "".join(f"#define {macro} {text}".rstrip() + "\n" for macro, text in defines.items())
            self.kernels[name] = before + template(rule.template) + "".join(f"#undef {macro}\n" for macro in defines)
        return name

    def _emits(self, of: Pass) -> Mapping[int, tuple[str, str]]:
        graph = of.schedule.graph
        return {
            graph.base(gradient): (
                self._rule(graph.values[param].path),
                f"s, {self._first(of, graph.values[param])}",
            )
            for param, gradient in graph.gradients
            if graph.base(gradient) in of.device.fused
        }

    # -- places

    def _place(self, of: Pass, at: int, value: int) -> str:
        """Return C for a pointer to the first element of a value during an action."""
        graph, device = of.schedule.graph, of.device
        found, base = graph.values[value], graph.values[graph.base(value)]
        offset = device.offsets.get(value, 0)
        if value in device.constants:
            return self._constant(of, value)
        if base.kind in ("parameter", "buffer"):
            return _plus(self.held[base.path], offset)
        if base.kind == "input":
            return _plus(of.inputs[base.id], offset)
        if base.id in device.constants:
            return _plus(self._constant(of, base.id), offset)
        start = of.placement.offsets[of.lifetimes.placed[at][base.id]]
        assert not start % 4, "buffers are whole words"
        pointer = f"s->arena + {start // 4}" if start else "s->arena"
        return _plus(f"(unsigned char *)({pointer})" if found.dtype in ("bool", "uint8") else pointer, offset)

    def _constant(self, of: Pass, value: int) -> str:
        array = of.device.constants[value]
        integers = array.dtype.kind in "iu"
        elements = [str(int(one)) if integers else number(float(one)) for one in array.reshape(-1)]
        text = f"static const {'int32_t' if integers else 'float'} NAME[] = {{{', '.join(elements)}}};"
        return self.constants.setdefault(text, f"constant_{len(self.constants)}")

    # -- the rest

    def head(self) -> str:
        """Return what comes before the kernels."""
        lines = [
            f"/* {self.name}: a training step, written by memplan. See {self.name}.h for what to call. */",
            f'#include "{self.name}.h"',
            *([] if self.layout.weights_file else [f'#include "{self.name}_weights.h"']),
            "#include <math.h>",
            "",
            f"#define STATE {self.name}_state",
            "",
            f"typedef char {self.name}_arena_is_whole",
            f"    [sizeof(((STATE *)0)->arena) == {self.name.upper()}_ARENA_BYTES ? 1 : -1];",
        ]
        return "\n".join(lines)

    def parts(self) -> list[str]:
        """Return kernels, tables and constants, once both functions are written."""
        tables = [text.replace("NAME", name, 1) for text, name in self.tables.items()]
        constants = [text.replace("NAME", name, 1) for text, name in self.constants.items()]
        return [
            *(text.rstrip() for text in self.kernels.values()),
            *(["\n".join(tables)] if tables else []),
            *constants,
        ]

    def _start(self) -> list[str]:
        name = self.name
        if not self.layout.weights_file:
            return [f"void {name}_init({name}_state *s)", "{"]
        return [f"void {name}_init({name}_state *s, const float *flash)", "{", f"{INDENT}s->flash = flash;"]

    def interface(self) -> str:
        """Return the functions that start a device, and that move its weights."""
        name, memory = self.name, self.layout.memory
        trained, statistics = memory.floats("trained"), memory.floats("statistics")
        lines = [
            *self._start(),
            f"    for (int k = 0; k < {trained}; k++) {{", f"        s->weights[k] = ({self.flash['trained']})[k];",
            *(["        s->momentum[k] = 0;"] if self.layout.rules.momentum else []),
            *(["        s->squares[k] = 0;"] if self.layout.rules.squares else []),
            "    }",
            *_copy(statistics, f"s->statistics[k] = ({self.flash['statistics']})[k];"),
            "    s->step = 0;", "    s->rate = 1;", f"    {name}_seed(s, 1);", "}", "",
            f"void {name}_seed({name}_state *s, uint32_t seed)", "{", "    s->random = seed ? seed : 1;", "}", "",
            f"void {name}_get_weights(const {name}_state *s, float *weights)", "{",
            *_copy(trained, "weights[k] = s->weights[k];"),
            *_copy(statistics, f"weights[{trained} + k] = s->statistics[k];"), "}", "",
            f"void {name}_set_weights({name}_state *s, const float *weights)", "{",
            *_copy(trained, "s->weights[k] = weights[k];"),
            *_copy(statistics, f"s->statistics[k] = weights[{trained} + k];"), "}",
        ]  # fmt: skip
        return "\n".join(lines)


def _copy(count: int, line: str) -> list[str]:
    return [f"    for (int k = 0; k < {count}; k++)", f"        {line}"] if count else []


def _plus(pointer: str, offset: int) -> str:
    return f"{pointer} + {offset}" if offset else pointer


def _c_type(dtype: str) -> str:
    return "int32_t" if dtype == "int32" else "float"


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"{INDENT}{line}\n" for line in lines)


def _said(of: Pass, action: Action) -> str:
    """Return layer, line and op of an action."""
    graph = of.schedule.graph
    if action.kind == "give" and action.value is not None:
        return f"update {graph.values[action.value].path}"
    if action.kind == "store":
        return "keep as bits"
    if action.op is None:
        return action.kind
    op = action.called(graph)
    where = f" ({op.where})" if op.where else ""
    again = ", again" if action.recomputed else ""
    return f"{op.layer or 'model'}{where}: {short(op.target)}{again}"


def held_of(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Held, ...]:
    """Lay tensors one after another."""
    found, at = list[Held](), 0
    for path, shape in tensors:
        found.append(Held(path, shape, at))
        at += found[-1].size
    return tuple(found)
