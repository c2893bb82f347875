"""Write NAME.c: the kernels, and the functions that call them in the order of the schedule."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from memplan.exporting.c_text import comment
from memplan.exporting.kernels.call_writer import CallWriter, UpdateCall, number
from memplan.exporting.kernels.kernel_calls import calls_of
from memplan.exporting.kernels.templates import template
from memplan.exporting.lowering.device_graph import WORD, WRITE, first_output
from memplan.exporting.lowering.inside_bits import GRADIENT, INSIDE, bounds_of
from memplan.exporting.source import saved_state
from memplan.exporting.source.companion_files import init_arguments, init_parameters
from memplan.exporting.source.input_checks import check_of, check_text
from memplan.exporting.source.step_layout import Pass, StepLayout
from memplan.exporting.source.stored_weights import lines_of, pointers
from memplan.planning.graph.joint_graph import Ref, Value
from memplan.planning.graph.op_schema import arguments_of, short
from memplan.planning.levers.encode import BITS_READERS
from memplan.planning.schedule.actions import Action

INDENT = "    "
_NUMBER = re.compile(r"[^\s{},;]+")
"""One in the braces of a table."""


def program_text(layout: StepLayout) -> str:
    """Return the text of NAME.c."""
    writer = _ProgramWriter(layout)
    functions = [
        check_text(layout),
        writer.infer(),
        *([writer.update()] if writer.gradients_stay else []),
        writer.step(),
    ]
    return (
        "\n\n".join(
            [writer.head(), *writer.parts(), *functions, writer.interface(), saved_state.functions_text(layout)]
        )
        + "\n"
    )


def constants_bytes(layout: StepLayout, of_int: int) -> int:
    """Return the bytes of all constants of the program: weights, tensors of the model's code, and tables, whose numbers
    and pointers have `of_int` bytes."""
    writer = _ProgramWriter(layout)
    for function in (writer.infer, writer.step):
        function()  # adds the tables that it needs to the writer
    numbers = sum(len(_NUMBER.findall(declaration.partition("=")[2])) for declaration in writer.tables)
    return layout.memory.flash_bytes + layout.constant_bytes + of_int * numbers + saved_state.CRC_TABLE


class _ProgramWriter:
    """Writes the step and `infer`, which share kernels, tables and constants."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout, self.name = layout, layout.name
        self.flash = pointers(layout)
        """C for a pointer to the first element in flash memory, by kind of weight."""
        memory = layout.memory
        self.weights = {
            tensor.path: _plus(start, tensor.offset)
            for start, tensors in (
                ("s->weights", memory.trained), ("s->int8", memory.trained_int8),
                ("s->statistics", memory.statistics),
                (self.flash["frozen"], memory.frozen), (self.flash["int8"], memory.int8),
            )
            for tensor in tensors
        }  # fmt: skip
        """C for a pointer to each parameter and buffer, by name."""
        self.scales = {tensor.path: _plus(self.flash["scales"], tensor.offset) for tensor in memory.scales}
        """C for a pointer to the scales of each parameter in eight bits, by name."""
        self.offset_of = {tensor.path: tensor.offset for tensor in (*memory.trained, *memory.trained_int8)}
        """Offset of each trained parameter within the trained weights in floats or in eight bits."""
        self.int8 = {tensor.path for tensor in memory.trained_int8}
        """Names of the parameters that are trained in eight bits."""
        self.constants: dict[str, str] = {}
        """Name of each constant array, by its C text with NAME in place of the name."""
        self.kernels: dict[str, str] = {}
        """As for `CallWriter`; also `tables`."""
        self.tables: dict[str, str] = {}
        self.gradients_stay = layout.rules.gradients.stay_until_update
        """Whether all gradients stay in RAM until NAME_update applies them."""

    # -- functions

    def step(self) -> str:
        """Return the C function of a training step, which returns the loss."""
        run = self.layout.step
        loss, forward_end, end = run.schedule.graph.outputs[0], len(run.schedule.forward), len(run.lifetimes.buffer_of)
        loss_after_forward = self._pointer(run, forward_end - 1, loss)
        lines = [
            f"if ({check_of(self.layout, run)})", f"{INDENT}return NAN;", *self._body(run, begin=0, end=forward_end),
            f"if (({loss_after_forward})[0] - ({loss_after_forward})[0] != 0) /* not finite: nothing is updated */",
            f"{INDENT}return ({loss_after_forward})[0];",
            *([] if self.gradients_stay else ["s->step++;", *self._corrections()]),
            *self._body(run, begin=forward_end, end=end),
        ]  # fmt: skip
        if self.gradients_stay:
            calls_per_update = self.layout.rules.gradients.accumulate
            lines += ["s->calls++;", f"if (s->calls >= {calls_per_update})", f"{INDENT}{self.name}_update(s);"]
        lines.append(f"return ({self._pointer(run, end - 1, loss)})[0];")
        name = self.name
        return (
            f"float {name}_step_to({name}_state *s, {run.parameters}, float *output)\n{{\n{_indented(lines)}}}\n\n"
            f"float {name}_step({name}_state *s, {run.parameters})\n{{\n"
            f"{INDENT}return {name}_step_to(s, {', '.join(run.inputs.values())}, 0);\n}}"
        )

    def update(self) -> str:
        """Return the C function that updates the weights by the gradients that are kept."""
        writer = self._writer(self.layout.step)
        lines, count = ["if (!s->calls)", f"{INDENT}return;"], self.layout.memory.elements("trained")
        clip_norm = self.layout.rules.gradients.clip_norm
        if clip_norm is not None:
            lines.append(writer.call(writer.kernel("clip_norm"), "s->gradients", clip_norm, count))
        lines += ["s->step++;", *self._corrections()]
        group_of = self.layout.rules.group_of
        # successive weights of one parameter group are updated in one call
        for group, tensors in itertools.groupby(self.layout.memory.trained, lambda tensor: group_of[tensor.path]):
            first, *others = tensors
            update = _update_call(self._rule_function(group), first.offset)
            gradient = f"s->gradients + {first.offset}"
            size = first.size + sum(tensor.size for tensor in others)
            lines.append(writer.call(self._update_all(writer, update), update.arguments, gradient, size))
        lines += [writer.call(writer.kernel("fill"), "s->gradients", 0.0, count), "s->calls = 0;"]
        return f"void {self.name}_update({self.name}_state *s)\n{{\n" + _indented(lines) + "}"

    def infer(self) -> str:
        """Return the C functions of the model in evaluation mode: its output, and its loss where that can be
        computed."""
        run, name = self.layout.infer, self.name
        check = [f"const int status = {check_of(self.layout, run)};", "if (status)", f"{INDENT}return status;"]
        end = len(run.lifetimes.buffer_of)
        if not self.layout.has_evaluation_loss:
            lines = [*check, *self._body(run, begin=0, end=end), "return 0;"]
            head = f"int {name}_infer({name}_state *s, {run.model_parameters}, float *output)"
            return f"{head}\n{{\n{_indented(lines)}}}"
        # the model ends where its output is written to the caller's memory; the loss follows
        model_end = 1 + max(time for time, action in enumerate(run.schedule.forward) if self._is_write(run, action))
        loss = self._pointer(run, end - 1, run.schedule.graph.outputs[0])
        lines = [
            *check, *self._body(run, begin=0, end=model_end), "if (!loss)", f"{INDENT}return 0;",
            *self._body(run, begin=model_end, end=end), f"*loss = ({loss})[0];", "return 0;",
        ]  # fmt: skip
        arguments = [name if name in run.model_inputs else "0" for name in run.inputs.values()]  # no targets
        return f"""static int evaluated({name}_state *s, {run.parameters}, float *output, float *loss)
{{
{_indented(lines)}}}

int {name}_infer({name}_state *s, {run.model_parameters}, float *output)
{{
    return evaluated(s, {", ".join(arguments)}, output, 0);
}}

float {name}_evaluate({name}_state *s, {run.parameters}, float *output)
{{
    float loss;
    return evaluated(s, {", ".join(run.inputs.values())}, output, &loss) ? NAN : loss;
}}"""

    def _is_write(self, run: Pass, action: Action) -> bool:
        return action.op is not None and action.called_op(run.schedule.graph).target == WRITE

    def _corrections(self) -> list[str]:
        """Return the lines that update Adam's bias corrections: ``1 - beta ** step``, from the logarithm of beta."""
        lines = []
        for index, group in enumerate(self.layout.rules.groups):
            for position, logarithm in enumerate(group.logarithms):  # of both betas
                lines.append(f"s->correction[{2 * index + position}] = -expm1f((float)s->step * {number(logarithm)});")
        return lines

    def _body(self, run: Pass, begin: int, end: int) -> list[str]:
        """Return the statements of actions of a pass, with a comment where layer, source line or op change."""
        graph = run.schedule.graph
        scales = dict[int, str]()
        for value in graph.values:
            if value.kind == "parameter" and value.path in self.scales:  # a part of it has scales from a later row on
                first_row = run.device.storage_offsets.get(value.id, 0) // self._row_elements(value.path)
                scales[value.id] = _plus(self.scales[value.path], first_row)
        writer = replace(self._writer(run), update_calls=self._fused_updates(run), int8_scales=scales)
        lines, last_label = list[str](), ""
        actions = (*run.schedule.forward, *run.schedule.backward)
        for time, action in list(enumerate(actions))[begin:end]:
            writer.pointer_to = lambda value, time=time: self._pointer(run, time, value)
            calls = self._calls(run, writer, action)
            label = _label(run, action) if calls else last_label
            if label != last_label:
                lines.append(comment(label))
                last_label = label
            lines += [*calls, f"{self.name.upper()}_HOOK();"] if calls else []
        return lines

    def _writer(self, run: Pass) -> CallWriter:
        """Return a writer that adds to the kernels and tables of the file; it cannot write pointers to values."""
        return CallWriter(run.schedule.graph, lambda value: "", kernels=self.kernels, tables=self.tables)

    # -- actions

    def _calls(self, run: Pass, writer: CallWriter, action: Action) -> list[str]:
        """Return the C statements of an action of the schedule; none for a value that is merely received."""
        graph = run.schedule.graph
        if action.kind == "run":
            op = action.called_op(graph)
            return calls_of(writer, op) if action.encoding is None else self._from_bits(run, writer, action)
        if action.kind == "store":
            form = graph.form_by_encoded[action.encoding or 0]
            count = math.prod(graph.values[form.value].shape)
            if form.codec == INSIDE:
                bounds = bounds_of(graph.ops[form.direct_readers[0]])
                return [writer.call(writer.kernel("pack_inside"), Ref(form.encoded), Ref(form.value), *bounds, count)]
            kernel = writer.kernel("pack_bits")
            return [writer.call(kernel, Ref(form.encoded), Ref(form.value), form.codec == "positive", count)]
        if action.kind == "write":
            assert action.value is not None, "a write has a target"
            assert action.source is not None, "and a source"
            count = math.prod(graph.values[action.value].shape)
            to, source = writer.pointer_to(action.value), writer.pointer_to(action.source)
            return [f"for (int k = 0; k < {count}; k++)", f"{INDENT}({to})[k] = ({source})[k];"]
        if action.kind == "give":
            return self._update(run, writer, action)
        assert action.kind == "receive", f"{action.kind} is for larger machines"
        return []

    def _from_bits(self, run: Pass, writer: CallWriter, action: Action) -> list[str]:
        """Return the call of a backward op that reads signs saved as bits in place of its operand."""
        graph = run.schedule.graph
        op, form = action.called_op(graph), graph.form_by_encoded[action.encoding or 0]
        arguments = arguments_of(op.target, op.args, op.kwargs)
        slope = float(arguments.get("negative_slope", 0.0))  # factor where the bit is 0
        gradient = arguments["grad_output" if op.target == GRADIENT else BITS_READERS[op.target].same_layout_operand]
        output = first_output(op)
        count = math.prod(graph.values[output].shape)
        kernel = writer.kernel("scaled_by_bits")
        return [writer.call(kernel, Ref(output), gradient, Ref(form.encoded), slope, count)]

    def _update(self, run: Pass, writer: CallWriter, action: Action) -> list[str]:
        """Return the update of a parameter; none where it is fused into the gradient's kernel."""
        graph = run.schedule.graph
        assert action.value is not None, "what is given is the gradient of something"
        assert action.source is not None, "and is there"
        value = graph.values[action.value]
        if graph.base(action.source) in run.device.fused_gradients or value.path not in self.offset_of:
            return []
        update = self._update_of(run, value)
        kernel = self._update_all(writer, update)
        return [writer.call(kernel, update.arguments, Ref(action.source), math.prod(value.shape))]

    def _update_all(self, writer: CallWriter, update: UpdateCall) -> str:
        """Add the C function that updates a weight by each element of a gradient; return its name."""
        return writer.instance("update_all", f"{update.function}_all", update.macros)

    def _update_of(self, run: Pass, parameter: Value) -> UpdateCall:
        """Return the update of a parameter, or of a part of one."""
        function, path = self._update_function(parameter.path), parameter.path
        first_element = run.device.storage_offsets.get(parameter.id, 0)  # of a part, within the whole parameter
        # a gradient of zeros that is added up changes nothing
        of_zeros = not self.gradients_stay and self.layout.rules.zero_gradients_matter(path)
        if path not in self.int8:
            return replace(_update_call(function, self.offset_of[path] + first_element), zero_gradients_matter=of_zeros)
        return UpdateCall(
            function,
            parameters="STATE *s, signed char *w, const float *scale, int row, int at",
            update_element=f"{function}(s, w, scale[(at + (k)) / row], at + (k), g)",
            arguments=f"s, {self.weights[path]}, {self.scales[path]}, {self._row_elements(path)}, {first_element}",
            zero_gradients_matter=of_zeros,
        )

    def _row_elements(self, path: str) -> int:
        """Return the elements of a weight that have one scale: those of an index of its first dimension."""
        return math.prod(self.layout.memory.initial_values[path].shape[1:])

    def _update_function(self, path: str) -> str:
        """Add the C function that takes one element of a parameter's gradient; return its name."""
        if self.gradients_stay:
            return self._writer(self.layout.step).kernel("add_gradient")
        return self._rule_function(self.layout.rules.group_of[path], "_int8" if path in self.int8 else "")

    def _rule_function(self, group: int, suffix: str = "") -> str:
        """Add the C function that updates one element of a parameter of a group; return its name."""
        name, rule = f"update_{group}{suffix}", self.layout.rules.groups[group]
        writer = self._writer(self.layout.step)
        if self.layout.rules.gradients.clip_value is not None:
            writer.element_function("clip")
        return writer.instance(f"{rule.template}{suffix}", name, rule.defines)

    def _fused_updates(self, run: Pass) -> Mapping[int, UpdateCall]:
        """Return, by gradient, the update that its kernel applies to the weight element by element.

        Such fused gradients are never stored: the pass's `DeviceGraph` names them, by the values they are views of.
        """
        graph = run.schedule.graph
        return {
            graph.base(gradient): self._update_of(run, graph.values[parameter])
            for parameter, gradient in graph.gradients
            if graph.base(gradient) in run.device.fused_gradients
        }

    # -- pointers

    def _pointer(self, run: Pass, time: int, value: int) -> str:
        """Return C for a pointer to the first element of a value during action `time` of a pass."""
        graph, device = run.schedule.graph, run.device
        base = graph.values[graph.base(value)]
        offset = device.storage_offsets.get(value, 0)
        if value in device.constants:
            return self._constant(run, value)
        if base.kind in ("parameter", "buffer"):
            return _plus(self.weights[base.path], offset)
        if base.kind == "input":
            return _plus(run.inputs[base.id], offset)
        if base.id in device.constants:
            return _plus(self._constant(run, base.id), offset)
        start = run.placement.offsets[run.lifetimes.buffer_of[time][base.id]]
        assert not start % WORD, "buffers are whole words"
        pointer = f"s->arena + {start // WORD}" if start else "s->arena"  # an array of floats
        casts = {"bool": "(unsigned char *)", "uint8": "(unsigned char *)", "int8": "(signed char *)"}
        cast = casts.get(graph.values[value].dtype)
        return _plus(f"{cast}({pointer})" if cast else pointer, offset)

    def _constant(self, run: Pass, value: int) -> str:
        """Add an array with the elements of a constant; return its name."""
        array = run.device.constants[value]
        c_type = "signed char" if array.dtype == np.int8 else "int32_t" if array.dtype.kind in "iu" else "float"
        elements = "\n".join(lines_of(array.reshape(-1))).rstrip(",")
        text = f"static const {c_type} NAME[] = {{{elements}}};"
        return self.constants.setdefault(text, f"constant_{len(self.constants)}")

    # -- parts of the file

    def head(self) -> str:
        """Return the includes and definitions at the top of the file."""
        upper = self.name.upper()
        lines = [
            f"/* {self.name}: a training step, written by memplan. See {self.name}.h for what to call. */",
            f'#include "{self.name}.h"',
            *([] if self.layout.weights_file else [f'#include "{self.name}_weights.h"']),
            "#include <math.h>",
            "",
            "#if defined(__cplusplus) || defined(_MSC_VER)",
            "#define restrict __restrict",
            "#endif",
            f"#ifndef {upper}_HOOK",
            f"#define {upper}_HOOK() ((void)0)",
            "#endif",
            f"#define STATE {self.name}_state",
        ]
        if not self.layout.has_separate_arena:
            array_size = f"    [sizeof(((STATE *)0)->arena) == {upper}_ARENA_BYTES ? 1 : -1];"  # C99's static assertion
            lines += ["", f"typedef char {self.name}_arena_is_whole", array_size]
        return "\n".join(lines)

    def parts(self) -> list[str]:
        """Return kernels, tables and constants. They are complete once `step` and `infer` were called."""
        tables = [text.replace("NAME", name, 1) for text, name in self.tables.items()]
        constants = [text.replace("NAME", name, 1) for text, name in self.constants.items()]
        return [
            *(text.rstrip() for text in self.kernels.values()),
            *constants,
            *(["\n".join(tables)] if tables else []),
        ]

    def interface(self) -> str:
        """Return the C functions that initialize a device, seed it, and read and write its weights."""
        name, memory = self.name, self.layout.memory
        trained, statistics = memory.elements("trained"), memory.elements("statistics")
        trained_int8 = memory.elements("trained_int8")
        lines = [
            f"void {name}_init({name}_state *s{init_arguments(self.layout)})", "{",
            *(f"{INDENT}s->{parameter} = {parameter};" for _, parameter in init_parameters(self.layout)),
            *_loop(trained, f"s->weights[k] = ({self.flash['trained']})[k];"),
            *(line for member in self.layout.rules.arrays_in_state for line in _loop(trained, f"s->{member}[k] = 0;")),
            *_loop(trained_int8, f"s->int8[k] = ({self.flash['trained_int8']})[k];"),
            *_loop(-trained_int8 % WORD, f"s->int8[{trained_int8} + k] = 0;"),  # up to a whole word: `save` writes it
            *_loop(statistics, f"s->statistics[k] = ({self.flash['statistics']})[k];"),
            "    s->step = 0;", "    s->rate = 1;", *(["    s->calls = 0;"] if self.gradients_stay else []),
            *_loop(self.layout.rules.group_rate_count, "s->rates[k] = 1;"), f"    {name}_seed(s, 1);", "}", "",
            f"void {name}_seed({name}_state *s, uint32_t seed)", "{", "    s->random = seed ? seed : 1;", "}", "",
            f"void {name}_get_weights(const {name}_state *s, float *weights)", "{",
            *_loop(trained, "weights[k] = s->weights[k];"), *self._each_int8(trained, "read"),
            *_loop(statistics, f"weights[{trained + trained_int8} + k] = s->statistics[k];"), "}", "",
            f"void {name}_set_weights({name}_state *s, const float *weights)", "{",
            *_loop(trained, "s->weights[k] = weights[k];"), *self._each_int8(trained, "set"),
            *_loop(statistics, f"s->statistics[k] = weights[{trained + trained_int8} + k];"), "}",
        ]  # fmt: skip
        if trained_int8:
            lines = [template("int8_read"), template("int8_set"), *lines]
        return "\n".join(lines)

    def _each_int8(self, start: int, action: Literal["read", "set"]) -> list[str]:
        """Return the calls that read or set the real elements of each weight in eight bits: those in the caller's
        `weights` from element `start` on."""
        lines = list[str]()
        for tensor in self.layout.memory.trained_int8:
            row = tensor.size // tensor.shape[0]
            arguments = [_plus("weights", start + tensor.offset), self.weights[tensor.path], self.scales[tensor.path]]
            lines.append(f"{INDENT}int8_{action}({', '.join(arguments)}, {tensor.size}, {row});")
        return lines


def _update_call(function: str, first_element: int) -> UpdateCall:
    """Return the update of weights in floats from an element of the trained weights on."""
    return UpdateCall(
        function,
        parameters="STATE *s, int at",
        update_element=f"{function}(s, at + (k), g)",
        arguments=f"s, {first_element}",
    )


def _loop(count: int, line: str) -> list[str]:
    """Return the loop of a C statement over k; nothing for a count of 0."""
    return [f"    for (int k = 0; k < {count}; k++)", f"        {line}"] if count else []


def _plus(pointer: str, offset: int) -> str:
    return f"{pointer} + {offset}" if offset else pointer


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"{INDENT}{line}\n" for line in lines)


def _label(run: Pass, action: Action) -> str:
    """Return layer, source line and op of an action, for a comment."""
    graph = run.schedule.graph
    if action.kind == "give" and action.value is not None:
        return f"update {graph.values[action.value].path}"
    if action.kind == "store":
        return "keep as bits"
    if action.op is None:
        return action.kind
    op = action.called_op(graph)
    where = f" ({op.where})" if op.where else ""
    recomputed = ", again" if action.recomputed else ""
    return f"{op.layer or 'model'}{where}: {short(op.target)}{recomputed}"
