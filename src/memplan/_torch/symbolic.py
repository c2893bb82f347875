"""A joint graph that was traced with sizes as symbols, and what it is for given sizes.

Seen in torch 2.13: ``ShapeEnv`` with its ``guards`` (what was decided about symbols while tracing) and its
``var_to_range``, ``StatelessSymbolicContext`` for ``FakeTensorMode.from_tensor``, ``SymInt.node.expr`` (a sympy
expression), and `torch.utils._sympy.printers.PythonPrinter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memplan._torch.joint import Joint
from memplan._torch.tensors import storage_key


class NotSymbolicError(Exception):
    """A graph has something that no expression of sizes is made for; the text says what."""


def with_symbols(mode: FakeTensorMode, tensor: torch.Tensor, varying: Collection[int], name: str) -> torch.Tensor:
    """Return a fake tensor with symbols for the sizes of these dimensions; equal sizes get the same symbol."""
    # imported here, because they bring Dynamo and sympy
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if dim in varying else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * tensor.dim())
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


def is_symbol(value: object) -> bool:
    """Return whether a number is a symbol, or follows from one."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def symbolic_mode() -> FakeTensorMode:
    """Return a mode whose fake tensors may have symbols for sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@dataclass(frozen=True, slots=True)
class _Number:
    """Place of a number in the table, among the arguments of a call."""

    at: int


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor by places in the table: storage (its number), offset, shape, stride."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Symbolic:
    """A graph of symbolic sizes."""

    def __init__(self, joint: Joint) -> None:
        """Take a graph apart; it is this object's own from now on.

        Raises:
            NotSymbolicError: there is something in it beside tensors on the CPU and integers.
        """
        self._joint, self._environment = joint, _environment(joint)
        self._places: dict[Any, int] = {}
        """Place of each number or expression in the table."""
        self._storages: dict[int, int] = {}
        self._sizes: list[int] = []
        """Place in the table of the number of each storage's bytes."""
        self._kept: list[Any] = []
        self._metas: list[tuple[Any, Any]] = []
        """Nodes, and forms of their values."""
        self._calls: list[tuple[Any, Any, Any]] = []
        """Nodes with numbers among their arguments, and these with _Number in their place."""
        self._inputs = {
            role.index: node for node, role in zip(_placeholders(joint), joint.inputs, strict=True)
            if role.kind == "input"
        }  # fmt: skip
        self._take_apart()
        self._forms = dict(self._metas)
        self._symbols, self._table, self._holds = self._compiled()

    def at(self, inputs: Sequence[torch.Tensor]) -> Joint | None:
        """Return the graph for inputs of these sizes, its tensors without data; None where it is another one.

        It shares the nodes with this object: what is to stay is to be read out before the next call.
        """
        bound = self._bound(inputs)
        if bound is None or not self._holds(*bound):
            return None
        table = self._table(*bound)
        if not all(self._is(self._forms[node], table, inputs[at]) for at, node in self._inputs.items()):
            return None
        with _disable_current_modes():
            storages = [torch.UntypedStorage(table[size], device="meta") for size in self._sizes]
            for node, form in self._metas:
                node.meta["val"] = _filled(form, table, storages)
        for node, args, kwargs in self._calls:
            node.args, node.kwargs = _filled(args, table, ()), _filled(kwargs, table, ())
        return self._joint

    # -- once

    def _take_apart(self) -> None:
        graph, numbers = self._joint.module.graph, []
        for node in graph.nodes:
            if node.op == "get_attr":
                continue
            found = node.meta.get("val")
            if isinstance(found, torch.SymInt) or (isinstance(found, int) and node.op == "call_function"):
                numbers.append(node)
                continue
            if node.op == "output":
                if any(one is not None and not isinstance(one.meta.get("val"), torch.Tensor) for one in node.args[0]):
                    raise NotSymbolicError("a number is returned")
                continue
            self._metas.append((node, self._form(found)))
            args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
            if _has_numbers((args, kwargs)):
                self._calls.append((node, args, kwargs))
                node.args, node.kwargs = _filled(args, _Zeros(), ()), _filled(kwargs, _Zeros(), ())
        for node in reversed(numbers):
            if node.op == "placeholder" or node.users:
                raise NotSymbolicError(f"{node} is a number that is handed in or returned")
            graph.erase_node(node)

    def _form(self, found: Any) -> Any:
        if isinstance(found, (tuple, list)):
            return tuple(self._form(one) for one in found)
        if found is None:
            return None
        if not isinstance(found, torch.Tensor) or found.device.type != "cpu" or found.layout != torch.strided:
            raise NotSymbolicError(f"{type(found).__name__} is no plain tensor")
        storage = found.untyped_storage()
        self._kept.append(storage)
        key = storage_key(storage)
        if key not in self._storages:
            self._storages[key] = len(self._sizes)
            self._sizes.append(self._place(storage.nbytes()))
        return _Form(
            self._storages[key],
            self._place(found.storage_offset()),
            tuple(map(self._place, found.shape)),
            tuple(map(self._place, found.stride())),
            found.dtype,
        )

    def _arguments(self, found: Any) -> Any:
        if isinstance(found, torch.fx.Node):
            value = found.meta.get("val")
            return found if value is None or not isinstance(value, (torch.SymInt, int)) else self._arguments(value)
        if isinstance(found, torch.SymInt):
            return _Number(self._place(found))
        if isinstance(found, (torch.SymFloat, torch.SymBool)):
            raise NotSymbolicError(f"an op takes {type(found).__name__}")
        if isinstance(found, (tuple, list)):
            parts = [self._arguments(part) for part in found]
            return parts if isinstance(found, list) else tuple(parts)
        if isinstance(found, dict):
            return {name: self._arguments(part) for name, part in found.items()}
        return found

    def _place(self, number: Any) -> int:
        expression = number.node.expr if isinstance(number, torch.SymInt) else int(number)
        return self._places.setdefault(expression, len(self._places))

    def _compiled(self) -> tuple[tuple[Any, ...], Callable[..., Sequence[int]], Callable[..., bool]]:
        from torch.utils._sympy.printers import PythonPrinter

        conditions = [guard.expr for guard in self._environment.guards]
        used: set[Any] = set().union(*(_symbols(one) for one in (*self._places, *conditions)))
        symbols = tuple(sorted(used, key=str))
        write = PythonPrinter().doprint
        numbers = [str(one) if isinstance(one, int) else write(one) for one in self._places]
        decided = [f"({write(one)})" for one in conditions]
        for symbol in symbols:
            within = self._environment.var_to_range.get(symbol)
            if within is None:
                raise NotSymbolicError(f"{symbol} has no range")
            decided += [f"{symbol} >= {int(within.lower)}"] if within.lower.is_Integer else []
            decided += [f"{symbol} <= {int(within.upper)}"] if within.upper.is_Integer else []
        names = ", ".join(map(str, symbols))
        text = f"def table({names}):\n    return ({', '.join(numbers)},)\n"
        text += f"def holds({names}):\n    return {' and '.join(decided) or 'True'}\n"
        found: dict[str, Any] = {"math": math, "torch": torch}
        exec(compile(text, "<memplan sizes>", "exec"), found)
        return symbols, found["table"], found["holds"]

    # -- for given sizes

    def _bound(self, inputs: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the symbols' values; None where the inputs do not tell."""
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

    def _is(self, form: _Form, table: Sequence[int], tensor: torch.Tensor) -> bool:
        return (
            tuple(table[at] for at in form.shape) == tensor.shape
            and tuple(table[at] for at in form.stride) == tensor.stride()
            and form.dtype == tensor.dtype
            and tensor.device.type == "cpu"
        )


class _Zeros(Sequence[int]):
    """A table for the time before there is one."""

    def __getitem__(self, at: Any) -> Any:
        return 0

    def __len__(self) -> int:
        return 0


def _filled(found: Any, table: Sequence[int], storages: Sequence[Any]) -> Any:
    if isinstance(found, _Form):
        shape, stride = [table[at] for at in found.shape], [table[at] for at in found.stride]
        made = torch.empty(0, dtype=found.dtype, device="meta")
        return made.set_(storages[found.storage], table[found.offset], shape, stride)
    if isinstance(found, _Number):
        return table[found.at]
    if isinstance(found, tuple):
        return tuple([_filled(part, table, storages) for part in found])
    if isinstance(found, list):
        return [_filled(part, table, storages) for part in found]
    if isinstance(found, dict):
        return {name: _filled(part, table, storages) for name, part in found.items()}
    return found


def _has_numbers(found: Any) -> bool:
    if isinstance(found, (tuple, list)):
        return any(map(_has_numbers, found))
    return any(map(_has_numbers, found.values())) if isinstance(found, dict) else isinstance(found, _Number)


def _symbols(expression: Any) -> Collection[Any]:
    return getattr(expression, "free_symbols", ())


def _placeholders(joint: Joint) -> Iterator[Any]:
    return (node for node in joint.module.graph.nodes if node.op == "placeholder")


def _environment(joint: Joint) -> Any:
    for node in joint.module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    raise NotSymbolicError("it was traced with numbers")
