"""What a rank of a Llama holds under tensor parallelism, beside published readings of eight B200.

    ENV/bin/python benchmarks/published_tensor_parallel.py    # results/published_tensor_parallel.json and .md

The readings are of Megatron-core with TransformerEngine: MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md
(`max_memory_allocated`, the highest rank). The same models are recorded here in torch's own words: `parallelize_module`
with sequence parallelism and `loss_parallel`, across `fully_shard` over the data-parallel ranks, in bfloat16 with
float32 gradients and AdamW, four micro-batches of one sequence of 4,096 tokens of which the last alone is reduced. Both
hold weights (2 bytes a parameter), float32 gradients of all micro-batches (4) and shards of master weights and moments
(12 / data-parallel ranks). What differs is a line each in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import memplan

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 2**30
WORLD, TOKENS, VOCABULARY, MICRO_BATCHES = 8, 4096, 128256, 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def parameters(self) -> int:
        """Parameters of the weight matrices."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * head
        return self.layers * (attention + 3 * self.hidden * self.inner) + 2 * VOCABULARY * self.hidden


LLAMA_70B = Shape("Llama 3 70B, 12 layers", 12, 8192, 64, 8, 28672)
LLAMA_405B = Shape("Llama 3 405B, 4 layers", 4, 16384, 128, 16, 53248)
PUBLISHED = {
    (LLAMA_70B, 2): 60.68,
    (LLAMA_70B, 4): 39.07,
    (LLAMA_70B, 8): 28.29,
    (LLAMA_405B, 2): 81.59,
    (LLAMA_405B, 4): 52.89,
    (LLAMA_405B, 8): 38.57,
}
"""GiB allocated, by model and tensor-parallel ranks; the same for 4, 8 and 32 micro-batches."""


class Block(nn.Module):
    """A layer of a Llama. Rotary embeddings are left out: their fused kernel saves no activation."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape, ranks)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x (batch, tokens, hidden)."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    """Causal attention of grouped queries."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        head = shape.hidden // shape.heads
        self.heads, self.kv_heads = shape.heads // ranks, max(1, shape.kv_heads // ranks)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * head, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * head, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output for x (batch, tokens, hidden)."""
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """SwiGLU between two products."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x (batch, tokens, hidden)."""
        return self.down(memplan.kernels.swiglu(self.gate(x), self.up(x)))


class Llama(nn.Module):
    """A Llama with an embedding and a head of their own."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, ranks) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_for(shape: Shape, ranks: int) -> Callable[[], Callable[[], None]]:
    """Return the build of a rank: ``ranks`` of tensor parallelism, the other ones of the world data parallel."""

    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (WORLD // ranks, ranks), mesh_dim_names=("data", "tensor"))
        with torch.device("meta"):
            model = Llama(shape, ranks)
        split(model, mesh["tensor"])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=False)
        assert isinstance(model, FSDPModule)
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(VOCABULARY, (1, TOKENS), device="cuda")

        def step() -> None:
            for micro_batch in range(MICRO_BATCHES):
                is_last = micro_batch == MICRO_BATCHES - 1
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
                with loss_parallel():
                    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def split(model: Llama, mesh: dist.DeviceMesh) -> None:
    """Make a model tensor parallel, with the sequence sharded outside of the products."""
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for index in range(len(model.blocks)):
        block = f"blocks.{index}."
        styles |= {block + "norm_1": SequenceParallel(), block + "norm_2": SequenceParallel()}
        styles |= {block + "attention": gathered, block + "mlp": gathered}
        styles |= {block + name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
        styles |= {block + name: ColwiseParallel() for name in ("mlp.gate", "mlp.up")}
        styles |= {block + name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    parallelize_module(model, mesh, styles)


@dataclass(frozen=True)
class Row:
    """A model and a number of tensor-parallel ranks; sizes in GiB, of a rank at its peak."""

    model: str
    ranks: int
    published: float
    predicted: float
    states: float
    """Weights, float32 gradients, master weights and moments: the same in both by their formulas."""
    embedding: float
    """float32 gradient of the embedding beyond its shard: until it is reduced, torch holds that of the whole table."""
    gathered: float
    """Inputs of the products that torch keeps gathered from the shards of the sequence; Megatron gathers them again."""
    loss: float
    """float32 copies of logits; the published runs fuse the loss."""

    @property
    def rest(self) -> float:
        """What the lines above do not explain."""
        return self.predicted - self.published - self.embedding - self.gathered - self.loss


def row_of(shape: Shape, ranks: int, published: float) -> Row:
    """Record a rank and return its row."""
    trace = memplan.record(build_for(shape, ranks), device="b200", world=WORLD, cudnn=False)
    timeline = memplan.simulate(trace)
    tick = timeline.peak_tick
    loss = sum(
        storage.bytes
        for storage in trace.counted
        if storage.born <= tick and (storage.died is None or storage.died > tick)
        and storage.dtype == "float32" and storage.shape == (TOKENS, VOCABULARY // ranks)
    )  # fmt: skip
    others = 1 - 1 / ranks
    return Row(
        shape.name,
        ranks,
        published,
        timeline.peak_allocated / GIB,
        shape.parameters / ranks * (2 + 4 + 12 * ranks / WORLD) / GIB,
        VOCABULARY * shape.hidden * 4 * others / GIB,
        2 * shape.layers * TOKENS * shape.hidden * 2 * others / GIB,
        loss / GIB,
    )


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| model | tensor x data parallel | published | predicted | both: weights, gradients, optimizer "
        "| embedding's whole gradient | gathered inputs kept | loss in float32 | not explained |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.model} | {row.ranks} x {WORLD // row.ranks} | {row.published:.2f} GiB | {row.predicted:.2f} GiB "
        f"| {row.states:.2f} GiB | +{row.embedding:.2f} GiB | +{row.gathered:.2f} GiB | +{row.loss:.2f} GiB "
        f"| {row.rest:+.2f} GiB, {row.rest / row.published:+.1%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict all rows and write the results."""
    rows = [row_of(shape, ranks, published) for (shape, ranks), published in PUBLISHED.items()]
    print(table(rows))
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    (RESULTS / "published_tensor_parallel.json").write_text(text, encoding="utf-8")
    (RESULTS / "published_tensor_parallel.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
