"""The same step without activation checkpoints, or with one for each block instead of one around all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan import _torch


class CheckpointFree:
    """What a recording without checkpoints met: how many there were, and how many of them are reentrant."""

    def __init__(self) -> None:
        self.all = self.reentrant = 0

    def installed(self) -> AbstractContextManager[None]:
        """Enter it around the recording."""
        return _torch.without_checkpoints(self._around)

    @contextmanager
    def _around(self, function: Callable[..., Any], reentrant: bool) -> Iterator[None]:
        self.all += 1
        self.reentrant += reentrant
        yield


class Blockwise:
    """Moves the checkpoint around a model to each block of its longest list of modules."""

    def __init__(self) -> None:
        self.blocks: set[str] = set()
        """Paths of the blocks within what was checkpointed."""
        self._kept: set[Callable[..., Any]] = set()

    def installed(self) -> AbstractContextManager[None]:
        """Enter it around the recording."""
        return _torch.without_checkpoints(self._around, lambda function: function in self._kept)

    @contextmanager
    def _around(self, function: Callable[..., Any], reentrant: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for path, block in _blocks(function).items():
                self.blocks.add(path)
                forward = block.forward
                self._kept.add(forward)
                call = partial(checkpoint, forward, use_reentrant=False)
                stack.enter_context(_torch.patched(block, forward=call))
            yield


def _blocks(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """Return the modules of the list with the most parameters, by their paths below what a function calls."""
    lists: list[dict[str, nn.Module]] = []
    for root in _modules_of(function):
        for path, module in root.named_modules():
            if isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > 1:
                lists.append({f"{path}.{name}" if path else name: child for name, child in module.named_children()})
    sized = [{path: block for path, block in blocks.items() if _size(block)} for blocks in lists]
    most = max(sized, key=lambda blocks: sum(map(_size, blocks.values())), default={})
    return most if len(most) > 1 else {}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a checkpointed function is, is a method of, or refers to as a closure."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, partial):
        return _modules_of(function.func)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [value for value in cells if isinstance(value, nn.Module)]
