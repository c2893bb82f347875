"""The repeated blocks of a module."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a module: children of `nn.ModuleList` or `nn.Sequential`, all of one class."""

    paths: tuple[str, ...]
    """Of the lists."""
    number: int
    alike: bool
    """Whether they are in one list and their parameters and buffers have the same names, sizes and dtypes."""

    def of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks in a module."""
        return [child for path in self.paths for child in model.get_submodule(path).children()]


def blocks_of(model: nn.Module) -> Blocks | None:
    """Return the blocks that hold the most parameters; None if no list has two modules, all of one class."""
    lists = defaultdict[type[nn.Module], list[str]](list)
    sizes = defaultdict[type[nn.Module], int](int)
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            kinds = {type(child) for child in module}
            if len(kinds) == 1:
                kind = kinds.pop()
                lists[kind].append(path)
                sizes[kind] += sum(parameter.numel() for parameter in module.parameters())
    kind = max(sizes, key=lambda kind: sizes[kind], default=None)
    if kind is None or not sizes[kind]:
        return None
    blocks = [block for path in lists[kind] for block in model.get_submodule(path).children()]
    return Blocks(
        tuple(lists[kind]), len(blocks), len(lists[kind]) == 1 and len({_form(block) for block in blocks}) == 1
    )


def _form(block: nn.Module) -> tuple[tuple[object, ...], ...]:
    """Return what a block must share with others to take as many bytes: names, shapes and dtypes of its tensors."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    return tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)


def shortened(model: nn.Module, blocks: Blocks, number: int) -> nn.Module:
    """Keep the first ``number`` blocks of a module with one list of them, and return it."""
    (path,) = blocks.paths
    container = model.get_submodule(path)
    assert isinstance(container, (nn.ModuleList, nn.Sequential))
    del container[number:]
    return model


def checkpointed_blocks(model: nn.Module, blocks: Blocks | None) -> nn.Module:
    """Checkpoint each block of a module, or all of it where it has none, and return it.

    A model of transformers does so by itself: it also leaves its cache of keys and values empty.
    """
    if hasattr(model, "gradient_checkpointing_enable"):
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
    for child in [model] if blocks is None else blocks.of(model):
        child.forward = functools.partial(checkpoint, child.forward, use_reentrant=False)
    return model
