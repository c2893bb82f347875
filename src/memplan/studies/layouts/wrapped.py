"""A module's training step on one rank of a layout."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan.errors import TargetError
from memplan.studies.layouts.layout import Layout
from memplan.trace.step import CUDA, StepOptions


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
    """Return the blocks that hold the most parameters; None where no list has two modules of one class."""
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
    """Return what blocks that take as many bytes have in common."""
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


@dataclass(frozen=True)
class Wrapped:
    """A callable that makes a module as one rank holds it.

    Weights are converted first, as a rank's optimizer updates shards of them.
    """

    make: Callable[[], Any]
    layout: Layout
    dtype: torch.dtype | None
    compute: torch.dtype | None
    """Dtype that sharded weights are gathered in, with gradients reduced in float32; None: their own."""
    blocks: Blocks | None
    number: int | None
    """How many blocks to keep; None: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.title)  # messages name callables by it

    @property
    def title(self) -> str:
        """Name for messages."""
        return getattr(self.make, "__qualname__", "make")

    def __call__(self) -> nn.Module:
        """Return the module on this rank, in a process group that has begun."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.nn.parallel import DistributedDataParallel

        model = self.make()
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{self.title} returned {type(model).__name__}",
                expected="a module, which is sharded here; a build that shards by itself has a layout already",
                do="Name the callable that makes the module, or memplan explain TARGET --world N",
            )
        if self.blocks is not None and self.number is not None:
            shortened(model, self.blocks, self.number)
        if self.dtype is not None:
            model.to(self.dtype)
        if self.layout.checkpoint:
            checkpointed_blocks(model, self.blocks)
        dist.init_process_group("nccl")
        if self.layout.sharding == "replicated":
            return DistributedDataParallel(model.to(CUDA))
        names = ("replicas", "shards") if self.layout.sharding == "hybrid" else ("shards",)
        mesh = init_device_mesh(CUDA, self.layout.mesh, mesh_dim_names=names)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.layout.reshard}
        if self.compute is not None:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=torch.float32)
        for child in () if self.blocks is None else self.blocks.of(model):
            fully_shard(child, **options)
        fully_shard(model, **options)
        return model


def rank_options(options: StepOptions, layout: Layout) -> StepOptions:
    """Return the options of a rank's step: its micro-batch, and no autocast where weights are gathered in its dtype."""
    options = options.with_batch(layout.micro_batch)
    return replace(options, dtype=None, autocast=options.autocast if layout.shards == 1 else None)
