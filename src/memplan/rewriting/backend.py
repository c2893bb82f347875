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
from memplan.trace.recording.session import running_recording

_warned: set[tuple[str, int]] = set()
_ITEM = "call_method", "item"


def memplan(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Plan a graph for ``torch.compile``, which looks up this backend by its name.

    Plans come from the same search and validator as in `memplan.fit`, but without its proof: no gradients are compared
    and no memory is measured. For symbolic sizes or numbers, each set of concrete values is captured and planned
    separately.

    Args:
        graph: a graph that Dynamo traced.
        inputs: inputs of the graph's first call.
        options: ``budget``: most bytes on the device at any time of a step, as a number or a size (``"6 GiB"``).

    Raises:
        UsageError: no budget, or an unknown option.
        BudgetError: no plan fits the budget (raised by the first call).
    """
    running = running_recording()
    if running is not None and not running.really:
        running.notes['torch.compile(backend="memplan") runs as if eager here: its plans are made in a run'] = None
        return graph.forward
    options = options or {}
    unknown = sorted(set(options) - {"budget"})
    if unknown or "budget" not in options:
        raise UsageError(
            f"options={dict(options)!r}" if unknown else "No budget",
            expected="options={'budget': '6 GiB'}",
            do="Give the bytes that the step may use, as a number or a size",
        )
    budget = parse_bytes(options["budget"])

    def planner_of(module: nn.Module) -> Planner:
        """Return the planner of a module's calls within the budget."""
        planner = StepPlanner(module)
        return lambda call, adds: planner.planned(call, Settings(gradients=GradientUse(accumulates=adds)), budget)

    return plan_graph(graph, inputs, planner_of)


def plan_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], planner_of: Callable[[nn.Module], Planner]
) -> Callable[..., Any]:
    """Return a graph from Dynamo as a planned function. The first call with a new key is planned. ``inputs`` are those
    of its first call; ``planner_of`` returns the planner for a module that runs the graph."""
    _warn_of_break(graph)
    lifted = _Lifted(graph, inputs)
    install(lifted, planner_of(lifted))
    return lifted.called


class _Lifted(nn.Module):
    """A graph as a module that owns the parameters among its inputs; number inputs are Python numbers."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """``inputs``: of the graph's first call, in the order of its placeholders."""
        super().__init__()
        number_inputs = _convert_item_inputs(graph)
        self.graph = graph
        self._code = graph.code  # generated at the first access, which must not be inside of a capture
        placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self._is_number = [name in number_inputs for name in placeholders]
        """For each input, whether its tensor is passed on as a Python number."""
        self._names: list[str | None] = []
        """For each input, its name as a parameter of this module; None if it is no parameter."""
        for index, (placeholder, value) in enumerate(zip(placeholders, inputs, strict=True)):
            name = None
            if isinstance(value, nn.Parameter):  # with the index, since the names of two paths can become the same
                name = f"{_plain_name(placeholder)}_{index}"
                self.register_parameter(name, value)
            self._names.append(name)

    def called(self, *inputs: Any) -> Any:
        """Call the graph with all of its inputs. Parameters among them replace those of this module."""
        others = list[Any]()
        for name, is_number, value in zip(self._names, self._is_number, inputs, strict=True):
            if name is None:
                others.append(value.item() if is_number else value)
            elif getattr(self, name) is not value:
                setattr(self, name, value)
        return self(*others)

    def forward(self, *inputs: Any) -> Any:
        """Call the graph. ``inputs``: its inputs that are no parameters."""
        others = iter(inputs)
        return self.graph(*(next(others) if name is None else getattr(self, name) for name in self._names))


def _convert_item_inputs(graph: fx.GraphModule) -> set[str]:
    """Change a graph so that inputs that are only read by ``item()`` are Python numbers. Returns their names. Dynamo
    passes changing floats (under ``dynamic=True`` all floats) as tensors."""
    numbers: set[str] = set()
    for node in graph.graph.nodes:
        readers = list(node.users)
        if node.op != "placeholder" or not readers or any((reader.op, reader.target) != _ITEM for reader in readers):
            continue
        for reader in readers:
            reader.replace_all_uses_with(node)
            graph.graph.erase_node(reader)
        numbers.add(node.name)
    graph.recompile()
    return numbers


def _plain_name(placeholder: str) -> str:
    """Return ``fc_weight`` for Dynamo's name ``l_self_modules_fc_parameters_weight_`` of a parameter."""
    words = re.sub(r"^[lL]_self_|_?(modules|parameters)_", "_", placeholder).strip("_")
    return re.sub(r"_+", "_", words) or "parameter"


def _warn_of_break(graph: fx.GraphModule) -> None:
    """Warn once for each line at which Dynamo breaks the graph: the budget then bounds each part, not the step."""
    graph_break = _torch.graph_break(graph)
    if graph_break is None:
        return
    line = graph_break.path, graph_break.line
    if line in _warned:
        return
    _warned.add(line)
    warnings.warn(
        f"memplan: the graph breaks at {format_frame(line)} ({graph_break.reason}). Each part is planned "
        "by itself and bounded by the whole budget, so the step as a whole is not. memplan.fit needs no whole graph.",
        stacklevel=2,
    )
