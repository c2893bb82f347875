"""Run graphs from Dynamo as planned: ``torch.compile(model, backend="memplan", options={"budget": "6 GiB"})``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from memplan import _torch
from memplan._bytes import parse_bytes
from memplan.errors import UsageError
from memplan.planning.levers.lever import GradientUse
from memplan.planning.planner import Planner as StepPlanner
from memplan.planning.settings import Settings
from memplan.rewriting.install import Planner, install
from memplan.trace.recording.place import format_frame

_told: set[tuple[str, int]] = set()
_ITEM = "call_method", "item"


def memplan(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Plan a graph for ``torch.compile``, which finds this backend by its name.

    Plans come from the same search and the same validator as in `memplan.fit`, but without its proof: nothing is
    compared, measured or planned again. Where Dynamo makes sizes or numbers symbolic, they are numbers again when the
    graph is called: each set of them is captured and planned by itself, whatever was planned for larger ones.

    Args:
        graph: a graph that Dynamo traced.
        inputs: those of its first call.
        options: ``budget``, in bytes or as a size such as ``"6 GiB"``: bounds everything on the device at any moment of
            a step.

    Raises:
        UsageError: no budget, or an unknown option.
        BudgetError: at the first call: no plan fits the budget.
    """
    budget = _budget(options or {})

    def planner_of(module: nn.Module) -> Planner:
        planner = StepPlanner(module)
        return lambda call, held: planner.planned(call, Settings(gradients=GradientUse(adds=held)), budget)

    return compiled(graph, inputs, planner_of)


def compiled(
    graph: fx.GraphModule, inputs: Sequence[Any], planner_of: Callable[[nn.Module], Planner]
) -> Callable[..., Any]:
    """Return a graph as a planned function; each kind of call is planned when it first comes."""
    _tell_of_break(graph)
    lifted = _Lifted(graph, inputs)
    install(lifted, planner_of(lifted))
    return lifted.called


class _Lifted(nn.Module):
    """Wrap a graph that takes its parameters among its inputs as a module that has them; numbers are numbers."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__()
        numbers = _without_item(graph)
        self.graph = graph
        self._code = graph.code  # written at the first access, which must not be inside of a capture
        placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self._numbers = [name in numbers for name in placeholders]
        self._names = [
            f"{_plain_name(name)}_{at}" if isinstance(one, nn.Parameter) else None
            for at, (name, one) in enumerate(zip(placeholders, inputs, strict=True))
        ]
        for name, one in zip(self._names, inputs, strict=True):
            if name is not None:
                self.register_parameter(name, one)

    def called(self, *inputs: Any) -> Any:
        """Call the graph with all of its inputs."""
        for name, one in zip(self._names, inputs, strict=True):
            if name is not None and getattr(self, name) is not one:
                setattr(self, name, one)
        named = zip(self._names, self._numbers, inputs, strict=True)
        return self(*(one.item() if number else one for name, number, one in named if name is None))

    def forward(self, *inputs: Any) -> Any:
        """Call the graph with its inputs that are not parameters."""
        left = iter(inputs)
        return self.graph(*(next(left) if name is None else getattr(self, name) for name in self._names))


def _without_item(graph: fx.GraphModule) -> set[str]:
    """Make a graph take as numbers the inputs that it reads by ``item()`` alone, and return their names. Dynamo hands a
    float that changes over as a tensor, and all floats under ``dynamic=True``."""
    numbers: set[str] = set()
    for node in graph.graph.nodes:
        readers = list(node.users)
        if node.op != "placeholder" or not readers or any((one.op, one.target) != _ITEM for one in readers):
            continue
        for reader in readers:
            reader.replace_all_uses_with(node)
            graph.graph.erase_node(reader)
        numbers.add(node.name)
    graph.recompile()
    return numbers


def _plain_name(placeholder: str) -> str:
    """Simplify Dynamo's name of a parameter, as in l_self_modules_fc_parameters_weight_."""
    words = re.sub(r"^[lL]_self_|_?(modules|parameters)_", "_", placeholder).strip("_")
    return re.sub(r"_+", "_", words) or "parameter"


def _budget(options: Mapping[str, Any]) -> int:
    unknown = sorted(set(options) - {"budget"})
    if unknown or "budget" not in options:
        raise UsageError(
            f"options={dict(options)!r}" if unknown else "No budget",
            expected="options={'budget': '6 GiB'}",
            do="Give the bytes that the step may use, as a number or a size",
        )
    return parse_bytes(options["budget"])


def _tell_of_break(graph: fx.GraphModule) -> None:
    found = _torch.graph_break(graph)
    if found is None or (found.path, found.line) in _told:
        return
    _told.add((found.path, found.line))
    warnings.warn(
        f"memplan: the graph breaks at {format_frame((found.path, found.line))} ({found.reason}). Each part is planned "
        "by itself and bounded by the whole budget, so the step as a whole is not. memplan.fit needs no whole graph.",
        stacklevel=2,
    )
