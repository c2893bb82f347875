"""Checkpoint a module's calls selectively: results of some ops are saved, all others are recomputed in backward.

For modules whose call has no graph: they compute with `DTensor`s, or branch on values. The choice is a policy of
`torch.utils.checkpoint.create_selective_checkpoint_contexts`. What communicates is always saved, so that backward
communicates as without a checkpoint. Random results are all saved, or all recomputed where one is drawn in place: a
checkpoint restores the random state, and a skipped draw would shift later ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memplan import _torch
from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan._text import format_seconds
from memplan.planning.graph.roofline import OWN, Rates, Work
from memplan.rewriting.calls import Calls


@dataclass(frozen=True)
class CheckpointOp:
    """An op of a module's forward pass."""

    name: str
    """As in ``aten.mm.default``."""
    occurrence: int
    """Number of earlier ops of this name in the call."""
    bytes: int
    """Bytes that saving its results holds; 0 for views and ops in place."""
    seconds: float
    """Predicted seconds to run it again."""
    is_saved: bool | None
    """Whether its results must be saved, or recomputed; None: either."""


@dataclass(frozen=True)
class CheckpointPlan(Printed):
    """Which results of a module's forward ops are saved for backward. The others are recomputed."""

    ops: tuple[CheckpointOp, ...]
    """All ops, in order; each with `is_saved` decided."""

    @property
    def saved_bytes(self) -> int:
        """Bytes held between the passes, besides the module's inputs."""
        return sum(op.bytes for op in self.ops if op.is_saved)

    @property
    def seconds(self) -> float:
        """Predicted seconds of recomputation in a call's backward pass."""
        return sum(op.seconds for op in self.ops if not op.is_saved)

    @property
    def fingerprint(self) -> str:
        """Hash of ops and decisions."""
        text = repr([(op.name, op.occurrence, op.is_saved) for op in self.ops])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def summary(self) -> str:
        """The plan in a sentence."""
        saved = sum(bool(op.is_saved) for op in self.ops)
        return (
            f"A selective checkpoint: results of {saved} of {len(self.ops)} ops are saved "
            f"({format_bytes(self.saved_bytes)}), the others recomputed, which takes about "
            f"{format_seconds(self.seconds)} a call."
        )

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True)
class CheckpointedCall:
    """A module's forward pass, for a choice of what to save."""

    ops: tuple[CheckpointOp, ...]
    saved: int
    """Bytes held between the passes without a checkpoint."""
    inputs: int
    """Bytes of the inputs, which a checkpoint holds."""
    obstacle: str = ""
    """Why the call cannot be checkpointed; empty if it can."""

    @property
    def fingerprint(self) -> str:
        """Hash of the ops' names, which ranks have in common: their shards can differ in size."""
        text = repr([op.name for op in self.ops])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def plan(self, held: int) -> CheckpointPlan:
        """Return a plan that holds at most ``held`` bytes between the passes, inputs included: results are saved in the
        order of the seconds that their ops take for a byte, as long as they fit. If no plan does, the one that holds
        least."""
        left = held - self.inputs - sum(op.bytes for op in self.ops if op.is_saved)
        chosen = set[int]()
        free = [(op.seconds / max(1, op.bytes), -index) for index, op in enumerate(self.ops) if op.is_saved is None]
        for _, negative in sorted(free, reverse=True):
            if self.ops[-negative].bytes <= left:
                chosen.add(-negative)
                left -= self.ops[-negative].bytes
        decided = (replace(op, is_saved=bool(op.is_saved) or index in chosen) for index, op in enumerate(self.ops))
        return CheckpointPlan(tuple(decided))


@contextmanager
def logged_calls(module: nn.Module, rates: Rates) -> Iterator[list[CheckpointedCall]]:
    """Within this context each forward call of ``module`` is appended to the list, as it runs. Hooks on the module run
    as before; ``rates`` are for the seconds of ops."""
    calls: list[CheckpointedCall] = []
    forward = module.forward

    def log(*args: Any, **kwargs: Any) -> Any:
        """Run a forward call of the module, and append its ops and what autograd saves to the list."""
        weights = _torch.storages_of((list(module.parameters()), list(module.buffers())))
        packed: dict[int, int] = {}  # key of a storage that autograd saves -> bytes
        alive: list[Any] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            alive.append(tensor)  # no two storages have the same key
            packed.update(_torch.storages_of(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _torch.OpLog() as ops:
            result = forward(*args, **kwargs)
        alive.clear()  # the graph refers to `pack`, which would otherwise keep the graph's tensors alive
        saved = sum(size for key, size in packed.items() if key not in weights)
        inputs = sum(_torch.storages_of((args, kwargs)).values())
        calls.append(_checkpointed_call(ops.ops, packed, saved, inputs, rates))
        return result

    with _torch.patched(module, forward=log):
        yield calls


def _checkpointed_call(
    logged: list[_torch.LoggedOp], packed: Mapping[int, int], saved: int, inputs: int, rates: Rates
) -> CheckpointedCall:
    """Decide which ops' results must be saved or recomputed, and find what prevents a checkpoint of the call.
    ``packed`` has the bytes of the storages that autograd saves, by key; ``saved``, ``inputs``: see
    `CheckpointedCall`."""
    # the last op that is recomputed: a checkpoint stops once it has all that backward reads
    reached = -1
    for index, op in enumerate(logged):
        if any(key in packed for key in (*op.changed, *(key for key, _ in op.made))):
            reached = index
    counts = Counter[str]()
    maker: dict[int, int] = {}
    ops: list[CheckpointOp] = []
    obstacle = ""
    draws_in_place = any(op.is_random and op.changed for op in logged)
    for index, op in enumerate(logged):
        if op.communicates and (op.changed or op.name.startswith("c10d.")):  # whose schemas name no writes
            obstacle = obstacle or f"{op.name} communicates in place"
        for key in op.changed:
            changed_op = maker.get(key)  # index of the op whose result is changed
            if changed_op is None:
                obstacle = obstacle or f"{op.name} changes a tensor that was there before, which would happen twice"
            elif ops[changed_op].is_saved:
                obstacle = obstacle or f"{op.name} changes the result of {ops[changed_op].name}, which must be saved"
            else:
                ops[changed_op] = replace(ops[changed_op], is_saved=False)
        maker.update((key, index) for key, _ in op.made)
        size = sum(size for _, size in op.made)
        work = Work(op.flops, op.bytes_moved, op.dtype, foreign=op.name.partition(".")[0] not in OWN)
        seconds = rates.seconds(work) if op.bytes_moved else 0.0
        is_saved = None if size else False  # None: the plan decides
        if op.communicates or op.is_random:
            is_saved = op.communicates or not draws_in_place
        if index > reached:
            is_saved, seconds = False, 0.0
        ops.append(CheckpointOp(op.name, counts[op.name], size, seconds, is_saved))
        counts[op.name] += 1
    return CheckpointedCall(tuple(ops), saved, inputs, obstacle)


class _Policy:
    """Saves the results of the ops that a plan names, and of collectives that it does not know, as a call with other
    shapes or branches may have them. Each call of the module has its own."""

    def __init__(self, is_saved: Mapping[tuple[str, int], bool]) -> None:
        self._is_saved = is_saved
        """Whether the plan saves the results of an op, by its name and the number of earlier ops of that name."""
        self._counts = Counter[tuple[bool, str]]()
        """Calls so far, by whether they were recomputed, and name."""

    def __call__(self, context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = str(func)
        count = self._counts[context.is_recompute, name]
        self._counts[context.is_recompute, name] += 1
        saves = self._is_saved.get((name, count), func.namespace in _torch.COLLECTIVES)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(module: nn.Module, plan: CheckpointPlan, calls: Calls) -> Callable[[], None]:
    """Make the forward calls of a module save what ``plan`` says, counted by ``calls``.

    Hooks on the module run as before, outside of the checkpoint. Returns a function that undoes it.
    """
    is_saved = {(op.name, op.occurrence): bool(op.is_saved) for op in plan.ops}

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_Policy(is_saved))  # pyright: ignore[reportArgumentType]

    def call(*args: Any, **kwargs: Any) -> Any:
        forward = module.forward

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*tensors, *module.parameters())):
                calls.without_grad()
                return forward(*args, **kwargs)
            calls.planned()
            return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)

        with _torch.patched(module, forward=checkpointed):
            return _torch.original_call(module)(*args, **kwargs)

    return _torch.set_call(module, call)
