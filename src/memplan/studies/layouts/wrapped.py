"""A module's training step on one rank of a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memplan.errors import TargetError
from memplan.studies.layouts.blocks import Blocks, checkpointed_blocks, shortened
from memplan.studies.layouts.layout import Layout
from memplan.studies.layouts.tensor_parallel import TensorPlan
from memplan.trace.step import CUDA, StepOptions


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
    parallelize: TensorPlan
    """Makes the module tensor parallel, where the layout is."""

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
        layout = self.layout
        if layout.shards == layout.tensor == 1:
            return DistributedDataParallel(model.to(CUDA))
        mesh = init_device_mesh(CUDA, layout.mesh, mesh_dim_names=layout.dimensions)
        if layout.tensor > 1:
            self.parallelize(model, mesh["tensor"])
            if layout.shards == 1:
                return model
            mesh = mesh[layout.dimensions[:-1]]
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": layout.reshard}
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
