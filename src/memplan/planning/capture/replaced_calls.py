"""Trace groups of calls as an op of `memplan.kernels` each.

The calls of a group run as usual, and what they read is noted. The kernel's result takes the place of the last call's,
so that nothing reads what the calls returned, and their ops are not part of the traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from memplan import _torch
from memplan.planning.capture.call_log import name_of
from memplan.planning.ops.kernel_group import Group, Operand

UPDATED = frozenset(("running_mean", "running_var"))
"""Operands that a kernel changes in place, as the call that it replaces would."""


class GroupGone(Exception):
    """The calls of a group are others than when it was recognized; the message says where."""

    def __init__(self, reason: str, group: Group) -> None:
        super().__init__(reason)
        self.group = group


class ReplacedCalls:
    """The groups of a trace, in each of its passes."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._last = {group.last: group for group in groups}
        """By number of the last call of a group: the group."""
        self._operands: dict[int, list[tuple[Group, Operand]]] = {}
        """By number of the call that reads them."""
        self._reshapes = {number: group for group in groups for number in group.reshapes}
        """By number of a call that reshapes in the middle of a group: the group."""
        for group in groups:
            for operand in group.operands:
                self._operands.setdefault(operand.call, []).append((group, operand))
        self.begin()

    def begin(self) -> None:
        """Begin a pass of the trace."""
        self._tensors: dict[int, dict[str, Tensor]] = {}
        """Operands by name, by the group's last call."""
        self._replaced = set[int]()

    def check(self) -> None:
        """Check that every group was replaced in the last pass. Raises GroupGone."""
        for group in self.groups:
            if group.last not in self._replaced:
                raise GroupGone("some of the calls are missing", group)

    def call(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a torch function of the traced model, or the kernel in its place."""
        if number in self._operands:
            leaves = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for group, operand in self._operands[number]:
                if operand.leaf >= len(leaves):
                    raise GroupGone(f"call {number} reads fewer tensors", group)
                self._tensors.setdefault(group.last, {})[operand.name] = leaves[operand.leaf]
                if operand.name in UPDATED:  # by the kernel, once
                    args, kwargs = _with_copy(leaves[operand.leaf], args, kwargs)
        if number in self._reshapes:
            self._reshape(self._reshapes[number], func, args, kwargs)
        group = self._last.get(number)
        if group is None:
            return func(*args, **kwargs)
        if name_of(func) != group.function:
            raise GroupGone(f"{name_of(func)} is in the place of {group.function}", group)
        self._replaced.add(number)
        # A call that draws does not run as well: the step would draw twice. Its result is like its first operand.
        leaves = _torch.tree_leaves((args, kwargs))
        expected = next(leaf for leaf in leaves if isinstance(leaf, Tensor)) if group.draws else func(*args, **kwargs)
        try:
            result = group.run(self._tensors.pop(group.last, {}))
        except Exception as error:
            raise GroupGone(f"{group.kernel} does not take its operands: {error}", group) from error
        if not isinstance(expected, Tensor) or result.shape != expected.shape:
            raise GroupGone(f"{group.kernel} returns another shape", group)
        return result.to(expected.dtype)

    def _reshape(self, group: Group, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Apply a call that picks or reshapes the rows of a linear layer's result to the layer's input."""
        tensors = self._tensors.get(group.last, {})
        hidden = tensors.get("hidden")
        if hidden is None:
            raise GroupGone("a linear layer is missing", group)
        try:
            if name_of(func) in ("view", "reshape"):
                sizes = list(args[1:]) or list(kwargs.values())
                sizes = list(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
                tensors["hidden"] = hidden.reshape(*sizes[:-1], hidden.shape[-1])
            else:
                tensors["hidden"] = func(hidden, *args[1:], **kwargs)
        except Exception as error:
            raise GroupGone(f"{name_of(func)} does not take a linear layer's input: {error}", group) from error


def _with_copy(tensor: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call with a copy in the place of a tensor, which the call then leaves as it is."""
    copy = tensor.clone()
    return _torch.tree_map(lambda leaf: copy if leaf is tensor else leaf, (tuple(args), dict(kwargs)))
