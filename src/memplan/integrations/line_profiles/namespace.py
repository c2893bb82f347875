"""A call or a cell on stand-ins of everything that it finds around it, which is left as it is."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import InputError
from memplan.simulation.simulate import live_at
from memplan.trace.record import record
from memplan.trace.spec import like
from memplan.trace.trace import Trace


class Surroundings:
    """What code finds around it: globals, closures, arguments.

    Args:
        namespace: the globals.
        codes: what is to run; of the globals, those are copied that it names, also by way of functions and classes
            that are defined there.
        cells: of a closure.
        given: arguments.
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        codes: Sequence[CodeType],
        cells: Sequence[CellType] = (),
        given: Any = None,
    ) -> None:
        self._namespace = namespace
        self._names = sorted(_names(codes, namespace))
        self._cells = [cell for cell in cells if _has_content(cell)]
        self._given = given
        self._kept = dict(namespace)
        self._contents = [cell.cell_contents for cell in self._cells]

    def predicted(self, call: Callable[[Any], object], device: str | None) -> Trace:
        """Return what a call takes: tensors, modules and optimizers around it are stand-ins and count from before.

        Args:
            call: takes the stand-in of what was given.
            device: as for `memplan.record`.

        Raises:
            MemplanError: whatever `memplan.record` raises, and InputError where a tensor's graph is needed.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a copied scheduler misses its mark on the copied optimizer's step
                trace = record(lambda: self._ready(call), device=device, steps=1)
        finally:
            self._put_back()
        held = sum(one.bytes for one in live_at(trace, trace.steps[0]))
        if not held:
            return trace
        note = f"{format_bytes(held)} were there before: what it reads from outside, as stand-ins that are not changed"
        return dataclasses.replace(trace, notes=(*trace.notes, note))

    def _ready(self, call: Callable[[Any], object]) -> Callable[[], object]:
        """Put stand-ins in the place of everything, and return the step."""
        self._put_back()
        memo: dict[int, Any] = {}
        with _copied_as_stand_ins():
            for name in self._names:
                self._namespace[name] = _copy(self._kept[name], memo)
            for cell, content in zip(self._cells, self._contents, strict=True):
                cell.cell_contents = _copy(content, memo)
            given = _copy(self._given, memo)
        return lambda: call(given)

    def _put_back(self) -> None:
        for name in [name for name in self._namespace if name not in self._kept]:
            del self._namespace[name]
        self._namespace.update(self._kept)
        for cell, content in zip(self._cells, self._contents, strict=True):
            cell.cell_contents = content


def _has_content(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def _names(codes: Iterable[CodeType], namespace: Mapping[str, Any]) -> set[str]:
    """Return the globals that code names, and those that functions and classes of the same globals name in turn."""
    found, left, seen = set[str](), list(codes), set[CodeType]()
    while left:
        code = left.pop()
        if code in seen:
            continue
        seen.add(code)
        left += [part for part in code.co_consts if isinstance(part, CodeType)]
        for name in code.co_names:
            if name in namespace and not name.startswith("__"):
                found.add(name)
                left += _codes_of(namespace[name], namespace)
    return found


def _codes_of(value: Any, namespace: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of a function, or of the methods of a class or of an object's class, that has these globals."""
    kind = value if isinstance(value, type) else type(value)
    for part in (value, *vars(kind).values()):
        function = getattr(part, "__wrapped__", getattr(part, "__func__", part))
        if isinstance(function, FunctionType) and function.__globals__ is namespace:
            yield function.__code__


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a value with stand-ins for its tensors; the value itself where it cannot be copied, as modules cannot."""
    if isinstance(value, (ModuleType, FunctionType, type)):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # __deepcopy__ is anybody's code
        return value


def _copied_as_stand_ins() -> Any:
    """Let `copy.deepcopy` make a stand-in of each tensor in here: no values, the same shape, strides and dtype."""

    def stand_in(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) in memo or isinstance(tensor, _torch.FakeTensor):
            return memo.get(id(tensor), tensor)
        with _torch.no_modes():
            plain = tensor.detach()
        made = like(plain)
        made = made.to("cuda") if tensor.is_cuda else made
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = made
        if tensor.grad_fn is not None:
            made.register_hook(_refused)
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = stand_in(tensor.grad, memo)
        return made

    stack = ExitStack()
    for owner in (torch.Tensor, nn.Parameter):
        stack.enter_context(_torch.patched(owner, __deepcopy__=stand_in))
    return stack


def _refused(gradient: torch.Tensor) -> None:
    """Refuse a backward pass that goes on behind a stand-in, through ops that ran before."""
    raise InputError(
        f"a backward pass through a tensor of shape {tuple(gradient.shape)} that was computed before",
        expected="the forward pass in what is predicted, too: what an earlier one has saved is not copied",
        do="Put the forward pass in as well, or detach the tensor",
    )
