"""Run a schedule in place of the model's call, with the planned backward pass behind its outputs.

The engine ``graph`` runs the schedule's program, aten kernels in the planned order; ``inductor`` runs the compiled
kernels of both halves (memplan.rewriting.compiled).
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.planning.capture.capture import Captured
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.guards import Guard
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph, Value, refs
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.codegen import gives, program, read_in_backward
from memplan.planning.schedule.scheduler import Schedule
from memplan.rewriting.chain import Chain, Tangent
from memplan.trace.semantics.traced_results import TRAINING_NORM

_STATISTICS = slice(3, 5)
"""Positions of a training norm's running statistics, on which its results do not depend."""


class Functions(Protocol):
    """The two functions of a planned step, as `memplan.planning.schedule.codegen` describes them."""

    def forward(self, inputs: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs and the saved values."""
        ...

    def backward(
        self, inputs: list[Any], saved: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Yield lists of gradients."""
        ...


class GuardedError(Exception):
    """Raised for a call for which the model raises instead of going on; the text says which flag says so."""


class Engine:
    """Run a planned step any number of times, from any thread."""

    def __init__(self, captured: Captured, schedule: Schedule, functions: Functions | None = None) -> None:
        """Compile the schedule.

        Args:
            captured: the captured step.
            schedule: what to run; the validator has checked it.
            functions: run it; None: its program does.
        """
        graph = captured.graph
        self.text = program(schedule)
        """The program as Python, also where fused kernels run it."""
        self._captured = captured
        self._handed = tuple(value for value in graph.values if value.kind in RESIDENT)
        self._owners = _Owners([value.path for value in self._handed if value.kind in ("parameter", "buffer")])
        self._read = read_in_backward(schedule)
        self._receivers = {
            of: at for at, value in enumerate(self._handed) for of, _ in graph.gradients if of == value.id
        }
        functions = functions or _Program(self.text)
        self._forward, self._close = functions.forward, getattr(functions, "close", lambda: None)
        self._chain = _chain(captured, schedule, self._handed, functions.backward)

    def suits(self, call: Call) -> bool:
        """Return whether a call of the captured shapes takes the same branches."""
        return self._captured.holds(call)

    def close(self) -> None:
        """Drop the program's lines, which tracebacks need no longer."""
        self._close()

    def run(self, model: nn.Module, call: Call) -> Any:
        """Return what ``model(...)`` returns for this call, with the planned backward pass behind it.

        Args:
            model: the captured one, or one with the same parameters and buffers.
            call: of the captured shapes.

        Raises:
            GuardedError: for this call the model is to run as it is written, to raise its own exception.
        """
        inputs = self._inputs(model, call)
        receivers = {value: inputs[at] for value, at in self._receivers.items()}
        read = [tensor if value.id in self._read else None for value, tensor in zip(self._handed, inputs, strict=True)]
        with torch.no_grad(), _torch.without_autocast():
            outputs, saved = self._forward(inputs)
        guard = self._fired(outputs)
        if guard is not None:
            raise GuardedError(
                f"the flag at {guard.where} was {not guard.answer}, for which the model raised when the plan was made"
            )
        return self._captured.returned.rebuild(self._chain.attach(read, saved, outputs, receivers))

    def _fired(self, outputs: Sequence[torch.Tensor]) -> Guard | None:
        """Return the first guard whose flag is not as it was when the model was captured."""
        guards = self._captured.guards
        flags = outputs[len(outputs) - len(guards) :]
        return next((one for flag, one in zip(flags, guards, strict=True) if bool(flag) != one.answer), None)

    def _inputs(self, model: nn.Module, call: Call) -> list[torch.Tensor]:
        owners = self._owners.of(model)
        found = list[torch.Tensor]()
        for value in self._handed:
            if value.kind in ("parameter", "buffer"):
                owner, name = owners[value.path]
                found.append(_torch.own_tensor(owner, name, value.kind))
            elif value.kind == "input":
                found.append(call.tensors[int(value.path)])
            else:
                found.append(self._captured.constants[value.id])
        return found


class _Owners:
    """Find the modules that hold tensors, anew in each call: any of them may have been replaced."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._steps: list[tuple[str, str, str]] = []
        """(path of the parent, name in it, path), parents first."""
        self._tensors = [(path, *_split(path)) for path in paths]
        known = {""}
        for _, owner, _ in self._tensors:
            parts = owner.split(".") if owner else []
            for length in range(1, len(parts) + 1):
                path = ".".join(parts[:length])
                if path not in known:
                    known.add(path)
                    self._steps.append((*_split(path), path))

    def of(self, model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Return, for each path of a tensor, the module that holds it and its name there."""
        modules = {"": model}
        for parent, name, path in self._steps:
            modules[path] = _torch.submodule(modules[parent], name)
        return {path: (modules[owner], name) for path, owner, name in self._tensors}


def _split(path: str) -> tuple[str, str]:
    owner, _, name = path.rpartition(".")
    return owner, name


class _Program:
    """Compile a program's two functions; its lines show in tracebacks."""

    def __init__(self, text: str) -> None:
        self._name = f"<memplan plan {hash(text) & 0xFFFFFFFFFFFF:012x}>"
        linecache.cache[self._name] = (len(text), None, text.splitlines(keepends=True), self._name)
        found: dict[str, Any] = {}
        exec(compile(text, self._name, "exec"), found)
        self.forward, self.backward = found["forward"], found["backward"]

    def close(self) -> None:
        """Drop its lines."""
        linecache.cache.pop(self._name, None)


def _chain(captured: Captured, schedule: Schedule, handed: tuple[Value, ...], backward: Any) -> Chain:
    graph = captured.graph
    tangents = [value for value in graph.values if value.kind == "tangent"]
    written = {action.into for action in schedule.backward}
    last = _last_read(schedule)
    guarded = tuple(
        (at, _called(value)) for at, value in enumerate(handed) if value.id in last and value.kind != "constant"
    )
    groups, reached = gives(schedule), _reached(graph)
    return Chain(
        backward,
        tuple(_parts(groups, reached)),
        tuple(
            Tangent(output, value.shape, value.stride, getattr(torch, value.dtype.removeprefix("torch.")))
            for output, value in zip(captured.differentiable, tangents, strict=True)
        ),
        reached,
        {output: f"output {output}" for output in captured.returned.cut},
        frozenset(at for at, value in enumerate(schedule.saved) if value in written),
        guarded,
        tuple(_exposed(schedule, groups, [handed[at].id for at, _ in guarded], last)),
        captured.reads if captured.reads is not None and captured.reads.late else None,
    )


def _reached(graph: JointGraph) -> dict[int, frozenset[int]]:
    """Return, for each value with a gradient, the positions of the tangents that it depends on; all, where none."""
    tangents = [value.id for value in graph.values if value.kind == "tangent"]
    among = {value: frozenset([at]) for at, value in enumerate(tangents)}
    for op in graph.backward_ops:
        found = frozenset[int]().union(*(among.get(graph.base(v), ()) for v in refs((op.args, op.kwargs))))
        among.update(dict.fromkeys(op.makes, found))
    every = frozenset(range(len(tangents)))
    return {of: among.get(graph.base(gradient)) or every for of, gradient in graph.gradients}


def _parts(
    groups: tuple[tuple[int, ...], ...], reached: dict[int, frozenset[int]]
) -> Iterable[tuple[int, tuple[int, ...]]]:
    for number, group in enumerate(groups):
        for among in dict.fromkeys(reached[value] for value in group):
            yield number, tuple(value for value in group if reached[value] == among)


def _called(value: Value) -> str:
    return f"Input {value.path}" if value.kind == "input" else f"The {value.kind} '{value.path}'"


def _last_read(schedule: Schedule) -> dict[int, int]:
    """Return, for each value handed in, the last backward action whose result depends on its contents."""
    last = dict[int, int]()
    for at, action in enumerate(schedule.backward):
        last.update(dict.fromkeys(_minded(schedule.graph, action), at))
    return last


def _minded(graph: JointGraph, action: Action) -> set[int]:
    found = set(action.reads)
    op = None if action.op is None else action.called(graph)
    if op is not None and op.target == TRAINING_NORM:
        others = (*op.args[: _STATISTICS.start], *op.args[_STATISTICS.stop :])
        found &= {graph.base(value) for value in refs((others, op.kwargs))}
    return {value for value in found if graph.values[value].kind in RESIDENT}


def _exposed(
    schedule: Schedule, groups: tuple[tuple[int, ...], ...], guarded: list[int], last: dict[int, int]
) -> Iterable[tuple[int, ...]]:
    """Yield, for each group, the guarded values that are read after their own gradient was handed over."""
    given_at = {action.value: at for at, action in enumerate(schedule.backward) if action.kind == "give"}
    given = set[int]()
    for group in groups:
        given.update(group)
        end = max(given_at[value] for value in group)
        yield tuple(number for number, value in enumerate(guarded) if value in given and last[value] > end)
