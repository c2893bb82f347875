"""Our own networks over sequences: recurrent, convolutional, and transformers in several ways of running."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .registry import Step, training, zoo

VOCABULARY = 4000


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of (N, T, V) against (N, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(batch: int, sequence: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Inputs and next-token targets, both (batch, sequence)."""
    ids = torch.randint(VOCABULARY, (batch, sequence + 1))
    return (ids[:, :-1],), (ids[:, 1:],)


class RecurrentLm(nn.Module):
    """Embedding, a stacked LSTM with dropout between its layers, a projection to the vocabulary."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


@zoo
def lstm_lm() -> Step:
    model = RecurrentLm()
    return training(model, torch.optim.Adam(model.parameters()), token_loss, *tokens(16, 128))


class GruClassifier(nn.Module):
    """Both directions of a GRU, the last states of each, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.gru = nn.GRU(128, 128, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.gru(self.embedding(ids))[1]
        return self.head(torch.cat((states[-2], states[-1]), 1))


@zoo
def gru_classifier() -> Step:
    model = GruClassifier()
    inputs, targets = torch.randint(VOCABULARY, (32, 128)), torch.randint(10, (32,))
    return training(model, torch.optim.Adam(model.parameters()), F.cross_entropy, (inputs,), (targets,))


class Wavenet(nn.Module):
    """Causal dilated convolutions with gates, residual and skip sums: (N, 1, T) -> (N, 256, T)."""

    def __init__(self, width: int = 48, depth: int = 10) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**k) for k in range(depth))
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        total = torch.zeros_like(x)
        for k, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            residual, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + residual, total + skip
        return self.end(total)


@zoo
def wavenet() -> Step:
    model = Wavenet()
    audio, levels = torch.randn(4, 1, 4096), torch.randint(256, (4, 4096))
    return training(model, torch.optim.Adam(model.parameters()), F.cross_entropy, (audio,), (levels,))


class Block(nn.Module):
    """A pre-norm transformer layer on F.scaled_dot_product_attention: (N, T, width) -> the same."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TransformerLm(nn.Module):
    """(N, T) tokens -> (N, T, VOCABULARY); `run(block, x)` says how each block is run."""

    def __init__(
        self,
        width: int = 256,
        depth: int = 4,
        run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x),
        causal: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


def language_step(model: nn.Module, batch: int = 8, sequence: int = 256) -> Step:
    return training(model, torch.optim.AdamW(model.parameters()), token_loss, *tokens(batch, sequence))


@zoo
def sdpa_transformer() -> Step:
    """No mask at all: the fused attention kernel saves one number a row instead of the scores."""
    return language_step(TransformerLm(causal=False))


@zoo
def weight_tying() -> Step:
    """One matrix is embedding and head: its gradient comes from two places and is added up."""
    return language_step(TransformerLm(tied=True))


@zoo
def checkpoint_non_reentrant() -> Step:
    return language_step(TransformerLm(depth=6, run=partial(checkpoint, use_reentrant=False)))


@zoo
def checkpoint_reentrant() -> Step:
    """A backward within the backward."""
    return language_step(TransformerLm(depth=6, run=partial(checkpoint, use_reentrant=True)))


@zoo
def bf16_transformer() -> Step:
    """Weights, gradients and optimizer state all in bfloat16."""
    return language_step(TransformerLm(width=384).to(torch.bfloat16))


@zoo
def autocast_transformer() -> Step:
    """float32 weights, bfloat16 copies of them cached for the length of the autocast."""
    model = TransformerLm()
    optimizer = torch.optim.AdamW(model.parameters())
    (ids,), (targets,) = tokens(8, 256)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_loss(model(ids), targets)
        loss.backward()
        optimizer.step()

    return step


class MaskedEncoder(nn.Module):
    """Post-norm layers on nn.MultiheadAttention with a causal mask, a padding mask and dropout."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, ids: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(ids)
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            mixed, _ = attention(x, x, x, attn_mask=mask, key_padding_mask=padding)
            x = norm(x + F.dropout(mixed, 0.1, self.training))
        return self.head(x)


@zoo
def multihead_attention() -> Step:
    """Weights are asked for (the default), so that the scores of all heads exist and are kept."""
    model = MaskedEncoder()
    (ids,), targets = tokens(8, 192)
    mask = torch.triu(torch.ones(192, 192, dtype=torch.bool), 1)
    padding = torch.arange(192).expand(8, -1) >= torch.randint(96, 193, (8, 1))
    return training(model, torch.optim.AdamW(model.parameters()), token_loss, (ids, mask, padding), targets)
