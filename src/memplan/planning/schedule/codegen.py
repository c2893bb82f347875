"""Write a schedule as runnable Python, for the engine to execute and for people to read.

``forward(inputs)`` takes all resident values, and returns (outputs, saved). ``backward(inputs, saved, tangents)`` is a
generator of lists of (value, gradient), each yielded as soon as its gradients are complete; the caller has to empty
each list. The functions empty the lists they are called with: every value is in a single variable, which is deleted
after the last use, so that its memory is freed there."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.errors import RecordingError
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref, SavedForm
from memplan.planning.levers import in_place, registry
from memplan.planning.levers.lever import Called
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.argument_text import argument_text
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.schedule.segment_text import SEGMENT_IMPORTS, segment_definitions

WIDTH = 120
_RESERVED = frozenset((
    "_", "aten", "backward", "device", "forward", "given", "inf", "inputs", "laid_out", "mark", "memplan", "nan",
    "outputs", "saved", "tangents", "torch", "transfers",
))  # fmt: skip
"""Names that a program uses for itself."""
_SIGN_CHANGING_VIEWS = frozenset({"aten._conj.default", "aten._neg_view.default"})
"""Views whose elements have another sign than the memory they read."""


def program(schedule: Schedule, *, marked: bool = False, defines_segments: bool = False) -> str:
    """Write the text of a module with ``forward`` and ``backward``.

    Args:
        schedule: to write.
        defines_segments: whether the text defines the segments that run piece by piece, so that it runs where the
            captured step does not exist, such as in another process.
        marked: whether the program calls ``mark(position)`` before each action, counted through both passes, and
            ``value = laid_out(value, strides, dtype)`` for each value that it makes. A compiler finds its place so.

    Raises:
        RecordingError: an op takes an argument that cannot be written down.
    """
    writer = _Writer(schedule, marked=marked)
    forward = ["def forward(inputs):", *writer.forward()]
    size = format_bytes(sum(schedule.graph.values[value].bytes for value in schedule.saved))
    again = sum(action.recomputed for action in schedule.backward)
    summary = f"saved for it: {size} in {len(schedule.saved)} values; ops run again: {again}"
    backward = ["def backward(inputs, saved, tangents):", f'    """{summary}."""', *writer.backward()]
    imports = ["import torch", "from torch import device, inf, nan"]
    if any("torch.ops.memplan." in line for line in forward + backward):
        imports.append("import memplan.planning.ops.piecewise")
    if any(f"torch.ops.{target}(" in line for line in forward + backward for target in op_schema.KERNELS):
        imports.append("import memplan.kernels")
    levers = dict.fromkeys(
        schedule.graph.form_by_encoded[a.encoding].lever for a in schedule.forward if a.encoding is not None
    )
    imports += [line for name in levers for line in registry.find(name).imports]
    head = [*imports, "", "aten = torch.ops.aten"]
    if defines_segments and (segments := segment_definitions(schedule.graph)):
        head = [*imports, *SEGMENT_IMPORTS, "", "aten = torch.ops.aten", "", *segments]
    return "\n".join((*head, "", "", *forward, "", "", *backward, ""))


def read_in_backward(schedule: Schedule) -> frozenset[int]:
    """Return the resident values that the backward pass reads. Its caller may pass anything for the others."""
    values = schedule.graph.values
    bases = {values[value].base for action in schedule.backward for value in action.reads}
    return frozenset(base for base in bases if values[base].kind in RESIDENT)


def returned_gradients(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the values whose gradients the program's ``backward`` yields, for each list of them."""
    groups = (group for is_give, group in _group_gradient_returns(schedule) if is_give)
    return tuple(tuple(_value_of(action) for action in group) for group in groups)


def _group_gradient_returns(schedule: Schedule) -> Iterable[tuple[bool, list[Action]]]:
    """Split the backward pass into actions that return gradients (True), each a ``yield``, and others."""
    for is_give, group in groupby(schedule.backward, lambda action: action.kind == "give"):
        yield is_give, list(group)


def _value_of(action: Action) -> int:
    """Return the value of an action that has a value."""
    assert action.value is not None
    return action.value


class _Writer:
    """Writes the actions as lines of Python."""

    def __init__(self, schedule: Schedule, *, marked: bool = False) -> None:
        """``marked``: whether to write calls of ``mark`` before actions and ``laid_out`` after ops: see `program`."""
        self.schedule, self.graph, self.marked = schedule, schedule.graph, marked
        self.position = 0
        """Number of the next action, counted through both passes, as `mark` gets it."""
        self.variables = _variable_names(self.graph)
        """By value: the name of its variable."""
        self.last_reader = {value: action for action in schedule.backward for value in action.reads}
        """By value: the last action of the backward pass that reads it."""
        self.lines: list[str] = []
        """Lines of the function that is being written."""

    # -- the two functions

    def forward(self) -> list[str]:
        """Return the lines of the forward pass."""
        self.lines = []
        actions = self.schedule.forward
        used = {self.graph.base(value) for action in actions for value in action.reads}
        used |= {_value_of(action) for action in actions if action.kind == "write"}
        used |= {self.graph.base(value) for value in self.graph.outputs}
        self.section("what is handed in")
        self.unpack([v.id for v in self.graph.values if v.kind in RESIDENT], "inputs", used)
        self.section("forward")
        for action in actions:
            self.write_action(action)
        self.section("outputs, and what is saved for the backward pass")
        outputs = [self.expression(v) for v in self.graph.outputs]
        saved = [self.variables[v] for v in self.schedule.saved]
        self.write_list("outputs = [", outputs, "]")
        self.write_list("saved = [", saved, "]")
        self.write("return outputs, saved")
        return self.lines

    def backward(self) -> list[str]:
        """Return the lines of the backward pass."""
        self.lines = []
        values = self.graph.values
        self.section("what is handed in, what was saved, and the gradients of the outputs")
        self.unpack([v.id for v in values if v.kind in RESIDENT], "inputs", read_in_backward(self.schedule))
        self.unpack(self.schedule.saved, "saved", set(self.schedule.saved))
        tangents = [v.id for v in values if v.kind == "tangent"]
        self.unpack(tangents, "tangents", set(tangents))
        self.section("backward")
        for is_give, actions in _group_gradient_returns(self.schedule):
            if is_give:
                self.write_gradients(actions)
            else:
                for action in actions:
                    self.write_action(action)
        return self.lines

    def unpack(self, values: Sequence[int], source: str, used: Iterable[int]) -> None:
        """Write the line that unpacks the list ``source`` into the variables of ``values``, and empties it.

        Values that are not in ``used`` go to the variable ``_``, which is cleared so that it keeps no tensor alive.
        """
        unpacked = set(used).intersection(values)
        if unpacked:
            self.write_list("[", [self.variables[v] if v in unpacked else "_" for v in values], f"] = {source}")
        if len(unpacked) < len(set(values)):
            self.write("_ = None")
        self.write(f"{source}.clear()")

    # -- actions

    def write_action(self, action: Action) -> None:
        """Write a single action and the deletion of the values it frees."""
        self.write_mark(actions=1)
        if action.kind == "run":
            self.write_op(action)
        elif action.kind == "write":
            assert action.source is not None
            target = self.graph.values[_value_of(action)]
            self.write(f"{self.variables[target.id]}.copy_({self.expression(action.source)})", f"writes {target.path}")
        elif action.encoding is not None:
            self.write_form_action(action, self.graph.form_by_encoded[action.encoding])
        self.write_delete(action.frees if action.overwritten is None else (action.overwritten, *action.frees))

    def write_op(self, action: Action) -> None:
        """Write the call of an op, its results assigned to variables."""
        op = action.called_op(self.graph)
        names = [self.variables[v] if v is not None and v in action.makes else "_" for v in op.outputs]
        targets = ", ".join(names) + ("," if op.returns_tuple and len(names) == 1 else "")  # "x," unpacks a tuple
        self.write_call(targets, self.call_of(op, action), self.comment_for(op, action), op)
        if "_" in names:  # so that the variable keeps no tensor alive
            self.write("_ = None")
        self.write_layouts(action.makes)

    def call_of(self, op: GraphOp, action: Action) -> Called:
        """Return the call that the engine runs: of the op itself, of the op that reads an encoding, or of the in-place
        form."""
        if action.encoding is not None:
            form = self.graph.form_by_encoded[action.encoding]
            return registry.find(form.lever).read_directly(
                self.graph, form, op, in_place=action.overwritten is not None
            )
        if action.overwritten is None:
            return op.target, op.args, op.kwargs
        operand = in_place.overwritten_operand(op, action.overwritten, self.graph.values)
        in_place_form = in_place.call_into(op.target, operand.name)
        if in_place_form.out is None:  # the variant with an underscore
            return in_place_form.target, op.args, op.kwargs
        return in_place_form.target, op.args, {**op.kwargs, in_place_form.out: Ref(operand.value)}

    def write_form_action(self, action: Action, form: SavedForm) -> None:
        """Write how a value is encoded or decoded; for copies to and from host memory, their beginning or the wait."""
        if action.kind in ("stored", "fetched"):
            self.write(f"{_copy_handle(self.variables[form.encoded])}.wait()")
            self.write(f"del {_copy_handle(self.variables[form.encoded])}")
            return
        lever, stores = registry.find(form.lever), action.kind == "store"
        called = lever.store(self.graph, form) if stores else lever.fetch(self.graph, form)
        comment = " ".join(filter(None, (lever.comments[0 if stores else 1], form.codec)))
        target_value = self.graph.values[form.encoded if stores else form.value]
        if form.is_copied:
            target, args, kwargs = called
            size = format_bytes(self.graph.values[form.value].bytes)
            targets = f"{self.variables[target_value.id]}, {_copy_handle(self.variables[form.encoded])}"
            self.write(f"{targets} = {target}({', '.join(self.arguments(args, kwargs, op=None))})", f"{comment} {size}")
        else:
            self.write_call(self.variables[target_value.id], called, f"{comment}, {format_bytes(target_value.bytes)}")
            self.write_layouts([target_value.id])

    def write_call(self, targets: str, called: Called, note: str, op: GraphOp | None = None) -> None:
        """Write ``targets = call`` with a comment. ``op``: the op of the call, for error messages."""
        target, args, kwargs = called
        self.write_list(f"{targets} = {_op_expression(target, op)}(", self.arguments(args, kwargs, op), ")", note)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any], op: GraphOp | None) -> list[str]:
        """Return the arguments of a call as texts, keyword arguments as ``name=value``. ``op``: for error messages."""
        named = [f"{_identifier(name, op)}={self.argument(part, op)}" for name, part in kwargs.items()]
        return [self.argument(part, op) for part in args] + named

    def write_mark(self, actions: int) -> None:
        """Write the call of ``mark`` with the number of the next action, if ``marked``; count ``actions`` on."""
        if self.marked:
            self.write(f"mark({self.position})")
        self.position += actions

    def write_layouts(self, values: Iterable[int]) -> None:
        """Write the calls of ``laid_out`` with the strides and dtype of these values, if ``marked``."""
        for value in values if self.marked else ():
            name, tensor = self.variables[value], self.graph.values[value]
            self.write(f"{name} = laid_out({name}, {tensor.stride}, torch.{tensor.dtype})")

    def write_gradients(self, actions: Sequence[Action]) -> None:
        """Write the ``yield`` of the gradients that these actions return together, and delete the variables of values
        that nothing reads afterwards."""
        self.write_mark(len(actions))
        pairs, deleted = list[str](), dict[int, None]()
        for action in actions:
            assert action.source is not None
            copied = ".clone()" if action.returns_copy else ""
            pairs.append(f"({_value_of(action)}, {self.expression(action.source)}{copied})")
            deleted.update(dict.fromkeys(action.frees))
            base = self.graph.base(action.source)
            if self.graph.values[base].kind == "result" and self.last_reader[base] in actions:
                deleted[base] = None  # then the receiver has the only reference to the gradient
        paths = ", ".join(self.graph.values[_value_of(action)].path for action in actions)
        self.write_list("given = [", pairs, "]", f"gradient of {paths}")
        self.write_delete(deleted)
        self.write("yield given")

    # -- text

    def expression(self, value: int) -> str:
        """Return the expression of a value: its variable if it owns memory, else the call that makes the view."""
        value = self.same_tensor_with_fewest_calls(value)
        tensor = self.graph.values[value]
        if not tensor.is_view:
            return self.variables[value]
        assert tensor.op is not None, "a view is made by an op"
        op = self.graph.ops[tensor.op]
        call = f"{_op_expression(op.target, op)}({', '.join(self.arguments(op.args, op.kwargs, op))})"
        return f"{call}[{op.outputs.index(value)}]" if op.returns_tuple else call

    def same_tensor_with_fewest_calls(self, value: int) -> int:
        """Return the value that needs the fewest calls to write of those that are the same tensor as ``value``: a
        matrix transposed twice is the matrix itself.

        Values are the same if one is a view of the other, with the same shape, strides and dtype, of all of its memory.
        """
        values = self.graph.values
        tensor = source = values[value]
        has_all_elements = math.prod(tensor.shape) * op_schema.itemsize(tensor.dtype) == values[tensor.base].bytes
        if not has_all_elements or not op_schema.is_dense(tensor):
            return value
        while source.op is not None and source.is_view:
            op = self.graph.ops[source.op]
            if op.target in _SIGN_CHANGING_VIEWS or not op.args or not isinstance(op.args[0], Ref):
                break
            source = values[op.args[0].value]
            if (source.shape, source.stride, source.dtype) == (tensor.shape, tensor.stride, tensor.dtype):
                value = source.id
        return value

    def argument(self, part: Any, op: GraphOp | None) -> str:
        """Return an argument as text. ``op``: the op that takes it, for error messages. Raises RecordingError if the
        argument is neither a value nor plain data."""
        return argument_text(part, self.expression, op)

    def comment_for(self, op: GraphOp, action: Action) -> str:
        """Return the comment of an op: its layer, source line and bytes."""
        allocated = (
            0 if action.overwritten is not None else sum(self.graph.values[value].bytes for value in action.makes)
        )
        parts = [op.layer, op.where or "", format_bytes(allocated) if allocated else ""]
        if action.overwritten is not None:
            parts.append(f"in the memory of {self.variables[action.overwritten]}")
        return ("again: " if action.recomputed else "") + ", ".join(part for part in parts if part)

    def section(self, title: str) -> None:
        """Write a headline, after an empty line unless it is the first line."""
        if self.lines:
            self.lines.append("")
        self.lines.append(f"    # -- {title}")

    def write(self, text: str, note: str = "") -> None:
        """Write a line with a comment, which gets a line of its own if both together are too long."""
        note = printable(note)
        if note and len(f"    {text}  # {note}") > WIDTH:
            self.lines.append(f"    # {note}")
            note = ""
        self.lines.append(f"    {text}" + (f"  # {note}" if note else ""))

    def write_list(self, before: str, parts: Sequence[str], after: str, note: str = "") -> None:
        """Write a list between ``before`` and ``after``, over several lines if it is too long for one line."""
        single_line = before + ", ".join(parts) + after
        if len(f"    {single_line}") <= WIDTH:
            return self.write(single_line, note)
        self.write(before, note)
        line = ""
        for part in parts:
            if line and len(f"        {line} {part},") > WIDTH:
                self.lines.append(f"        {line}")
                line = ""
            line += f" {part}," if line else f"{part},"
        self.lines.append(f"        {line}")
        self.write(after)

    def write_delete(self, values: Iterable[int]) -> None:
        """Write the ``del`` of the variables of these values, if there are any."""
        names = [self.variables[value] for value in values]
        if names:
            self.write(f"del {', '.join(names)}")


def _variable_names(graph: JointGraph) -> list[str]:
    """Return a variable name for each value, by id: of parameters and buffers their path in the model, of inputs and
    tangents ``input_PATH`` and ``tangent_PATH``, of others their own name; altered if no identifier, or in use."""
    used, names = set(_RESERVED), list[str]()
    for value in graph.values:
        default_name = {"input": f"input_{value.path}", "tangent": f"tangent_{value.path}"}.get(value.kind, value.name)
        preferred_name = value.path if value.kind in ("parameter", "buffer") else default_name
        name = re.sub(r"\W", "_", preferred_name, flags=re.ASCII)
        if not name or name[0].isdigit() or keyword.iskeyword(name):
            name = f"{value.kind}_{name}"
        while name in used or (value.kind == "host" and _copy_handle(name) in used):
            name += "_"
        used |= {name, _copy_handle(name)} if value.kind == "host" else {name}
        names.append(name)
    return names


def _copy_handle(host: str) -> str:
    """Return the variable of an asynchronous copy's handle, to wait for it. ``host``: variable in host memory."""
    return f"{host}_copy"


def _op_expression(target: str, op: GraphOp | None) -> str:
    """Return the Python expression of an op: ``aten.relu.default``, or ``torch.ops.`` and its target. Raises
    RecordingError if the target is no valid Python expression."""
    for part in target.split("."):
        _identifier(part, op)
    return target if target.startswith("aten.") else f"torch.ops.{target}"


def _identifier(name: str, op: GraphOp | None) -> str:
    """Return a name that may stand in a program. Raises RecordingError if Python does not allow it as a name."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RecordingError(
            f"{name!r} in a call of {'an op' if op is None else op.target}", expected="a name that Python allows"
        )
    return name
