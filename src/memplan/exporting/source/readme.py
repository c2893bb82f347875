"""Write NAME.md: what a firmware needs to call an export, without another page."""

from __future__ import annotations

from memplan.exporting.kernels.templates import filled
from memplan.exporting.source.arguments import Argument, arguments_of
from memplan.exporting.source.companion_files import init_parameters
from memplan.exporting.source.step_layout import StepLayout


def readme_text(layout: StepLayout, verified: str) -> str:
    """Return the text of NAME.md, with the verdict of verification. Its example is a whole program."""
    name, arguments = layout.name, arguments_of(layout)
    init_arguments = [
        "&state", *(f"{name}_bin" if parameter == "flash" else parameter for _, parameter in init_parameters(layout))
    ]  # fmt: skip
    names = ", ".join(argument.name for argument in arguments)
    replacements = {
        "VERIFIED": verified,
        "NAME": name,
        "UPPER": name.upper(),
        "FILES": f"`{name}.c` and `{name}.h`" if layout.weights_file else f"`{name}.c`, `{name}.h`, `{name}_weights.h`",
        "ROWS": "\n".join(map(_row, arguments)),
        "IN_ARENA": "".join(_in_arena(layout, argument) for argument in arguments if argument.in_arena),
        "DECLARED": "\n".join(_declarations(layout, arguments)),
        "POINTERS": "".join(
            f"    {argument.c_type} *{argument.name} = {name.upper()}_{argument.name.upper()}(&state);\n"
            for argument in arguments if argument.in_arena
        ),
        "GIVEN": ", ".join(init_arguments),
        "FROM": f"the {layout.memory.flash_bytes} bytes of {name}.bin" if layout.weights_file else "flash",
        "FILLED": " and ".join(argument.name for argument in arguments),
        "ARGUMENTS": names,
        "INFER": ", ".join(layout.infer.model_inputs),
        "NULLS": ", ".join(
            argument.name if argument.name in layout.infer.model_inputs else "0" for argument in arguments
        ),
        "EVALUATE": f"- `{name}_evaluate(&state, {names}, output)`: the loss in evaluation mode, without training.\n"
        if layout.has_evaluation_loss
        else "",
        "UPDATE": f"- `{name}_update(&state)`: updates the weights by the gradients of the last, too few calls.\n"
        if layout.rules.gradients.stay_until_update
        else "",
    }  # fmt: skip
    return filled("README.txt", replacements)


def _row(argument: Argument) -> str:
    """Return the row of an argument in the table."""
    cells = (f"`{argument.name}`", f"`const {argument.c_type} *`", argument.sizes, argument.macro, argument.meaning)
    return f"| {' | '.join(cells)} |"


def _in_arena(layout: StepLayout, argument: Argument) -> str:
    """Return the paragraph on the input that lies in the arena."""
    size = argument.elements * (4 if argument.c_type == "float" else 1)
    address = f"{layout.name.upper()}_{argument.name.upper()}(&state)"
    return (
        f"\n`{argument.name}` lies in the arena, at `{address}`. Write a sample there before each call, since\n"
        f"the call overwrites it, and pass that pointer. A pointer to elsewhere works, too: then the call copies the\n"
        f"sample, and its {size} bytes there are RAM besides.\n"
    )


def _declarations(layout: StepLayout, arguments: list[Argument]) -> list[str]:
    """Return the static variables of the example."""
    upper, name = layout.name.upper(), layout.name
    arena = "" if layout.has_separate_arena else f", and an arena of {layout.arena_bytes}"
    lines = [f"static {name}_state state;    /* {layout.state_bytes} bytes of weights and statistics{arena} */"]
    if layout.has_separate_arena:
        lines.append(f"static float arena[{upper}_ARENA_BYTES / 4];    /* in any bank of memory */")
    if layout.weights_file:
        lines.append(f"extern const float {name}_bin[];    /* the contents of {name}.bin, in flash */")
    lines += [f"static {a.c_type} {a.name}[{a.macro}];" for a in arguments if not a.in_arena]
    return [*lines, f"static float output[{upper}_OUTPUTS];"]
