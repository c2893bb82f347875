"""A joint graph traced with symbolic sizes, and its specialization to concrete sizes.

Seen in torch 2.13: ``ShapeEnv`` with its ``guards`` (conditions on symbols, assumed while tracing) and its
``var_to_range``, ``StatelessSymbolicContext`` for ``FakeTensorMode.from_tensor``, ``SymInt.node.expr`` (a sympy
expression), and `torch.utils._sympy.printers.PythonPrinter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memplan._torch.joint import Joint
from memplan._torch.tensors import storage_key


class NotSymbolicError(Exception):
    """The graph contains a value that cannot be written as an expression of sizes; the message names it."""


def with_symbols(mode: FakeTensorMode, tensor: torch.Tensor, varying: Collection[int], name: str) -> torch.Tensor:
    """Return a fake tensor with symbolic sizes in the dimensions ``varying``; equal sizes get the same symbol."""
    # imported here, because they bring Dynamo and sympy
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if dim in varying else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * tensor.dim())
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


def is_symbol(value: object) -> bool:
    """Return whether a number is symbolic: a symbol or an expression of symbols."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def symbolic_mode() -> FakeTensorMode:
    """Return a fake mode whose tensors may have symbolic sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@dataclass(frozen=True, slots=True)
class _Number:
    """Index into the table of numbers; stands for a number among the arguments of a call."""

    at: int


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor: its storage's number, and table indices of offset, shape and stride."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Symbolic:
    """A joint graph with symbolic sizes, which `at` specializes to concrete ones.

    Every size, stride, offset and integer argument in the graph is an entry of one table of expressions, which is
    compiled to a Python function of the symbols. `_Form` and `_Number` hold indices into that table.
    """

    def __init__(self, joint: Joint) -> None:
        """Replace the numbers of a graph by indices into the table. The graph is changed: use it through `at` only.
        Raises NotSymbolicError if the graph has values other than CPU tensors and integers."""
        self._joint, self._environment = joint, _environment(joint)
        self._places: dict[Any, int] = {}
        """Index of each number or expression in the table."""
        self._storages: dict[int, int] = {}
        """Key of a storage -> its number, an index into `_sizes`."""
        self._sizes: list[int] = []
        """Table index of the bytes of each storage."""
        self._kept: list[Any] = []
        """The storages, so that their keys stay unique."""
        self._metas: list[tuple[Any, Any]] = []
        """Nodes, and the `_Form` of each value."""
        self._calls: list[tuple[Any, Any, Any]] = []
        """Nodes with numbers among their arguments, and the arguments with `_Number` for each number."""
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        self._inputs = {
            role.index: node for node, role in zip(placeholders, joint.inputs, strict=True) if role.kind == "input"
        }
        """By index of an input: its placeholder."""
        self._take_apart()
        self._forms = dict(self._metas)
        """By node: the `_Form` of its value."""
        self._symbols, self._table, self._holds = self._compiled()
        """The symbols of the sizes; a function of their values that computes the table; another that returns whether
        the trace is valid for them."""

    def at(self, inputs: Sequence[torch.Tensor]) -> Joint | None:
        """Return the graph specialized to inputs of these sizes; None if a guard fails for them.

        The graph is rewritten in place by the next call. Its tensors have no data.
        """
        bound = self._bound(inputs)
        if bound is None or not self._holds(*bound):
            return None
        table = self._table(*bound)
        if not all(self._matches(self._forms[node], table, inputs[at]) for at, node in self._inputs.items()):
            return None
        with _disable_current_modes():
            storages = [torch.UntypedStorage(table[size], device="meta") for size in self._sizes]
            for node, form in self._metas:
                node.meta["val"] = _filled(form, table, storages)
        for node, args, kwargs in self._calls:
            node.args, node.kwargs = _filled(args, table, ()), _filled(kwargs, table, ())
        return self._joint

    # -- while tracing

    def _take_apart(self) -> None:
        """Replace each node's value by a `_Form` and each number among arguments by a `_Number`, and erase nodes whose
        value is a number: the table holds it."""
        graph, numbers = self._joint.module.graph, []
        for node in graph.nodes:
            if node.op == "get_attr":
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) or (isinstance(value, int) and node.op == "call_function"):
                numbers.append(node)
                continue
            if node.op == "output":
                results = [result for result in node.args[0] if result is not None]
                if not all(isinstance(result.meta.get("val"), torch.Tensor) for result in results):
                    raise NotSymbolicError("a number is returned")
                continue
            self._metas.append((node, self._form(value)))
            args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
            if _has_numbers((args, kwargs)):
                self._calls.append((node, args, kwargs))
                node.args, node.kwargs = _filled(args, _Zeros(), ()), _filled(kwargs, _Zeros(), ())
        for node in reversed(numbers):
            if node.op == "placeholder" or node.users:
                raise NotSymbolicError(f"{node} is a number that is handed in or returned")
            graph.erase_node(node)

    def _form(self, value: Any) -> Any:
        """Return the `_Form` of a tensor, a tuple of forms for several, None for None."""
        if isinstance(value, (tuple, list)):
            return tuple(self._form(part) for part in value)
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
            raise NotSymbolicError(f"{type(value).__name__} is no plain tensor")
        storage = value.untyped_storage()
        self._kept.append(storage)
        key = storage_key(storage)
        if key not in self._storages:
            self._storages[key] = len(self._sizes)
            self._sizes.append(self._place(storage.nbytes()))
        return _Form(
            self._storages[key],
            self._place(value.storage_offset()),
            tuple(map(self._place, value.shape)),
            tuple(map(self._place, value.stride())),
            value.dtype,
        )

    def _arguments(self, argument: Any) -> Any:
        """Return an argument of a call, at any depth, with a `_Number` for each symbolic number, also for a node whose
        value is a number."""
        if isinstance(argument, torch.fx.Node):
            value = argument.meta.get("val")
            return self._arguments(value) if isinstance(value, (torch.SymInt, int)) else argument
        if isinstance(argument, torch.SymInt):
            return _Number(self._place(argument))
        if isinstance(argument, (torch.SymFloat, torch.SymBool)):
            raise NotSymbolicError(f"an op takes {type(argument).__name__}")
        if isinstance(argument, (tuple, list)):
            parts = [self._arguments(part) for part in argument]
            return parts if isinstance(argument, list) else tuple(parts)
        if isinstance(argument, dict):
            return {name: self._arguments(part) for name, part in argument.items()}
        return argument

    def _place(self, number: Any) -> int:
        """Return the index of a number in the table; a new number is added."""
        expression = number.node.expr if isinstance(number, torch.SymInt) else int(number)
        return self._places.setdefault(expression, len(self._places))

    def _compiled(self) -> tuple[tuple[Any, ...], Callable[..., Sequence[int]], Callable[..., bool]]:
        """Compile the table of numbers, and the guards under which the trace is valid.

        Returns:
            The symbols in argument order; a function from their values to all numbers of the table; a function from
            their values to whether the guards and the symbols' ranges hold.
        """
        from torch.utils._sympy.printers import PythonPrinter

        guards = [guard.expr for guard in self._environment.guards]
        free = {symbol for expression in (*self._places, *guards) for symbol in getattr(expression, "free_symbols", ())}
        symbols = tuple(sorted(free, key=str))
        write = PythonPrinter().doprint
        numbers = [str(expression) if isinstance(expression, int) else write(expression) for expression in self._places]
        checks = [f"({write(expression)})" for expression in guards]
        for symbol in symbols:
            range_ = self._environment.var_to_range.get(symbol)
            if range_ is None:
                raise NotSymbolicError(f"{symbol} has no range")
            checks += [f"{symbol} >= {int(range_.lower)}"] if range_.lower.is_Integer else []
            checks += [f"{symbol} <= {int(range_.upper)}"] if range_.upper.is_Integer else []
        names = ", ".join(map(str, symbols))
        text = f"def table({names}):\n    return ({', '.join(numbers)},)\n"
        text += f"def holds({names}):\n    return {' and '.join(checks) or 'True'}\n"
        functions: dict[str, Any] = {"math": math, "torch": torch}
        exec(compile(text, "<memplan sizes>", "exec"), functions)
        return symbols, functions["table"], functions["holds"]

    # -- for concrete sizes

    def _bound(self, inputs: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the value of each symbol; None if the inputs do not determine all of them."""
        expressions = list(self._places)
        values: dict[Any, int] = {}
        for at, node in self._inputs.items():
            form = self._forms[node]
            if len(form.shape) != inputs[at].dim():
                return None
            for place, size in zip(form.shape, inputs[at].shape, strict=True):
                values.setdefault(expressions[place], size)
        if any(symbol not in values for symbol in self._symbols):
            return None
        return [values[symbol] for symbol in self._symbols]

    def _matches(self, form: _Form, table: Sequence[int], tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the sizes, strides and dtype of an input form with the table's numbers."""
        return (
            tuple(table[at] for at in form.shape) == tensor.shape
            and tuple(table[at] for at in form.stride) == tensor.stride()
            and form.dtype == tensor.dtype
            and tensor.device.type == "cpu"
        )


class _Zeros(Sequence[int]):
    """Placeholder table, used before the sizes are known."""

    def __getitem__(self, at: Any) -> Any:
        return 0

    def __len__(self) -> int:
        return 0


def _filled(value: Any, table: Sequence[int], storages: Sequence[Any]) -> Any:
    """Return nested arguments, or the `_Form` of a value, for concrete sizes.

    Each `_Number` becomes a number of the table, and each `_Form` a tensor without data, in ``storages[form.storage]``.
    """
    if isinstance(value, _Form):
        shape, stride = [table[at] for at in value.shape], [table[at] for at in value.stride]
        empty = torch.empty(0, dtype=value.dtype, device="meta")
        return empty.set_(storages[value.storage], table[value.offset], shape, stride)
    if isinstance(value, _Number):
        return table[value.at]
    if isinstance(value, tuple):
        return tuple([_filled(part, table, storages) for part in value])
    if isinstance(value, list):
        return [_filled(part, table, storages) for part in value]
    if isinstance(value, dict):
        return {name: _filled(part, table, storages) for name, part in value.items()}
    return value


def _has_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return any(map(_has_numbers, value)) if isinstance(value, (tuple, list)) else isinstance(value, _Number)


def _environment(joint: Joint) -> Any:
    """Return the `ShapeEnv` in which a graph was traced."""
    for node in joint.module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    raise NotSymbolicError("it was traced with numbers")
