"""Records a call or a notebook cell on fake copies of the globals, closures and arguments that it uses."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
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


class FakeNamespace:
    """Globals, closure and arguments of a call, replaced by copies with fake tensors while it is recorded.

    Args:
        namespace: the globals.
        codes: code that will run. The globals that it names are copied, and those that functions and classes defined
            in the same namespace name in turn.
        cells: of the function's closure.
        arguments: of the call, in any container.
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        codes: Sequence[CodeType],
        cells: Sequence[CellType] = (),
        arguments: Any = None,
    ) -> None:
        """``namespace``: the globals of a call; ``codes``: code that it runs; ``cells``: of the function's closure."""
        self._namespace = namespace
        self._global_names = sorted(_global_names(codes, namespace))
        """The globals that the code names, to be copied."""
        self._cells = [cell for cell in cells if _has_content(cell)]
        """Cells of the closure that are not empty."""
        self._arguments = arguments
        self._globals = dict(namespace)
        """The globals before the recording, to restore them."""
        self._contents = [cell.cell_contents for cell in self._cells]
        """Contents of the cells before the recording, likewise."""

    def record(self, call: Callable[[Any], object], device: str | None) -> Trace:
        """Record a call; the copies of tensors, modules and optimizers count as allocated before it. The call takes the
        copy of the arguments.

        Raises:
            MemplanError: as `memplan.record`. Also InputError, if the call runs a backward pass through ops of an
                earlier one.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a copied scheduler warns that the optimizer's step() was replaced
                trace = record(lambda: self._substitute(call), device=device, steps=1)
        finally:
            self._restore()
        resident = sum(storage.bytes for storage in live_at(trace, trace.steps[0]))
        if not resident:
            return trace
        note = (
            f"{format_bytes(resident)} were there before: what it reads from outside, as stand-ins that are not changed"
        )
        return dataclasses.replace(trace, notes=(*trace.notes, note))

    def _substitute(self, call: Callable[[Any], object]) -> Callable[[], object]:
        """Replace globals and closure by copies, and return the step to record: ``call(arguments)``, with copies of the
        arguments."""
        self._restore()
        memo: dict[int, Any] = {}
        with _tensors_copied_as_fakes():
            for name in self._global_names:
                self._namespace[name] = _copy(self._globals[name], memo)
            for cell, content in zip(self._cells, self._contents, strict=True):
                cell.cell_contents = _copy(content, memo)
            arguments = _copy(self._arguments, memo)
        return lambda: call(arguments)

    def _restore(self) -> None:
        """Give the globals and the closure their contents from before the call."""
        for name in [name for name in self._namespace if name not in self._globals]:
            del self._namespace[name]
        self._namespace.update(self._globals)
        for cell, content in zip(self._cells, self._contents, strict=True):
            cell.cell_contents = content


def _has_content(cell: CellType) -> bool:
    """Return whether the variable of a closure's cell is assigned."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _global_names(codes: Iterable[CodeType], namespace: Mapping[str, Any]) -> set[str]:
    """Return the names of the globals that code uses, also by way of functions and classes of the same namespace."""
    names, pending, seen = set[str](), list(codes), set[CodeType]()
    while pending:
        code = pending.pop()
        if code in seen:
            continue
        seen.add(code)
        pending += [part for part in code.co_consts if isinstance(part, CodeType)]
        for name in code.co_names:
            if name in namespace and not name.startswith("__"):
                names.add(name)
                pending += _codes_of(namespace[name], namespace)
    return names


def _codes_of(value: Any, namespace: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of a function, or of the methods of a class or an instance, if defined in this namespace."""
    kind = value if isinstance(value, type) else type(value)
    for part in (value, *vars(kind).values()):
        function = getattr(part, "__wrapped__", getattr(part, "__func__", part))
        if isinstance(function, FunctionType) and function.__globals__ is namespace:
            yield function.__code__


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return `copy.deepcopy` of a value, or the value itself if it cannot be copied."""
    if isinstance(value, (ModuleType, FunctionType, type)):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a user's __deepcopy__ may raise anything
        return value


def _tensors_copied_as_fakes() -> AbstractContextManager[object]:
    """Within this context `copy.deepcopy` copies tensors without values: same shape, strides, dtype and gradient."""

    def fake_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """Return a fake copy of a tensor, as ``__deepcopy__``; ``memo`` has the copies so far by id()."""
        if isinstance(tensor, _torch.FakeTensor):
            return tensor
        if id(tensor) in memo:
            return memo[id(tensor)]
        with _torch.no_modes():
            detached = tensor.detach()
        fake = like(detached)
        fake = fake.to("cuda") if tensor.is_cuda else fake
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = fake
        if tensor.grad_fn is not None:
            fake.register_hook(_refuse_backward)
        if tensor.is_leaf and tensor.grad is not None:
            fake.grad = fake_copy(tensor.grad, memo)
        return fake

    stack = ExitStack()
    for owner in (torch.Tensor, nn.Parameter):
        stack.enter_context(_torch.patched(owner, __deepcopy__=fake_copy))
    return stack


def _refuse_backward(gradient: torch.Tensor) -> None:
    """Tensor hook that refuses a backward pass through ops from before the recording, whose graph is not copied."""
    raise InputError(
        f"a backward pass through a tensor of shape {tuple(gradient.shape)} that was computed before",
        expected="the forward pass in what is predicted, too: what an earlier one has saved is not copied",
        do="Put the forward pass in as well, or detach the tensor",
    )
