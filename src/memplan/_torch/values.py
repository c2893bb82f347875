"""Values that are known while a step is traced: of tensors made of constants, and of small integer inputs.

Code reads them to branch (is this mask all ones? are these positions in order?). What is computed from constants alone
is the same in every call. What depends on inputs is a condition, under which alone the trace is right.

Seen in torch 2.11, 2.13 and 2.15: ``_local_scalar_dense`` reaches the fake mode for ``item()``, ``bool()`` and
``tolist()``; ``lift_fresh`` is what a tensor from Python's numbers passes first.
"""

from __future__ import annotations

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
"""Elements of a tensor whose values are followed."""
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor's values, and how they come about: from an input, or from an op (None for a constant)."""

    value: torch.Tensor
    input: int | None = None
    call: Callable[[list[Any]], Any] | None = None
    parts: tuple[Known, ...] = ()
    position: int | None = None

    def anew(self, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
        """Return the values with other inputs."""
        if id(self) not in memo:
            memo[id(self)] = self._computed(inputs, memo)
        return memo[id(self)]

    def _computed(self, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
        if self.input is not None:
            return inputs[self.input]
        if self.call is None:
            return self.value
        found = self.call([part.anew(inputs, memo) for part in self.parts])
        return found if self.position is None else found[self.position]


@dataclass(frozen=True)
class Condition:
    """A number that was read, and the input it depends on (the first of them)."""

    known: Known
    value: Any
    input: int

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether the number is the same for these inputs."""
        with torch.no_grad():
            return bool(self.known.anew(inputs, {}).item() == self.value)


class Values:
    """Follows known values through the ops of a trace."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self.conditions: list[Condition] = []
        """Conditions that were read and depend on an input."""

    def take(self, fake: Any, number: int, real: torch.Tensor) -> None:
        """Return an input whose values are known, where it has any and is a small one of integers or flags."""
        whole = not real.is_floating_point() and not real.is_complex()
        if whole and real.numel() <= LARGEST and not isinstance(real, FakeTensor):
            self._known[fake] = Known(real.detach(), input=number)

    def read(self, func: Any, args: Any) -> Any:
        """Return the number that is read; None where it is not known."""
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
        """Compute for real what an op makes, where all that it takes is known."""
        if not isinstance(func, torch._ops.OpOverload):
            return
        if func._schema.is_mutable:
            for one in _tensors((args, kwargs))[:1]:
                self._known.pop(one, None)  # pyright: ignore[reportArgumentType]  # only fake ones are there
            return
        made = [(at, one) for at, one in enumerate(tree_leaves(result)) if isinstance(one, FakeTensor)]
        if not made or not all(_is_small(one) for _, one in made) or not _follows(func):
            return
        parts = self._parts(func, _tensors((args, kwargs)))
        if parts is None or _has_symbols((args, kwargs)):
            return
        call = _recipe(func, args, kwargs)
        try:
            with no_dispatch(), torch._C._DisablePythonDispatcher(), torch.no_grad():
                real = call([part.value for part in parts])
        except Exception:  # a kernel that refuses what the fake one took: then its values are not known
            return
        whole = isinstance(real, torch.Tensor)
        for at, one in made:
            value = real if whole else real[at]
            self._known[one] = Known(value, call=call, parts=parts, position=None if whole else at)

    def _parts(self, func: Any, tensors: Sequence[torch.Tensor]) -> tuple[Known, ...] | None:
        found: list[Known] = []
        for one in tensors:
            known = self._known.get(one) if isinstance(one, FakeTensor) else None
            if known is None and func in _LIFTS and not isinstance(one, FakeTensor):
                known = Known(one)
            if known is None:
                return None
            found.append(known)
        return tuple(found)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]


def _is_small(made: FakeTensor) -> bool:
    return not made._has_symbolic_sizes_strides and made.numel() <= LARGEST


def _has_symbols(arguments: Any) -> bool:
    """Return whether a size is a symbol: a computation would turn it into a number."""
    return any(
        isinstance(one, torch.SymInt) or (isinstance(one, FakeTensor) and one._has_symbolic_sizes_strides)
        for one in tree_leaves(arguments)
    )


def _follows(func: Any) -> bool:
    name = func._schema.name
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in name and name.startswith("aten::")


def _recipe(func: Any, args: Any, kwargs: Any) -> Callable[[list[Any]], Any]:
    """Return the call as a function of its tensors; it keeps none of them."""
    places = iter(range(1 << 30))
    args, kwargs = tree_map(lambda one: _Place(next(places)) if isinstance(one, torch.Tensor) else one, (args, kwargs))

    def call(tensors: list[Any]) -> Any:
        given, named = tree_map(lambda one: tensors[one.at] if isinstance(one, _Place) else one, (args, kwargs))
        return func(*given, **named)

    return call


@dataclass(frozen=True, slots=True)
class _Place:
    at: int


def _input_of(known: Known) -> int | None:
    """Return an input that it depends on."""
    stack, seen = [known], set[int]()
    while stack:
        one = stack.pop()
        if one.input is not None:
            return one.input
        if id(one) not in seen:
            seen.add(id(one))
            stack.extend(one.parts)
    return None
