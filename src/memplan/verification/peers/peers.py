"""Run any module with PyTorch's own ways to use less memory: checkpoints, torch.compile, autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan import _torch

Group = Literal["eager", "compiled", "lossy"]
BUDGETS = tuple(round(0.1 * tenth, 1) for tenth in range(9, -1, -1))
"""Values of ``activation_memory_budget``; 1 is `torch.compile`'s default."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run a step."""

    name: str
    checkpointed: bool = False
    """Whether each block is recomputed in the backward pass, by `torch.utils.checkpoint`."""
    compiled: bool = False
    memory_budget: float = 1.0
    """``activation_memory_budget`` of `torch.compile`."""
    autocast: torch.dtype | None = None

    @property
    def group(self) -> Group:
        """Group for comparisons: lossy peers are not compared with others."""
        return "lossy" if self.autocast is not None else "compiled" if self.compiled else "eager"


EAGER = Peer("eager")
COMPILED = Peer("torch.compile", compiled=True)


def peers(*, blocks: bool, budgets: Sequence[float] = BUDGETS, autocast: torch.dtype | None = None) -> tuple[Peer, ...]:
    """Return the peers in the step's own precision, eager mode first; then those under autocast.

    Args:
        blocks: whether the model has blocks to checkpoint.
        budgets: values of ``activation_memory_budget``.
        autocast: dtype; None: no peers under autocast.
    """
    checkpoints = (Peer("checkpoint per block", checkpointed=True),) if blocks else ()
    both = (Peer("torch.compile, checkpoint per block", checkpointed=True, compiled=True),) if blocks else ()
    tried = (Peer(f"torch.compile, memory budget {share}", compiled=True, memory_budget=share) for share in budgets)
    exact = EAGER, *checkpoints, COMPILED, *both, *tried
    if autocast is None:
        return exact
    low = f"{str(autocast).removeprefix('torch.')} autocast"
    again = (replace(one, name=f"{low}, {one.name}", autocast=autocast) for one in (*checkpoints, COMPILED))
    return *exact, Peer(low, autocast=autocast), *again


def as_peer(call: Callable[..., Any], peer: Peer, blocks: Sequence[nn.Module] = (), device: str = "cpu") -> Any:
    """Return ``call`` as this peer runs it. Nothing is compiled before the first call.

    Args:
        call: the step: forward and, to have it compiled, too, the loss.
        peer: how.
        blocks: the modules in ``call`` that are checkpointed, each by itself, where the peer does that.
        device: torch's name of the device to autocast on.
    """
    run = torch.compile(lambda *args, **kwargs: call(*args, **kwargs)) if peer.compiled else call
    again = {block: functools.partial(checkpoint, block.forward, use_reentrant=False) for block in blocks}

    @functools.wraps(call, updated=())
    def as_it_does(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as around:
            if peer.compiled:
                around.enter_context(_torch.memory_budget(peer.memory_budget))
            if peer.checkpointed:
                around.enter_context(_in_place(again))
            if peer.autocast is not None:
                around.enter_context(torch.autocast(device, dtype=peer.autocast))
            return run(*args, **kwargs)

    return as_it_does


@contextmanager
def _in_place(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the modules' ``forward``: by the same objects each time, as Dynamo compiles anew for another one."""
    with ExitStack() as undo:
        for module, forward in forwards.items():
            undo.enter_context(_torch.patched(module, forward=forward))
        yield


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Find the repeated parts of a module that people would checkpoint, the outermost ones: two or more children of one
    class, which have children themselves. Of containers, only sequences of single layers are parts; others are
    searched."""
    found: dict[int, nn.Module] = {}
    _find_blocks(module, found, set())
    return list(found.values())


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _find_blocks(module: nn.Module, found: dict[int, nn.Module], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    children = list(module.children())
    alike: dict[type, list[nn.Module]] = {}
    for child in children:
        if _is_part(child):
            alike.setdefault(type(child), []).append(child)
    for child in children:
        if len(alike.get(type(child), ())) > 1 and _is_part(child):
            found[id(child)] = child
        else:
            _find_blocks(child, found, seen)


def _is_part(module: nn.Module) -> bool:
    children = list(module.children())
    if not children or next(module.parameters(), None) is None:
        return False
    if type(module) not in _CONTAINERS:
        return True
    return type(module) is nn.Sequential and len(children) > 1 and not any(any(child.children()) for child in children)
