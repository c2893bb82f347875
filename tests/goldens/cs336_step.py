"""A training step as students of Stanford's CS336 write it by hand: no fused op, everything from einsum up.

Two real snapshots are of such a step, with 2.7 billion parameters on an H100 and torch 2.6. The order of operations,
and which names still hold a tensor while others are made, is what their histories show: the allocator sees both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, HIDDEN, VOCABULARY, BATCH = 2560, 32, 32, 10240, 10000, 4


class Linear(nn.Module):
    """Without bias: ``einsum("oi,bsi->bso", weight, x)``, as torch 2.6 runs it.

    The weight comes first in the product, so the result's memory is turned round. Later releases swap the operands.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.permute(2, 0, 1).reshape(1, x.shape[2], -1)
        product = torch.bmm(self.weight.unsqueeze(0), columns)
        return product.view(-1, *x.shape[:2]).permute(1, 2, 0)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width, device="cuda"))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Norm(nn.Module):
    """The root mean square by way of the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        root = torch.sqrt(length**2 / self.width + 1e-5)
        normed = x / root
        return torch.einsum("d,bsd->bsd", self.weight, normed)


class Rotary(nn.Module):
    """Turns pairs of neighbours; cosines and sines of every position are kept side by side."""

    turns: Tensor

    def __init__(self, head: int, context: int) -> None:
        super().__init__()
        self.pairs = head // 2
        frequencies = 10000.0 ** (-torch.arange(0, head, 2, device="cuda") / head)
        angles = torch.outer(torch.arange(context, device="cuda"), frequencies)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = x.reshape(*x.shape[:-1], self.pairs, 2)
        cos = self.turns[positions, :, 0].unsqueeze(1)
        sin = self.turns[positions, :, 1].unsqueeze(1)
        turned = torch.zeros_like(pairs)
        turned[..., 0] = cos * pairs[..., 0] - sin * pairs[..., 1]
        turned[..., 1] = sin * pairs[..., 0] + cos * pairs[..., 1]
        return turned.reshape(x.shape)


def softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(x - largest)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def attend(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", queries, keys)
    scores = scores / math.sqrt(queries.shape[-1])
    scores = scores.masked_fill(allowed == False, -1e9)  # noqa: E712  # an op of its own, unlike ~allowed
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, values)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values = (Linear(width, width) for _ in range(3))
        self.output = Linear(width, width)
        self.rotary = Rotary(width // heads, context)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected_queries, projected_keys, projected_values = self.queries(x), self.keys(x), self.values(x)
        queries, keys, values = (
            t.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for t in (projected_queries, projected_keys, projected_values)
        )
        positions = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
        queries = self.rotary(queries, positions)
        keys = self.rotary(keys, positions)
        allowed = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
        allowed = ~allowed
        allowed = allowed.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
        result = attend(queries, keys, values, allowed)
        result = result.transpose(1, 2).reshape(batch, length, width)
        return self.output(result)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        up = self.up(x)
        activated = torch.sigmoid(gate) * gate
        product = activated * up
        return self.down(product)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.before_attention, self.attention = Norm(width), Attention(width, heads, context)
        self.before_feed_forward, self.feed_forward = Norm(width), FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        h = self.attention(h)
        x = x + h
        h = self.before_feed_forward(x)
        h = self.feed_forward(h)
        x = x + h
        return x


class Model(nn.Module):
    def __init__(self, context: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, HIDDEN, context) for _ in range(layers))
        self.norm = Norm(WIDTH)
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = self.head(x)
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The row numbers are made on the host, as students do: indexing copies them to the card."""
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    largest = torch.max(logits, dim=-1, keepdim=True).values
    logits = logits - largest
    exponentials = torch.exp(logits)
    total = exponentials.sum(dim=-1)
    rows = torch.arange(logits.shape[0])
    wanted = logits[rows, targets]
    losses = torch.log(total) - wanted
    return losses.mean()


class AdamW(torch.optim.Optimizer):
    """One parameter after the other, nothing fused."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.01})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                gradient, state = parameter.grad.data, self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(parameter.data)
                    state["square"] = torch.zeros_like(parameter.data)
                mean, square = state["mean"], state["square"]
                state["step"] += 1
                mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = math.sqrt(1 - beta2 ** state["step"])
                denominator = (square.sqrt() / root).add_(group["eps"])
                parameter.data.addcdiv_(mean, denominator, value=-lr / (1 - beta1 ** state["step"]))
                parameter.data.add_(parameter.data, alpha=-lr * group["decay"])


def forward_step(context: int, layers: int = LAYERS) -> Callable[[], None]:
    """Build for a forward pass with gradients enabled, whose result is still there at its end."""
    model = Model(context, layers)
    tokens = torch.randint(0, VOCABULARY, (BATCH, context)).to("cuda")
    kept: list[Tensor] = []

    def step() -> None:
        torch.cuda.empty_cache()
        kept.append(model(tokens))

    return step


def full_step(context: int, layers: int = LAYERS) -> Callable[[], None]:
    """Build for one whole training step; a product before it, as in a process that trained something else already.

    What the step computes is still there at its end.
    """
    warm = torch.ones(2, 2, device="cuda", requires_grad=True)
    (warm @ warm).sum().backward()
    del warm
    model = Model(context, layers)
    optimizer = AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (BATCH, context)).to("cuda")
    kept: list[Tensor] = []

    def step() -> None:
        torch.cuda.empty_cache()
        optimizer.zero_grad()
        logits = model(tokens)
        loss = cross_entropy(logits, tokens)
        loss.backward()
        optimizer.step()
        kept.extend((logits, loss))

    return step
