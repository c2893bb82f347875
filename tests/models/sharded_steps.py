"""Training steps of one rank, written as for `torchrun`: data, tensor and sequence parallel, sharded, replicated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY = 128, 4, 500


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.attention, self.mlp = (
            nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(), Feedforward(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Transformer(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def mesh_of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded(model: Transformer, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def in_tensors(model: Transformer, mesh: DeviceMesh, *, whole_logits: bool = True) -> Any:
    """Tensor parallel with sequences sharded between its products, and logits whole or sharded."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "n1": SequenceParallel(), "n2": SequenceParallel(), "attention": whole, "mlp": whole,
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)), "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip
    head = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Replicate() if whole_logits else Shard(-1), use_local_output=whole_logits
    )
    return parallelize_module(model, mesh, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "head": head,
    })  # fmt: skip


def in_two(model: Transformer, **options: Any) -> Any:
    """Sharded data parallel across tensor parallel."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    return sharded(in_tensors(model, mesh["tensor"]), mesh=mesh["data"], **options)


def made_late() -> Any:
    """Without storage until it is sharded, as large models are made."""
    with torch.device("meta"):
        model = Transformer()
    return sharded(model, mesh=one_dimension()).to_empty(device="cpu")


def one_dimension() -> DeviceMesh:
    return mesh_of(dist.get_world_size(), names=("data",))


def flat(strategy: str = "FULL_SHARD", *, late: bool = False, **options: Any) -> FullyShardedDataParallel:
    """Sharded by the first generation of FSDP, which makes one flat parameter of each block's."""
    with torch.device("meta" if late else "cpu"):
        model = Transformer()
    if late:
        options["param_init_fn"] = lambda module: module.to_empty(device="cpu", recurse=False)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"), **options,
    )  # fmt: skip


def compiled_blocks(model: Transformer) -> Transformer:
    for block in model.blocks:
        block.compile()
    return model


LOWER = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLAT_LOWER = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DistributedDataParallel(Transformer()),
    "ddp views": lambda: DistributedDataParallel(Transformer(), gradient_as_bucket_view=True, bucket_cap_mb=1),
    "ddp static": lambda: DistributedDataParallel(Transformer(), static_graph=True),
    "fsdp": lambda: sharded(Transformer(), mesh=one_dimension()),
    "fsdp from meta": made_late,
    "fsdp kept": lambda: sharded(Transformer(), mesh=one_dimension(), reshard_after_forward=False),
    "fsdp bf16": lambda: sharded(Transformer(), mesh=one_dimension(), mp_policy=LOWER),
    "fsdp on the host": lambda: sharded(
        Transformer(), mesh=one_dimension(), offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "fsdp checkpointed": lambda: sharded(Transformer(checkpointed=True), mesh=one_dimension()),
    "fsdp compiled": lambda: sharded(compiled_blocks(Transformer()), mesh=one_dimension()),
    "fsdp1": flat,
    "fsdp1 kept": lambda: flat("SHARD_GRAD_OP"),
    "fsdp1 kept, own parameters": lambda: flat("SHARD_GRAD_OP", use_orig_params=True),
    "fsdp1 copied": lambda: flat("NO_SHARD", use_orig_params=True, mixed_precision=FLAT_LOWER),
    "fsdp1 bf16": lambda: flat(mixed_precision=FLAT_LOWER),
    "fsdp1 bf16, own parameters": lambda: flat(mixed_precision=FLAT_LOWER, use_orig_params=True),
    "fsdp1 from meta": lambda: flat(late=True, use_orig_params=True),
    "hsdp": lambda: sharded(Transformer(), mesh=mesh_of(2, dist.get_world_size() // 2, names=("copy", "shard"))),
    "tensor": lambda: in_tensors(Transformer(), mesh_of(dist.get_world_size(), names=("tensor",))),
    "tensor loss": lambda: in_tensors(Transformer(), one_dimension(), whole_logits=False),
    "two dimensions": lambda: in_two(Transformer()),
    "two dimensions bf16": lambda: in_two(Transformer(), mp_policy=LOWER),
}


@contextlib.contextmanager
def unsynchronized(model: Any) -> Iterator[None]:
    """Gradients of whole weights stay on each rank, as where they are accumulated."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def step_of(way: str) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        model = WAYS[way.split(", twice")[0].removesuffix(", states sharded")]()
        if way.endswith(", states sharded"):
            from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns when it is imported

            update: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        else:
            update = torch.optim.AdamW(model.parameters())
        tokens, labels = torch.zeros(2, 4, 64, dtype=torch.int64)

        def pass_over() -> None:
            with loss_parallel() if way == "tensor loss" else contextlib.nullcontext():
                F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()

        def step() -> None:
            if ", twice" in way:
                with contextlib.nullcontext() if way.endswith("reduced") else unsynchronized(model):
                    pass_over()
            pass_over()
            update.step()
            update.zero_grad()

        return step

    return build
