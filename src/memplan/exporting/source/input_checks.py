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
    graph, lines, unchecked = layout.step.device.graph, list[str](), list[str]()
    (not_a_number, _), (bad_index, _) = STATUS
    for value, name in layout.step.inputs.items():
        dtype, condition, status = graph.values[value].dtype, "", ""
        if dtype == "float32":
            condition, status = f"{name}[k] != {name}[k]", not_a_number  # C for isnan
        elif dtype == "int32":
            outside = [
                f"(({name}[k] < 0 || {name}[k] >= {count}){'' if ignored is None else f' && {name}[k] != {ignored}'})"
                for count, ignored in index_ranges(graph, value)
            ]
            condition, status = " || ".join(outside), bad_index
        if not condition:
            unchecked.append(f"    (void){name};")  # or compilers warn of it
            continue
        lines += [
            f"    for (int k = 0; {name} && k < {math.prod(graph.values[value].shape)}; k++)",
            f"        if ({condition})",
            f"            return {layout.name.upper()}_{status};",
        ]
    head = f"int {layout.name}_check({layout.step.parameters})"
    return "\n".join([head, "{", *unchecked, *lines, "    return 0;", "}"])


def check_of(layout: StepLayout, run: Pass) -> str:
    """Return the C call that checks the inputs of a pass; the step's other inputs are null pointers in it."""
    names = set(run.inputs.values())
    arguments = (name if name in names else "0" for name in layout.step.inputs.values())
    return f"{layout.name}_check({', '.join(arguments)})"


def index_ranges(graph: JointGraph, value: int) -> list[tuple[int, int | None]]:
    """Return (number of classes or rows, index that an op leaves out or None) of the ops that index by an input."""
    return list(dict.fromkeys(_ranges(graph, value)))


def _ranges(graph: JointGraph, value: int) -> Iterator[tuple[int, int | None]]:
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
    arguments = arguments_of(op.target, op.args, op.kwargs)
    if short(op.target) in ("nll_loss_forward", "nll_loss2d_forward"):
        shape = graph.values[arguments["self"].value].shape  # (classes,) or (N, classes, ...)
        return arguments["target"], shape[1 if len(shape) > 1 else 0], arguments["ignore_index"]
    if short(op.target) == "embedding":
        return arguments["indices"], graph.values[arguments["weight"].value].shape[0], None
    if short(op.target) == "gather":
        return arguments["index"], graph.values[arguments["self"].value].shape[arguments["dim"]], None
    return None, 0, None
