"""Calls of torch functions in a trace: what each read and returned, to recognize groups of them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan import _torch
from memplan.planning.capture.changed_tensors import ChangedTensors
from memplan.planning.graph.joint_graph import Ref, refs
from memplan.planning.graph.tensor_like import Like

OUTPUT = -1
"""Reader of what the traced model returns, in place of the number of a call."""
_HOOKS = frozenset(("register_hook", "retain_grad"))
_CANONICAL_NAMES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "rmul": "mul", "multiply": "mul", "radd": "add",
    "rtruediv": "rdiv",
}  # fmt: skip
"""Name of a torch function, or of an operator without its underscores -> the name that it is logged by."""


@dataclass(frozen=True, slots=True)
class LoggedTensor:
    """A tensor of a trace. A tensor that is changed in place counts as a new one from then on, with its own number."""

    like: Like
    requires_grad: bool
    producer_number: int | None
    """Number of the call that returned it; None for parameters, buffers, inputs and constants."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """A call of a torch function."""

    number: int
    name: str
    """Name of the function: ``mul`` for ``torch.mul``, ``Tensor.mul`` and ``*``; empty if it is not torch's own."""
    args: tuple[Any, ...]
    """Its arguments, with a Ref to the tensor's number in the log in place of tensors."""
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]
    """Numbers of the tensors that it changes in place, then of those that it returns and that are new."""
    in_place: bool
    """Whether it changes an operand."""
    autocast: tuple[bool, torch.dtype | None]
    """Whether autocast is on, and its dtype."""
    layer: str

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the tensors among its arguments, in order."""
        return tuple(refs((self.args, dict(self.kwargs))))

    def named(self, names: Sequence[str]) -> dict[str, Any]:
        """Return its arguments by name. ``names``: of the function's parameters, in order."""
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


class CallLog:
    """The calls of the last pass of a trace. Autocast counts on ``device``, the type of the step's device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin a pass of the trace."""
        self.tensors: list[LoggedTensor] = []
        self.calls: dict[int, LoggedCall] = {}
        self.readers: defaultdict[int, set[int]] = defaultdict(set)
        """By number of a tensor: the numbers of the calls that read it, and `OUTPUT` if the model returns it."""
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """id() of a tensor -> (the tensor, its number in `tensors`)."""

    def call(
        self, number: int, func: Callable[..., Any], args: Any, kwargs: Any, layer: str, run: Callable[[], Any]
    ) -> Any:
        """Run a call of a torch function and log it. ``run``: returns the result of the function."""
        arguments, keywords = _torch.tree_map(self._reference, (tuple(args), dict(kwargs)))
        operands = ChangedTensors(func, args, kwargs)
        result = run()
        changed = operands.changed_operands()
        name, in_place = name_of(func), bool(changed)
        results = [self._add(tensor, number) for tensor in changed]
        for leaf in _torch.tree_leaves(result):
            if isinstance(leaf, Tensor) and self._number(leaf) is None:  # no operand that is returned as it is
                results.append(self._add(leaf, number))
        # A call that returns no new tensor, such as x.shape or a cast to the same dtype, does not count as a reader.
        if results or name in _HOOKS:
            for tensor in refs((arguments, keywords)):
                self.readers[tensor].add(number)
        autocast_enabled = torch.is_autocast_enabled(self._device)
        autocast = autocast_enabled, torch.get_autocast_dtype(self._device) if autocast_enabled else None
        self.calls[number] = LoggedCall(number, name, arguments, keywords, tuple(results), in_place, autocast, layer)
        return result

    def returned(self, outputs: Sequence[Tensor]) -> None:
        """Note what the traced model returns."""
        for output in outputs:
            number = self._number(output)
            if number is not None:
                self.readers[number].add(OUTPUT)

    def producer_of(self, tensor: int) -> LoggedCall | None:
        """Return the call that returned a tensor or changed it in place last; None if no call of the trace did."""
        call = self.tensors[tensor].producer_number
        return None if call is None else self.calls[call]

    def _reference(self, leaf: Any) -> Any:
        """Return a `Ref` for a tensor, which is added if it is new; other values unchanged."""
        if not isinstance(leaf, Tensor):
            return leaf
        number = self._number(leaf)
        return Ref(self._add(leaf, None) if number is None else number)

    def _number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None if it is new. Dead tensors, whose id may be reused, do not count."""
        reference, number = self._numbers.get(id(tensor), (None, None))
        return number if reference is not None and reference() is tensor else None

    def _add(self, tensor: Tensor, call: int | None) -> int:
        """Add a tensor, and return its number. ``call``: the call that returned it; None: it is from outside."""
        number = len(self.tensors)
        self._numbers[id(tensor)] = weakref.ref(tensor), number
        like = Like(tuple(tensor.shape), _strides(tensor), tensor.dtype, tensor.device)
        self.tensors.append(LoggedTensor(like, tensor.requires_grad, call))
        return number


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def name_of(func: Callable[..., Any]) -> str:
    """Return the name that a call of this function is logged by (see `LoggedCall.name`)."""
    if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
        return ""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    return _CANONICAL_NAMES.get(name, name)
