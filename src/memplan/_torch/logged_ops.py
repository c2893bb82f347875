"""The ops of a part of the forward pass, as `torch.utils.checkpoint` sees them, with their work on this rank.

Seen in torch 2.11, 2.13 and 2.14: `TorchDispatchMode` of ``torch/utils/_python_dispatch.py``;
``DTensor._local_tensor``.
A mode sees an op on a `DTensor` whole, before the `DTensor` runs it on local tensors and communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memplan._torch.flops import flop_formula
from memplan._torch.subclasses import wraps_tensors
from memplan._torch.tensors import storage_key

COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor")
"""Namespaces of ops that communicate."""
_IGNORED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})
"""Ops that a selective checkpoint does not ask its policy about (``SAC_IGNORED_OPS``)."""


@dataclass(frozen=True, slots=True)
class LoggedOp:
    """An op, and its work on this rank."""

    name: str
    """As in ``aten.mm.default``."""
    made: tuple[tuple[int, int], ...]
    """Key and bytes of each storage that it allocates."""
    changed: tuple[int, ...]
    """Keys of the storages that it writes to."""
    bytes_moved: int
    """Bytes that it reads and writes."""
    flops: int
    dtype: str
    is_random: bool
    """Whether it draws random numbers."""
    communicates: bool
    """Whether it is a collective, or calls one."""


class OpLog(TorchDispatchMode):
    """Logs each op in `ops`. Keeps the results alive, so that no two storages have the same key."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[LoggedOp] = []
        self._alive: list[Any] = []
        """Results of all ops so far."""
        self._keys = set[int]()
        """Keys of their storages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _LocalOps() as local:
            result = func(*args, **(kwargs or {}))
        if func in _IGNORED or not isinstance(func, torch._ops.OpOverload):
            return result
        self._alive.append(result)
        storages = {storage_key(tensor.untyped_storage()): tensor.untyped_storage() for tensor in _tensors(result)}
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        named |= kwargs or {}
        changed = [
            storage_key(tensor.untyped_storage())
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(named.get(argument.name))
        ]
        # attention is marked as random also where it drops nothing
        is_random = torch.Tag.nondeterministic_seeded in func.tags and named.get("dropout_p", 1) != 0
        read = {storage_key(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        made = tuple((key, storage.nbytes()) for key, storage in storages.items() if key not in self._keys | read)
        self._keys |= storages.keys()
        operands = _tensors((args, kwargs, result))
        self.ops.append(LoggedOp(
            str(func), made, tuple(changed), local.bytes_moved, local.flops,
            str(operands[0].dtype).removeprefix("torch.") if operands else "float32",
            is_random, local.communicates or func.namespace in COLLECTIVES,
        ))  # fmt: skip
        return result


class _LocalOps(TorchDispatchMode):
    """Adds up the work of ops on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_moved = self.flops = 0
        """Bytes of operands and results of all ops but views, and the ops' floating-point operations."""
        self.communicates = False
        """Whether any op is a collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(wraps_tensors, types)):
            return NotImplemented  # the wrapper dispatches local ops, which come here again
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):
            return result
        self.communicates |= func.namespace in COLLECTIVES
        if not any(value.alias_info for value in func._schema.returns) or func._schema.is_mutable:  # no view
            self.bytes_moved += sum(tensor.nbytes for tensor in _tensors((args, kwargs, result)))
        formula = flop_formula(str(func))
        self.flops += int(formula(*args, **(kwargs or {}), out_val=result)) if formula is not None else 0
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments, local ones of a `DTensor`."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [getattr(leaf, "_local_tensor", leaf) for leaf in leaves]


def storages_of(values: Any) -> dict[int, int]:
    """Return key -> bytes of the storages of the tensors in nested arguments, local ones of a `DTensor`."""
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return {storage_key(storage): storage.nbytes() for storage in storages}
