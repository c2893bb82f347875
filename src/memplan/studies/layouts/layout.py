"""Ways to train a module with several ranks, each a copy or a shard of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from memplan.errors import InputError

Sharding = Literal["replicated", "sharded", "hybrid"]


@dataclass(frozen=True)
class Layout:
    """How ranks hold a module, and what a rank does at a time.

    ``replicas`` x ``shards`` x ``tensor`` is the number of ranks: `DistributedDataParallel` with one shard, else
    `fully_shard`, across ranks of several replicas too (HSDP), each of what tensor parallelism leaves of a layer.
    """

    replicas: int
    shards: int
    micro_batch: int
    """Samples of a rank at a time."""
    reshard: bool = True
    """Whether gathered weights are freed after the forward pass, and gathered again (``reshard_after_forward``)."""
    checkpoint: bool = False
    """Whether each block is checkpointed (`torch.utils.checkpoint`)."""
    tensor: int = 1
    """Ranks that share each layer, and the sequence between layers (`parallelize_module`)."""
    loss_parallel: bool = False
    """Whether these ranks keep their shards of the logits, and compute the loss on them (`loss_parallel`)."""

    @property
    def sharding(self) -> Sharding:
        """Name of the way in which the ranks hold the module."""
        if self.shards == 1:
            return "replicated"
        return "sharded" if self.replicas == 1 else "hybrid"

    @property
    def title(self) -> str:
        """Name in tables, with torch's names: ``FSDP2 8, kept, recomputed``, ``HSDP 2 x 4 x TP 2``."""
        names = {"replicated": f"DDP {self.replicas}", "sharded": f"FSDP2 {self.shards}"}
        parts = [names.get(self.sharding, f"HSDP {self.replicas} x {self.shards}")]
        if self.tensor > 1:
            parts = [f"{parts[0]} x TP {self.tensor}" if self.shards > 1 else f"TP {self.tensor}"]
        parts += ["loss parallel"] if self.loss_parallel else []
        parts += ["kept"] if self.shards > 1 and not self.reshard else []
        parts += ["recomputed"] if self.checkpoint else []
        return ", ".join(parts)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes for `init_device_mesh`."""
        sizes = {"replicas": self.replicas, "shards": self.shards, "tensor": self.tensor}
        return tuple(sizes[name] for name in self.dimensions)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions."""
        sizes = {"replicas": self.replicas, "shards": self.shards, "tensor": self.tensor}
        return tuple(name for name, size in sizes.items() if size > 1) or ("replicas",)


def layouts_of(
    world: int, per_node: int, micro_batches: Sequence[int], tensor: Sequence[int] = (1,),
    losses: Sequence[bool] = (False,),
) -> Iterator[Layout]:  # fmt: skip
    """Yield the layouts of ``world`` ranks: copies, shards, and parts of layers, in all combinations of the other
    options.

    Copies of everything; shards across all ranks; with several machines, shards within each. With ``tensor`` ranks to a
    layer, its shards across the other ranks, of all machines or within each. Each with and without checkpoints, and
    with gathered weights kept or not.

    Args:
        per_node: ranks of a machine.
        tensor: ranks that share each layer.

    Raises:
        InputError: ``world`` is not a multiple of ``per_node``; a degree of ``tensor`` does not divide the ranks of a
            machine; or ``losses`` contains True, and no degree of ``tensor`` is above 1.
    """
    if True in losses and max(tensor) == 1:
        raise InputError(
            "losses of shards of the logits, where no ranks share a layer", expected="several ranks of a layer",
            do="Say how many, --tensor 1,2, or leave out --loss-parallel",
        )  # fmt: skip
    if world > per_node and world % per_node:
        raise InputError(
            f"{world} ranks in machines of {per_node}", expected="a multiple of a machine's cards",
            do=f"Say how many cards a machine has: --per-node {_largest_divisor(world, per_node)}",
        )  # fmt: skip
    within = min(world, per_node)
    meshes = [(world, 1, 1), (1, world, 1)]  # (replicas, shards, ranks of a layer)
    if world > per_node > 1:
        meshes.append((world // per_node, per_node, 1))
    for degree in tensor:
        if degree < 1 or within % degree:
            raise InputError(
                f"tensor parallelism of {degree} ranks, where a machine has {within}",
                expected="a divisor of a machine's ranks, as each layer waits for its links",
                do=f"Take one: --tensor {_largest_divisor(within, max(degree, 1))}",
            )
        meshes.append((1, world // degree, degree))
        if world > per_node > degree:
            meshes.append((world // per_node, per_node // degree, degree))
    if 1 not in tensor:
        meshes = [mesh for mesh in meshes if mesh[2] > 1]
    for mesh, checkpoint, micro_batch in product(dict.fromkeys(meshes), (False, True), micro_batches):
        replicas, shards, degree = mesh
        for reshard in (True, False) if shards > 1 else (True,):
            for loss_parallel in losses if degree > 1 else (False,):
                yield Layout(replicas, shards, micro_batch, reshard, checkpoint, degree, loss_parallel)


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)
