"""Known values of tensors while a step is traced: of constants, and of small integer inputs.

Code reads such values to branch (is this mask all ones? are these positions in order?). A value computed from constants
alone is the same in every call. A value that depends on inputs becomes a condition of the trace.

Seen in torch 2.11, 2.13 and 2.15: ``_local_scalar_dense`` reaches the fake mode for ``item()``, ``bool()`` and
``tolist()``; a tensor from Python's numbers passes ``lift_fresh`` first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from memplan._torch.fake import READ_SCALAR

LARGEST = 1 << 16
"""Most elements of a tensor whose values are followed."""
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@dataclass(frozen=True, eq=False)
class Known:
    """Values of a tensor, and their source: an input, an op (``call``), or a constant (neither)."""

    value: torch.Tensor
    input: int | None = None
    """Number of the input."""
    call: Callable[[list[Any]], Any] | None = None
    """Runs the op on other tensors in place of its tensor arguments."""
    parts: tuple[Known, ...] = ()
    """The op's tensor arguments."""
    position: int | None = None
    """Position among the op's results; None: its only result."""

    def anew(self, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
        """Recompute the values for other inputs. ``memo``: id() of a `Known` -> its values as computed so far."""
        if id(self) not in memo:
            memo[id(self)] = self._computed(inputs, memo)
        return memo[id(self)]

    def _computed(self, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
        """Return the values from their source: an input, a constant, or the op that computed them."""
        if self.input is not None:
            return inputs[self.input]
        if self.call is None:
            return self.value
        result = self.call([part.anew(inputs, memo) for part in self.parts])
        return result if self.position is None else result[self.position]


@dataclass(frozen=True)
class Condition:
    """A scalar that was read while tracing, and the first input that it depends on."""

    known: Known
    value: Any
    input: int

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether the scalar is the same for these inputs."""
        with torch.no_grad():
            return bool(self.known.anew(inputs, {}).item() == self.value)


class Values:
    """Follows known values through the ops of a trace."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        """Fake tensor -> what is known of its elements."""
        self.conditions: list[Condition] = []
        """Scalars that were read and depend on an input."""

    def take(self, fake: Any, number: int, real: torch.Tensor) -> None:
        """Note the values ``real`` of ``fake``, input ``number`` of the trace, if it is small and of an integer or bool
        dtype."""
        is_integral = not real.is_floating_point() and not real.is_complex()
        if is_integral and real.numel() <= LARGEST and not isinstance(real, FakeTensor):
            self._known[fake] = Known(real.detach(), input=number)

    def read(self, func: Any, args: Any) -> Any:
        """Return the value of a scalar read, or None if unknown. If the value depends on an input, note a condition:
        for other values the trace would differ."""
        known = self._known.get(args[0]) if func is READ_SCALAR and isinstance(args[0], FakeTensor) else None
        if known is None:
            return None
        with no_dispatch():
            value = known.value.item()
        number = _input_of(known)
        if number is not None:
            self.conditions.append(Condition(known, value, number))
        return value

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute an op on real values if those of all its tensor arguments are known, so that the values of its result
        are known. A tensor that an op writes in place becomes unknown."""
        if not isinstance(func, torch._ops.OpOverload):
            return
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs))[:1]:
                self._known.pop(tensor, None)  # pyright: ignore[reportArgumentType]  # only fake ones are there
            return
        outputs = [(at, tensor) for at, tensor in enumerate(tree_leaves(result)) if isinstance(tensor, FakeTensor)]
        small = all(not tensor._has_symbolic_sizes_strides and tensor.numel() <= LARGEST for _, tensor in outputs)
        if not outputs or not small or not _depends_on_arguments_alone(func):
            return
        parts = self._parts(func, _tensors((args, kwargs)))
        if parts is None or _has_symbols((args, kwargs)):
            return
        call = _recipe(func, args, kwargs)
        try:
            with no_dispatch(), torch._C._DisablePythonDispatcher(), torch.no_grad():
                real = call([part.value for part in parts])
        except Exception:  # the real kernel refuses arguments that the fake one accepted
            return
        is_tensor = isinstance(real, torch.Tensor)
        for at, tensor in outputs:
            value = real if is_tensor else real[at]
            self._known[tensor] = Known(value, call=call, parts=parts, position=None if is_tensor else at)

    def _parts(self, func: Any, tensors: Sequence[torch.Tensor]) -> tuple[Known, ...] | None:
        """Return the known values of an op's tensor arguments, or None if any is unknown."""
        parts: list[Known] = []
        for tensor in tensors:
            known = self._known.get(tensor) if isinstance(tensor, FakeTensor) else None
            if known is None and func in _LIFTS and not isinstance(tensor, FakeTensor):
                known = Known(tensor)  # a constant from Python's numbers
            if known is None:
                return None
            parts.append(known)
        return tuple(parts)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _has_symbols(arguments: Any) -> bool:
    """Return whether any argument has a symbolic size, which computing real values would specialize."""
    return any(
        isinstance(leaf, torch.SymInt) or (isinstance(leaf, FakeTensor) and leaf._has_symbolic_sizes_strides)
        for leaf in tree_leaves(arguments)
    )


def _depends_on_arguments_alone(func: Any) -> bool:
    """Return whether an op of ATen computes its result from its arguments alone: it draws no random numbers, and its
    result is initialized."""
    name = func._schema.name
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in name and name.startswith("aten::")


def _recipe(func: Any, args: Any, kwargs: Any) -> Callable[[list[Any]], Any]:
    """Return a call of an op as a function of its tensor arguments, to repeat it with other tensors. Keeps no tensor
    alive."""
    numbers = itertools.count()
    args, kwargs = tree_map(lambda x: _Place(next(numbers)) if isinstance(x, torch.Tensor) else x, (args, kwargs))

    def call(tensors: list[Any]) -> Any:
        """Repeat the call with these tensors in place of its tensor arguments, in order."""
        positional, named = tree_map(lambda x: tensors[x.at] if isinstance(x, _Place) else x, (args, kwargs))
        return func(*positional, **named)

    return call


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for tensor argument number ``at`` of a call."""

    at: int


def _input_of(known: Known) -> int | None:
    """Return the first input that the values depend on, or None."""
    stack, seen = [known], set[int]()
    while stack:
        current = stack.pop()
        if current.input is not None:
            return current.input
        if id(current) not in seen:
            seen.add(id(current))
            stack.extend(current.parts)
    return None
