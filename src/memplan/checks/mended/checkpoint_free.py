"""Record a step without its activation checkpoints, or with a checkpoint for each block of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan import _torch


class CheckpointFree:
    """Disables checkpoints during a recording, and counts them: all, and those that are reentrant."""

    def __init__(self) -> None:
        self.total = self.reentrant = 0
        """Number of checkpoints so far, and of the reentrant among them."""

    def installed(self) -> AbstractContextManager[None]:
        """Return the context for the recording."""
        return _torch.without_checkpoints(self._count)

    @contextmanager
    def _count(self, function: Callable[..., Any], reentrant: bool) -> Iterator[None]:
        """Count a checkpoint, whose function runs within this context."""
        self.total += 1
        self.reentrant += reentrant
        yield


class Blockwise:
    """Replaces the checkpoint of a model by a checkpoint of each block in its largest list of modules."""

    def __init__(self) -> None:
        self.blocks: set[str] = set()
        """Paths of the blocks within the function that was checkpointed."""
        self._block_forwards: set[Callable[..., Any]] = set()
        """Functions of the blocks, whose checkpoints stay."""

    def installed(self) -> AbstractContextManager[None]:
        """Return the context for the recording: checkpoints are left out, except for those of blocks."""
        return _torch.without_checkpoints(self._checkpoint_blocks, lambda function: function in self._block_forwards)

    @contextmanager
    def _checkpoint_blocks(self, function: Callable[..., Any], reentrant: bool) -> Iterator[None]:
        """Within this context, in which a checkpointed function runs without its checkpoint, checkpoint each block,
        whether its own checkpoint was ``reentrant`` or not."""
        with ExitStack() as stack:
            for path, block in _blocks(function).items():
                self.blocks.add(path)
                forward = block.forward
                self._block_forwards.add(forward)
                call = partial(checkpoint, forward, use_reentrant=False)
                stack.enter_context(_torch.patched(block, forward=call))
            yield


def _blocks(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """Return the blocks of a checkpointed function's model, by their paths; {} if there are fewer than 2. They are the
    members with parameters of the `nn.ModuleList` or `nn.Sequential` that has the most parameters."""
    lists: list[dict[str, nn.Module]] = []
    for root in _modules_of(function):
        for path, module in root.named_modules():
            if isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > 1:
                prefix = f"{path}." if path else ""
                lists.append({f"{prefix}{name}": child for name, child in module.named_children() if _elements(child)})
    largest = max(lists, key=lambda blocks: sum(map(_elements, blocks.values())), default={})
    return largest if len(largest) > 1 else {}


def _elements(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a checkpointed function runs: itself, its object as a method, or those in its closure."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, partial):
        return _modules_of(function.func)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [value for value in cells if isinstance(value, nn.Module)]
