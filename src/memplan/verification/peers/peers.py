"""Run any module with PyTorch's own ways to use less memory: checkpoints, torch.compile, autocast."""

from __future__ import annotations

import functools
from collections import Counter
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
    """A way to run a step with PyTorch's own memory techniques."""

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
        if self.autocast is not None:
            return "lossy"
        return "compiled" if self.compiled else "eager"


EAGER = Peer("eager")
COMPILED = Peer("torch.compile", compiled=True)


def peers(*, blocks: bool, budgets: Sequence[float] = BUDGETS, autocast: torch.dtype | None = None) -> tuple[Peer, ...]:
    """Return the peers in the step's own precision, eager mode first; then those under autocast. ``blocks``: whether
    the model has blocks to checkpoint; ``budgets``: values of ``activation_memory_budget``."""
    checkpoints = (Peer("checkpoint per block", checkpointed=True),) if blocks else ()
    both = (Peer("torch.compile, checkpoint per block", checkpointed=True, compiled=True),) if blocks else ()
    budgeted = (Peer(f"torch.compile, memory budget {share}", compiled=True, memory_budget=share) for share in budgets)
    exact = EAGER, *checkpoints, COMPILED, *both, *budgeted
    if autocast is None:
        return exact
    name = f"{str(autocast).removeprefix('torch.')} autocast"
    lossy = (replace(peer, name=f"{name}, {peer.name}", autocast=autocast) for peer in (*checkpoints, COMPILED))
    return *exact, Peer(name, autocast=autocast), *lossy


def as_peer(call: Callable[..., Any], peer: Peer, blocks: Sequence[nn.Module] = (), device: str = "cpu") -> Any:
    """Return ``call`` as this peer runs it. Nothing is compiled before the first call. ``blocks`` are the modules in
    ``call`` that are checkpointed separately, if the peer checkpoints."""
    run = torch.compile(lambda *args, **kwargs: call(*args, **kwargs)) if peer.compiled else call
    checkpointed = {block: functools.partial(checkpoint, block.forward, use_reentrant=False) for block in blocks}

    @functools.wraps(call, updated=())
    def call_as_peer(*args: Any, **kwargs: Any) -> Any:
        """Run the step with the peer's techniques."""
        with ExitStack() as contexts:
            if peer.compiled:
                contexts.enter_context(_torch.memory_budget(peer.memory_budget))
            if peer.checkpointed:
                contexts.enter_context(_replacing_forwards(checkpointed))
            if peer.autocast is not None:
                contexts.enter_context(torch.autocast(device, dtype=peer.autocast))
            return run(*args, **kwargs)

    return call_as_peer


@contextmanager
def _replacing_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace ``forward`` of modules within this context. ``forwards``: the same functions in each call, so that Dynamo
    does not recompile."""
    with ExitStack() as undo:
        for module, forward in forwards.items():
            undo.enter_context(_torch.patched(module, forward=forward))
        yield


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a module, which people would checkpoint.

    Blocks are two or more children of the same class that have children themselves. Containers are searched, and are
    no blocks, except for sequences of single layers.
    """
    blocks: dict[int, nn.Module] = {}
    _find_blocks(module, blocks, set())
    return list(blocks.values())


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _find_blocks(module: nn.Module, blocks: dict[int, nn.Module], seen: set[int]) -> None:
    """Add the blocks among a module's children (repeated, with children of their own) to ``blocks``, by id(), and
    search the other children. ``seen``: ids of modules that were searched."""
    if id(module) in seen:
        return
    seen.add(id(module))
    children = list(module.children())
    classes = Counter(type(child) for child in children if _can_be_block(child))
    for child in children:
        if classes[type(child)] > 1 and _can_be_block(child):
            blocks[id(child)] = child
        else:
            _find_blocks(child, blocks, seen)


def _can_be_block(module: nn.Module) -> bool:
    """Return whether a module is a block if it is repeated: it has parameters and children, and is no container other
    than a sequence of layers without children."""
    children = list(module.children())
    if not children or next(module.parameters(), None) is None:
        return False
    if type(module) not in _CONTAINERS:
        return True
    return type(module) is nn.Sequential and len(children) > 1 and not any(any(child.children()) for child in children)
