"""Write the files that accompany NAME.c: header, test, Makefile, README and list of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from memplan.exporting.c_text import c_name, comment
from memplan.exporting.kernels.call_writer import number
from memplan.exporting.kernels.templates import filled, template
from memplan.exporting.lowering.device_graph import WORD, rounded_to_words
from memplan.exporting.optimizer_rules import OPTIMIZER_KINDS
from memplan.exporting.source import saved_state
from memplan.exporting.source.arguments import arguments_of
from memplan.exporting.source.input_checks import STATUS
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.source.stored_weights import lines_of


@dataclass(frozen=True)
class Recorded:
    """Inputs and results of a run of PyTorch that the C test repeats."""

    inputs: Mapping[str, np.ndarray]
    """By C argument. Step k gets each flattened input rolled by ``roll_elements * k`` elements."""
    roll_elements: int
    losses: Sequence[float]
    """Of each step."""
    loss_bounds: Sequence[float]
    """Most that the C code's loss of each step may be off; the other bounds likewise."""
    step_output: np.ndarray
    """What the model returned in the last step."""
    step_output_bound: float
    evaluation_output: np.ndarray
    """What it returns in evaluation mode after the last step."""
    evaluation_output_bound: float
    evaluation_loss: float
    """The loss in evaluation mode after the last step; 0 if it cannot be computed."""
    evaluation_loss_bound: float
    weights: np.ndarray
    """Weights and statistics after the last step, as `get_weights` writes them."""
    weight_bounds: np.ndarray


def header_text(layout: StepLayout) -> str:
    """Return the text of NAME.h."""
    name, upper, memory, rules = layout.name, layout.name.upper(), layout.memory, layout.rules
    trained, statistics = memory.elements("trained"), memory.elements("statistics")
    trained_int8 = memory.elements("trained_int8")
    members = [
        *([f"    float weights[{trained}];    /* trained parameters, one after another */"] if trained else []),
        *(
            [f"    signed char int8[{rounded_to_words(trained_int8)}];    /* those in eight bits */"]
            if trained_int8
            else []
        ),
        *(f"    float {member}[{trained}];" for member in rules.arrays_in_state),
        *([f"    float statistics[{statistics}];    /* running means and variances */"] if statistics else []),
        *([f"    float correction[{rules.bias_correction_count}];"] if rules.bias_correction_count else []),
        "    float rate;    /* factor on the learning rates; 1 at first */",
        *(
            [f"    float rates[{rules.group_rate_count}];    /* the same for each parameter group */"]
            if rules.group_rate_count
            else []
        ),
        f"    uint32_t step, random{', calls' if rules.gradients.stay_until_update else ''};",
        *(["    const float *flash;    /* what init was given */"] if layout.weights_file else []),
        "    float *arena;    /* what init was given */"
        if layout.has_separate_arena
        else f"    float arena[{upper}_ARENA_BYTES / 4];",
    ]
    statuses = (*(status for status, _ in STATUS), *saved_state.STATUS)
    lines = [
        f"/* {name}: a training step in {layout.state_bytes + layout.arena_bytes} bytes of RAM, written by memplan. */",
        f"#ifndef {upper}_H", f"#define {upper}_H", "", "#include <stddef.h>", "#include <stdint.h>", "",
        f"#define {upper}_ARENA_BYTES {layout.arena_bytes}",
        f"#define {upper}_WEIGHTS {trained + trained_int8 + statistics}    /* floats that get_weights writes */",
        *saved_state.macros(layout), *_output_lines(layout), *_argument_lines(layout), *_input_lines(layout), "",
        "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
        f"#ifdef {upper}_HOOK",
        f"void {upper}_HOOK(void);    /* a function of yours: {name}.c calls it between its kernels */",
        "#endif", "",
        "/* All that changes. The caller gives it memory; a program may have several. */",
        "typedef struct {", *members, f"}} {name}_state;", "",
        *_init_declaration(layout),
        f"void {name}_seed({name}_state *s, uint32_t seed);",
        f"/* {name}_check looks through the data: a pointer may be null. Where it finds something, {name}_infer",
        "   returns what was found, the others NAN, and nothing has changed. Where the loss is not finite, a step",
        "   returns it and updates no weight. */",
        f"enum {{ {', '.join(f'{upper}_{status} = {k}' for k, status in enumerate(statuses, 1))} }};",
        f"int {name}_check({layout.step.parameters});    /* 0 if all is well */",
        f"float {name}_step({name}_state *s, {layout.step.parameters});    /* returns the loss */",
        "/* The same; also writes what the model returned in this step, where output is no null pointer. */",
        f"float {name}_step_to({name}_state *s, {layout.step.parameters}, float *output);",
        *_update_declaration(layout),
        "/* What the model returns in evaluation mode. */",
        f"int {name}_infer({name}_state *s, {layout.infer.model_parameters}, float *output);",
        *_evaluate_declaration(layout),
        f"void {name}_get_weights(const {name}_state *s, float *weights);",
        f"void {name}_set_weights({name}_state *s, const float *weights);",
        *saved_state.declarations(layout), "",
        "#ifdef __cplusplus", "}", "#endif", "", "#endif",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _init_declaration(layout: StepLayout) -> list[str]:
    """Return the declaration of `init`."""
    name, upper, lines = layout.name, layout.name.upper(), list[str]()
    if layout.weights_file:
        lines = [
            f"#define {upper}_FLASH_BYTES {layout.memory.flash_bytes}    /* of {name}.bin */",
            f"/* `flash`: the contents of {name}.bin, aligned as floats are, which have to stay where they are. */",
        ]
    if layout.has_separate_arena:
        lines.append(f"/* `arena`: {upper}_ARENA_BYTES bytes; between calls they hold nothing. */")
    return [*lines, f"void {name}_init({name}_state *s{init_arguments(layout)});"]


def init_arguments(layout: StepLayout) -> str:
    """Return the C declarations of the arguments of `init` behind the state, each after a comma."""
    return "".join(f", {kind}{name}" for kind, name in init_parameters(layout))


def init_parameters(layout: StepLayout) -> list[tuple[str, str]]:
    """Return types and names of the arguments of `init` behind the state."""
    flash = [("const float *", "flash")] if layout.weights_file else []
    return [*flash, ("float *", "arena")] if layout.has_separate_arena else flash


def _output_lines(layout: StepLayout) -> list[str]:
    """Return the macros that say where each tensor of the model's output begins."""
    upper, modes = layout.name.upper(), {"OUTPUT": layout.outputs}
    if layout.step_outputs != layout.outputs:
        modes["STEP_OUTPUT"] = layout.step_outputs
    lines = list[str]()
    for prefix, tensors in modes.items():
        function = "step_to" if prefix == "STEP_OUTPUT" else "infer"
        size = sum(tensor.size for tensor in tensors)
        lines.append(f"#define {upper}_{prefix}S {size}    /* floats that {function} writes */")
        for position, tensor in enumerate(tensors if len(tensors) > 1 else ()):
            name = f"{upper}_{prefix}_{position}_{c_name(tensor.path).upper()}"
            about = comment(f"{'x'.join(map(str, tensor.shape)) or 'a number'}: {tensor.path}")
            lines.append(f"#define {name} {tensor.offset}    {about}")
    return lines


def _argument_lines(layout: StepLayout) -> list[str]:
    """Return the macros with the number of elements of each input and target."""
    lines = [
        f"#define {argument.macro} {argument.elements}    "
        f"/* {argument.c_type} {argument.name}: {argument.sizes}{argument.meaning and f', {argument.meaning}'} */"
        for argument in arguments_of(layout)
    ]
    return ["/* Elements lie row by row, as those of a contiguous tensor. */", *lines]


def _input_lines(layout: StepLayout) -> list[str]:
    """Return the macro for the address of the input that lies in the arena, if one does."""
    if layout.step.arena_input is None:
        return []
    value, offset, size = layout.step.arena_input
    name, upper = layout.step.inputs[value], layout.name.upper()
    pointer, c_type = f"(s)->arena + {offset // WORD}", layout.step.c_type(value)
    if c_type != "float":
        pointer = f"({c_type} *)({pointer})"
    return [
        f"/* Write {name} here before each call, which overwrites it, and pass this pointer. If {name} lies elsewhere,",
        f"   the call copies it here first, and its {size} bytes there are RAM besides. */",
        f"#define {upper}_{name.upper()}(s) ({pointer})",
    ]


def _evaluate_declaration(layout: StepLayout) -> list[str]:
    """Return the declaration of `evaluate`, where the loss can be computed in evaluation mode."""
    if not layout.has_evaluation_loss:
        return []
    name = layout.name
    return [
        "/* Returns the loss in evaluation mode, and changes nothing; output may be a null pointer. */",
        f"float {name}_evaluate({name}_state *s, {layout.infer.parameters}, float *output);",
    ]


def _update_declaration(layout: StepLayout) -> list[str]:
    """Return the declaration of `update`, where gradients are kept until then."""
    name, gradients = layout.name, layout.rules.gradients
    if not gradients.stay_until_update:
        return []
    when = "after each call" if gradients.accumulate == 1 else f"after every {gradients.accumulate} calls"
    return [
        f"/* {name}_step adds its gradients to s->gradients, and {when} calls {name}_update, which updates",
        "   the weights by them and sets them to zero. Call it yourself for the last gradients of an epoch. */",
        f"void {name}_update({name}_state *s);",
    ]


def repeating_text(layout: StepLayout, recorded: Recorded) -> str:
    """Return the text of test_NAME.c, which repeats the recorded steps and compares the results with PyTorch's."""
    arrays, rolls = list[str](), list[str]()
    for value, argument in layout.step.inputs.items():
        c_type = layout.step.c_type(value)
        elements = recorded.inputs[argument].reshape(-1)
        in_arena = layout.arena_input is not None and layout.arena_input[0] == argument
        arrays += [
            f"static const {c_type} given_{argument}[{elements.size}] = {{", *lines_of(elements), "};",
            f"static {c_type} *{argument};" if in_arena else f"static {c_type} {argument}[{elements.size}];",
        ]  # fmt: skip
        rolls += [f"{argument} = {layout.name.upper()}_{argument.upper()}(&memory.state);"] if in_arena else []
        rolls += [
            f"for (int i = 0; i < {elements.size}; i++)",
            f"    {argument}[i] = given_{argument}[(i + {recorded.roll_elements} * k) % {elements.size}];",
        ]
    replacements = {
        "NAME": layout.name,
        "UPPER": layout.name.upper(),
        "STEPS": str(len(recorded.losses)),
        "ARRAYS": "\n".join(arrays),
        "ROLLS": "\n    ".join(rolls),
        "ARGUMENTS": ", ".join(layout.step.inputs.values()),
        "GIVEN": "".join(f", {'memory.arena' if name == 'arena' else name}" for _, name in init_parameters(layout)),
        "ARENA": f"float arena[{layout.name.upper()}_ARENA_BYTES / 4];\n    unsigned char end[64];"
        if layout.has_separate_arena
        else "unsigned char end[64];",
        "INFER": ", ".join(layout.infer.model_inputs),
        "EVALUATE": f"{layout.name}_evaluate(&memory.state, {', '.join(layout.infer.inputs.values())}, 0)"
        if layout.has_evaluation_loss
        else "0",
        "EVALUATED": number(recorded.evaluation_loss),
        "EVALUATED_BOUND": number(recorded.evaluation_loss_bound),
        "MADE": str(recorded.step_output.size),
        "STEP_OUTPUT": ", ".join(map(number, recorded.step_output.reshape(-1)[:4])),
        "STEP_OUTPUT_BOUND": number(recorded.step_output_bound),
        "STEP_CHECKED": str(min(4, recorded.step_output.size)),
        "LOSSES": ", ".join(map(number, recorded.losses)),
        "LOSS_BOUNDS": ", ".join(map(number, recorded.loss_bounds)),
        "OUTPUT": ", ".join(map(number, recorded.evaluation_output.reshape(-1)[:4])),
        "OUTPUT_BOUND": number(recorded.evaluation_output_bound),
        "CHECKED": str(min(4, recorded.evaluation_output.size)),
        "SAMPLES": _samples(recorded),
        **_weights_file_code(layout),
        **_steps_file_code(layout, len(recorded.losses)),
    }
    return filled("test_program", replacements)


def _weights_file_code(layout: StepLayout) -> dict[str, str]:
    """Return the C code with which the test reads a weights file and passes it to `init`; empty without such a file."""
    if not layout.weights_file:
        return {"READ_FLASH": "", "IF_UNREAD": ""}
    return {
        "READ_FLASH": filled("test_flash", {"NAME": layout.name, "UPPER": layout.name.upper()}),
        "IF_UNREAD": template("test_flash_call"),
    }


def _steps_file_code(layout: StepLayout, steps: int) -> dict[str, str]:
    """Return the C code with which the test writes the weights after each step; empty unless some have eight bits."""
    if not layout.memory.trained_int8:
        return {"OPEN_STEPS": "", "WRITE_STEP": ""}
    written = filled("test_steps_written", {"NAME": layout.name, "STEPS": str(steps)})
    return {"OPEN_STEPS": template("test_steps"), "WRITE_STEP": written}


def _samples(recorded: Recorded) -> str:
    """Return C for 32 evenly spaced weights: index, value and error bound of each."""
    last = max(recorded.weights.size - 1, 0)
    indices = sorted({k * last // 31 for k in range(32)})
    return ",\n    ".join(
        f"{{{k}, {number(recorded.weights[k])}, {number(recorded.weight_bounds[k])}}}" for k in indices
    )


def makefile_text() -> str:
    """Return the text of the Makefile, which is the same for all exports of a folder."""
    return template("Makefile.txt")


def tensors_text(layout: StepLayout) -> str:
    """Return the text of NAME.json, which lists the tensors that `get_weights` writes, and what `save` writes."""
    rules, memory = layout.rules, layout.memory
    scales = {tensor.path: memory.quantized[tensor.path].scales.tolist() for tensor in memory.trained_int8}
    tensors = [
        {"name": tensor.path, "shape": list(tensor.shape)}
        | ({"group": rules.group_of[tensor.path]} if tensor.path in rules.group_of else {})
        | ({"scales": scales[tensor.path]} if tensor.path in scales else {})
        for tensor in memory.weights
    ]
    contents = {
        "export": layout.name,
        "tensors": tensors,
        "layout": saved_state.layout_number(layout),
        "optimizer": OPTIMIZER_KINDS[cast("type", rules.kind)],
        "rates": [float(options["lr"]) for options in rules.options],
        "state": [{"name": name, "count": count} for name, count in layout.saved_members],
    }
    return json.dumps(contents, indent=1) + "\n"
