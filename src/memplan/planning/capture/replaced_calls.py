"""Trace groups of calls as an op of `memplan.kernels` each.

The calls of a group run as usual, and their operands are noted. The kernel's result replaces that of the last call, so
that nothing reads the results of the calls, and their ops are not part of the traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from memplan import _torch
from memplan.planning.capture.call_log import name_of
from memplan.planning.ops.kernel_group import Group, Operand

UPDATED_OPERANDS = frozenset(("running_mean", "running_var"))
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
        self._group_by_last_call = {group.last: group for group in groups}
        self._operands_by_call: dict[int, list[tuple[Group, Operand]]] = {}
        """Number of a call -> the operands of groups that it reads."""
        self._group_by_reshape = {number: group for group in groups for number in group.reshapes}
        """Number of a call that reshapes in the middle of a group -> the group."""
        for group in groups:
            for operand in group.operands:
                self._operands_by_call.setdefault(operand.call, []).append((group, operand))
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin a pass of the trace."""
        self._tensors: dict[int, dict[str, Tensor]] = {}
        """Number of a group's last call -> its operands so far, by name."""
        self._replaced = set[int]()
        """Numbers of the last calls that kernels replaced in this pass."""

    def refuse_missing_calls(self) -> None:
        """Check that every group was replaced in the last pass. Raises GroupGone."""
        for group in self.groups:
            if group.last not in self._replaced:
                raise GroupGone("some of the calls are missing", group)

    def call(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a torch function of the traced model, or the kernel in its place."""
        if number in self._operands_by_call:
            leaves = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for group, operand in self._operands_by_call[number]:
                if operand.leaf >= len(leaves):
                    raise GroupGone(f"call {number} reads fewer tensors", group)
                self._tensors.setdefault(group.last, {})[operand.name] = leaves[operand.leaf]
                if operand.name in UPDATED_OPERANDS:  # the kernel changes it, so the call must not
                    args, kwargs = _with_copy(leaves[operand.leaf], args, kwargs)
        if number in self._group_by_reshape:
            self._reshape_hidden(self._group_by_reshape[number], func, args, kwargs)
        group = self._group_by_last_call.get(number)
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

    def _reshape_hidden(self, group: Group, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Apply a call that picks or reshapes the rows of a linear layer's result to the layer's input instead: the
        kernel computes the layer."""
        tensors = self._tensors.get(group.last, {})
        hidden = tensors.get("hidden")
        if hidden is None:
            raise GroupGone("a linear layer is missing", group)
        try:
            if name_of(func) in ("view", "reshape"):
                sizes = list(args[1:]) or list(kwargs.values())  # view(2, -1), view((2, -1)) or view(size=(2, -1))
                sizes = list(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
                tensors["hidden"] = hidden.reshape(*sizes[:-1], hidden.shape[-1])
            else:
                tensors["hidden"] = func(hidden, *args[1:], **kwargs)
        except Exception as error:
            raise GroupGone(f"{name_of(func)} does not take a linear layer's input: {error}", group) from error


def _with_copy(tensor: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call with a copy instead of a tensor, so that the call does not change the tensor."""
    copy = tensor.clone()
    return _torch.tree_map(lambda leaf: copy if leaf is tensor else leaf, (tuple(args), dict(kwargs)))
