"""Write NAME_check, which looks for data that no step can be trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from memplan.exporting.source.step_layout import Pass, StepLayout
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref
from memplan.planning.graph.op_schema import arguments_of, short

STATUS = (("NOT_A_NUMBER", "an input has an element that is not a number"), ("BAD_INDEX", "a class or row is none"))
"""What NAME_check returns, from 1 on; 0: nothing was found."""


def check_text(layout: StepLayout) -> str:
    """Return the C function NAME_check, with the arguments of NAME_step. A null pointer is not checked."""
    graph, upper, lines = layout.step.device.graph, layout.name.upper(), list[str]()
    for value, name in layout.step.inputs.items():
        dtype = graph.values[value].dtype
        condition = f"{name}[k] != {name}[k]" if dtype == "float32" else ""
        if dtype == "int32":
            outside = [
                f"(({name}[k] < 0 || {name}[k] >= {count}){'' if ignored is None else f' && {name}[k] != {ignored}'})"
                for count, ignored in index_ranges(graph, value)
            ]
            condition = " || ".join(outside)
        if condition:
            status = STATUS[dtype == "int32"][0]
            lines += [
                f"    for (int k = 0; {name} && k < {math.prod(graph.values[value].shape)}; k++)",
                f"        if ({condition})",
                f"            return {upper}_{status};",
            ]
    unused = [f"    (void){name};" for name in layout.step.inputs.values() if f"; {name} &&" not in "".join(lines)]
    return "\n".join([f"int {layout.name}_check({layout.step.parameters})", "{", *unused, *lines, "    return 0;", "}"])


def check_of(layout: StepLayout, run: Pass) -> str:
    """Return the C call that checks the inputs of a pass; the step's other inputs are null pointers in it."""
    names = set(run.inputs.values())
    arguments = (name if name in names else "0" for name in layout.step.inputs.values())
    return f"{layout.name}_check({', '.join(arguments)})"


def index_ranges(graph: JointGraph, value: int) -> list[tuple[int, int | None]]:
    """Return (number of classes or rows, index that an op leaves out or None) of the ops that index by an input."""
    return list(dict.fromkeys(_bounds(graph, value)))


def _bounds(graph: JointGraph, value: int) -> Iterator[tuple[int, int | None]]:
    """Yield (number of classes or rows, index that an op leaves out or None) of each op that indexes by this input."""
    for op in graph.ops:
        index, count, ignored = _indexing(graph, op)
        if isinstance(index, Ref) and graph.base(index.value) == value:
            yield count, ignored


def _indexing(graph: JointGraph, op: GraphOp) -> tuple[object, int, int | None]:
    """Return the argument of an op that holds indices, the end of their range, and the index that the op leaves out.

    (None, 0, None) for an op without indices; the index is None if the op leaves none out.
    """
    if not op.target.startswith("aten."):
        return None, 0, None
    named = arguments_of(op.target, op.args, op.kwargs)
    if short(op.target) in ("nll_loss_forward", "nll_loss2d_forward"):
        shape = graph.values[named["self"].value].shape
        return named["target"], shape[1 if len(shape) > 1 else 0], named["ignore_index"]
    if short(op.target) == "embedding":
        return named["indices"], graph.values[named["weight"].value].shape[0], None
    if short(op.target) == "gather":
        return named["index"], graph.values[named["self"].value].shape[named["dim"]], None
    return None, 0, None
