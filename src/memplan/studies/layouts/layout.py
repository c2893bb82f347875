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

    ``replicas`` x ``shards`` is the number of ranks: `DistributedDataParallel` with one shard, `fully_shard` with one
    replica, both of them (HSDP) otherwise.
    """

    replicas: int
    shards: int
    micro_batch: int
    """Samples of a rank at a time."""
    reshard: bool = True
    """Whether gathered weights are freed after the forward pass, and gathered again (``reshard_after_forward``)."""
    checkpoint: bool = False
    """Whether each block is checkpointed (`torch.utils.checkpoint`)."""

    @property
    def sharding(self) -> Sharding:
        """Name of the way in which the ranks hold the module."""
        if self.shards == 1:
            return "replicated"
        return "sharded" if self.replicas == 1 else "hybrid"

    @property
    def title(self) -> str:
        """Name in tables, with the classes of torch: ``FSDP2 8, kept, recomputed``."""
        names = {"replicated": f"DDP {self.replicas}", "sharded": f"FSDP2 {self.shards}"}
        parts = [names.get(self.sharding, f"HSDP {self.replicas} x {self.shards}")]
        parts += ["kept"] if self.shards > 1 and not self.reshard else []
        parts += ["recomputed"] if self.checkpoint else []
        return ", ".join(parts)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes for `init_device_mesh`."""
        return (self.replicas, self.shards) if self.sharding == "hybrid" else (self.replicas * self.shards,)


def layouts_of(world: int, per_node: int, micro_batches: Sequence[int]) -> Iterator[Layout]:
    """Yield the layouts of ``world`` ranks, of which ``per_node`` are in a machine.

    Copies of everything; shards across all ranks; and where there are several machines, shards within each. Each with
    and without checkpoints, and with gathered weights kept or not.

    Raises:
        InputError: the world is no multiple of a machine's ranks.
    """
    if world > per_node and world % per_node:
        raise InputError(
            f"{world} ranks in machines of {per_node}", expected="a multiple of a machine's cards",
            do=f"Say how many cards a machine has: --per-node {_largest_divisor(world, per_node)}",
        )  # fmt: skip
    meshes = [(world, 1), (1, world)]
    if world > per_node > 1:
        meshes.append((world // per_node, per_node))
    for (replicas, shards), checkpoint, micro_batch in product(dict.fromkeys(meshes), (False, True), micro_batches):
        for reshard in (True, False) if shards > 1 else (True,):
            yield Layout(replicas, shards, micro_batch, reshard, checkpoint)


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)
