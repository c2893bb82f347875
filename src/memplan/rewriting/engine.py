"""Run a schedule in place of the model's call, with the planned backward pass behind its outputs.

The engine ``graph`` runs the schedule's program, aten kernels in the planned order; ``inductor`` runs the compiled
kernels of both halves (memplan.rewriting.compiled).
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph, Value, refs
from memplan.planning.schedule.codegen import program, read_in_backward, returned_gradients
from memplan.planning.schedule.scheduler import Schedule
from memplan.rewriting.chain import Chain, Tangent
from memplan.trace.semantics.traced_results import TRAINING_NORM

_STATISTICS = slice(3, 5)
"""Positions of a training norm's running statistics, on which its results do not depend."""


class Functions(Protocol):
    """The two functions of a planned step (see `memplan.planning.schedule.codegen`)."""

    def forward(self, inputs: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs and the saved values."""
        ...

    def backward(
        self, inputs: list[Any], saved: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Yield lists of gradients."""
        ...


class GuardedError(Exception):
    """Raised if a guard fails in a call, so that the model runs unplanned and raises its own exception."""


class Engine:
    """Runs a planned step, from any thread."""

    def __init__(self, captured: Captured, schedule: Schedule, functions: Functions | None = None) -> None:
        """Compile the schedule. ``functions`` are the schedule as fused kernels; None: run its program."""
        graph = captured.graph
        self.text = program(schedule)
        """The program as Python, also if fused kernels run instead."""
        self._captured = captured
        self._resident = tuple(value for value in graph.values if value.kind in RESIDENT)
        """Values of parameters, buffers, inputs and constants, in the order of the functions' inputs."""
        self._owners = _OwnerLookup([value.path for value in self._resident if value.kind in ("parameter", "buffer")])
        """Finds the modules that own the parameters and buffers."""
        self._read_in_backward = read_in_backward(schedule)
        """Resident values that the backward pass reads."""
        has_gradient = {value for value, _ in graph.gradients}
        self._differentiated = {v.id: index for index, v in enumerate(self._resident) if v.id in has_gradient}
        """By parameter or input with a gradient: its index among the resident values."""
        compiled = functions or _Program(self.text)
        self._forward, self._close = compiled.forward, getattr(compiled, "close", lambda: None)
        self._chain = _build_chain(captured, schedule, self._resident, compiled.backward)
        """Attaches the backward pass to the outputs as autograd nodes."""

    def close(self) -> None:
        """Remove the program's lines from `linecache`."""
        self._close()

    def run(self, model: nn.Module, call: Call) -> Any:
        """Run the forward pass and return the model's output, with the planned backward pass attached to it. The model
        is the captured one, or another with the same parameters and buffers. Raises GuardedError if a guard fails: the
        model must run unplanned in this call, to raise its own exception."""
        inputs = self._collect_inputs(model, call)
        differentiated = {value: inputs[at] for value, at in self._differentiated.items()}
        read = [
            tensor if value.id in self._read_in_backward else None
            for value, tensor in zip(self._resident, inputs, strict=True)
        ]
        with torch.no_grad(), _torch.without_autocast():
            outputs, saved = self._forward(inputs)
        guards = self._captured.guards
        flags = outputs[len(outputs) - len(guards) :]
        for flag, guard in zip(flags, guards, strict=True):
            if bool(flag) != guard.answer:
                flag_text = f"the flag at {guard.where} was {not guard.answer}"
                raise GuardedError(f"{flag_text}, for which the model raised when the plan was made")
        return self._captured.returned.rebuild(self._chain.attach(read, saved, outputs, differentiated))

    def _collect_inputs(self, model: nn.Module, call: Call) -> list[torch.Tensor]:
        """Return the tensors of all resident values, in order: the model's present parameters and buffers, the call's
        inputs, and constants."""
        owners = self._owners.lookup(model)
        tensors = list[torch.Tensor]()
        for value in self._resident:
            if value.kind in ("parameter", "buffer"):
                owner, name = owners[value.path]
                tensors.append(_torch.own_tensor(owner, name, value.kind))
            elif value.kind == "input":
                tensors.append(call.tensors[int(value.path)])
            else:
                tensors.append(self._captured.constants[value.id])
        return tensors


class _OwnerLookup:
    """Looks up the modules that own tensors, in each call, since any of them may have been replaced.

    ``paths``: names of the parameters and buffers in the model.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """``paths``: of parameters and buffers, such as ``layer1.0.weight``."""
        self._tensors = [(path, *_split_path(path)) for path in paths]
        """(path, path of the owner, name in the owner) of each tensor."""
        self._modules: list[tuple[str, str, str]] = []
        """(path, path of the parent, name in the parent) of each owner and its parents, parents first."""
        known_paths = {""}
        for _, owner, _ in self._tensors:
            parts = owner.split(".") if owner else []
            for path in accumulate(parts, "{}.{}".format):  # "a", "a.b", "a.b.c"
                if path not in known_paths:
                    known_paths.add(path)
                    self._modules.append((path, *_split_path(path)))

    def lookup(self, model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Return the owner of each parameter and buffer in a model, and its name in the owner, by path."""
        modules = {"": model}
        for path, parent, name in self._modules:
            modules[path] = _torch.submodule(modules[parent], name)
        return {path: (modules[owner], name) for path, owner, name in self._tensors}


def _split_path(path: str) -> tuple[str, str]:
    """Return the path of the parent, and the name in it: ("blocks.0", "fc") for "blocks.0.fc"."""
    parent, _, name = path.rpartition(".")
    return parent, name


class _Program:
    """The two functions of a program as Python code, with source lines for tracebacks."""

    def __init__(self, text: str) -> None:
        """Compile a program, whose lines tracebacks show by its name in `linecache`."""
        self._name = f"<memplan plan {hash(text) & 0xFFFFFFFFFFFF:012x}>"
        linecache.cache[self._name] = (len(text), None, text.splitlines(keepends=True), self._name)
        namespace: dict[str, Any] = {}
        exec(compile(text, self._name, "exec"), namespace)  # defines forward and backward in the namespace
        self.forward, self.backward = namespace["forward"], namespace["backward"]

    def close(self) -> None:
        """Remove the source lines."""
        linecache.cache.pop(self._name, None)


def _build_chain(captured: Captured, schedule: Schedule, resident: tuple[Value, ...], backward: Any) -> Chain:
    """Return the `Chain` by which all calls of a planned step attach ``backward`` to their outputs. ``resident``: the
    values of parameters, buffers, inputs and constants, in the order of the inputs of ``backward``."""
    graph = captured.graph
    tangents = [value for value in graph.values if value.kind == "tangent"]
    overwritten = {action.overwritten for action in schedule.backward}
    last_read = _last_read(schedule)
    guarded = tuple(
        (index, f"Input {value.path}" if value.kind == "input" else f"The {value.kind} '{value.path}'")
        for index, value in enumerate(resident)
        if value.id in last_read and value.kind != "constant"
    )
    groups, dependencies = returned_gradients(schedule), _tangents_by_gradient(graph)
    parts = list[tuple[int, tuple[int, ...]]]()
    for number, group in enumerate(groups):
        for tangent_set in dict.fromkeys(dependencies[value] for value in group):
            parts.append((number, tuple(value for value in group if dependencies[value] == tangent_set)))
    guarded_values = [resident[index].id for index, _ in guarded]
    return Chain(
        backward,
        tuple(parts),
        tuple(
            Tangent(output, value.shape, value.stride, getattr(torch, value.dtype.removeprefix("torch.")))
            for output, value in zip(captured.outputs_with_tangent, tangents, strict=True)
        ),
        dependencies,
        unplanned={output: f"output {output}" for output in captured.returned.detached_outputs},
        overwritten=frozenset(index for index, value in enumerate(schedule.saved) if value in overwritten),
        guarded=guarded,
        reread=tuple(_read_after_gradient(schedule, groups, guarded_values, last_read)),
        reads=captured.reads if captured.reads is not None and captured.reads.read_in_backward else None,
    )


def _tangents_by_gradient(graph: JointGraph) -> dict[int, frozenset[int]]:
    """Return the indices of the tangents on which a gradient depends, by the value with that gradient.

    Autograd computes a gradient only if it gets one of these tangents. A gradient without dependencies counts as
    depending on all.
    """
    tangents = [value.id for value in graph.values if value.kind == "tangent"]
    dependencies = {value: frozenset([index]) for index, value in enumerate(tangents)}
    for op in graph.backward_ops:
        operands = (graph.base(value) for value in refs((op.args, op.kwargs)))
        of_op = frozenset[int]().union(*(dependencies.get(operand, ()) for operand in operands))
        dependencies.update(dict.fromkeys(op.makes, of_op))
    every = frozenset(range(len(tangents)))
    return {value: dependencies.get(graph.base(gradient)) or every for value, gradient in graph.gradients}


def _last_read(schedule: Schedule) -> dict[int, int]:
    """Return the index of the last backward action whose result depends on a resident value, by the value."""
    graph, last = schedule.graph, dict[int, int]()
    for index, action in enumerate(schedule.backward):
        reads = set(action.reads)
        op = None if action.op is None else action.called_op(graph)
        if op is not None and op.target == TRAINING_NORM:  # its results do not depend on the running statistics
            other_args = (*op.args[: _STATISTICS.start], *op.args[_STATISTICS.stop :])
            reads &= {graph.base(value) for value in refs((other_args, op.kwargs))}
        last.update((value, index) for value in reads if graph.values[value].kind in RESIDENT)
    return last


def _read_after_gradient(
    schedule: Schedule, groups: tuple[tuple[int, ...], ...], guarded: list[int], last_read: dict[int, int]
) -> Iterable[tuple[int, ...]]:
    """Yield for each group of gradients the guarded inputs that are read after their own gradient was returned to
    autograd, so that a hook may have changed them. Results are indices into ``guarded``; ``last_read``: see
    `_last_read`."""
    returned_at = {action.value: index for index, action in enumerate(schedule.backward) if action.kind == "give"}
    returned = set[int]()
    for group in groups:
        returned.update(group)
        end = max(returned_at[value] for value in group)
        yield tuple(index for index, value in enumerate(guarded) if value in returned and last_read[value] > end)
