"""The steps whose peaks were published, written anew from what the benchmarks run: shapes, dtypes, what is held.

Each function takes the sizes and returns a `build`. What a benchmark keeps on the card beside the step, such as the
weights of the kernel that it compares with, is kept here too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]
Build = Callable[[], Step]

BF16 = torch.bfloat16
HIDDEN, VOCABULARY = 4096, 128256

STEPS: dict[str, Callable[..., Build]] = {}


def step_of(make: Callable[..., tuple[Step, Any]]) -> Callable[..., Build]:
    """Enter under its name a function of the sizes that makes a step, and what lives beside it."""

    def build_of(**sizes: Any) -> Build:
        def build() -> Step:
            step, held = make(**sizes)
            return functools.partial(_run, step, held)

        return build

    STEPS[make.__name__] = build_of
    return build_of


def made_on_card(name: str, **sizes: Any) -> Step:
    """Build a step by its name, for another process, with all of it on the card."""
    with torch.device("cuda"):
        step = STEPS[name](**sizes)()

    def on_card() -> None:
        with torch.device("cuda"):
            step()

    return on_card


def _run(step: Step, held: Any) -> None:
    step()


def _backward(loss: Callable[[], Tensor], *, retain: bool = False) -> Step:
    def step() -> None:
        value = loss()
        value.backward(retain_graph=retain)

    return step


def _backward_from(output: Callable[[], Tensor], gradient: Tensor | None = None) -> Step:
    """Forward, and backward from a gradient: the given one, or random numbers of the step's own."""

    def step() -> None:
        value = output()
        value.backward(torch.randn_like(value) if gradient is None else gradient, retain_graph=True)

    return step


def _head(width: int = HIDDEN, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, VOCABULARY, bias=bias, dtype=BF16)


@step_of
def cross_entropy(vocabulary: int) -> tuple[Step, Any]:
    logits = torch.randn(16384, vocabulary, requires_grad=True)
    target = torch.randint(vocabulary, (16384, 1)).squeeze(1)
    return _backward(lambda: F.cross_entropy(logits, target)), None


@step_of
def cross_entropy_in_float32(vocabulary: int) -> tuple[Step, Any]:
    logits = torch.randn(2048, 4, vocabulary, dtype=BF16, requires_grad=True)
    target = torch.randint(vocabulary, (2048, 4))

    def step() -> None:
        flat = target.reshape(-1)
        losses = F.cross_entropy(logits.reshape(-1, vocabulary).float(), flat, reduction="none").reshape(2048, 4)
        losses.sum().backward()

    return step, None


class _GatedMLP(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 11008, bias=False)
        self.up = nn.Linear(HIDDEN, 11008, bias=False)
        self.down = nn.Linear(11008, HIDDEN, bias=False)
        self.activation = nn.SiLU() if activation == "silu" else nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


@step_of
def gated_mlp(batch: int, tokens: int, activation: str) -> tuple[Step, Any]:
    x = torch.randn(batch, tokens, HIDDEN, dtype=BF16, requires_grad=True)
    model = _GatedMLP(activation).to(BF16)
    return _backward_from(lambda: model(x)), None


@step_of
def rms_norm(width: int) -> tuple[Step, Any]:
    theirs, weight = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
    x = torch.randn(2048, width, dtype=BF16)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def norm(values: Tensor) -> Tensor:
        values = values.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * values.to(BF16)

    return _backward_from(lambda: norm(x), gradient), theirs


@step_of
def layer_norm(width: int) -> tuple[Step, Any]:
    theirs, norm = nn.LayerNorm(width), nn.LayerNorm(width, eps=1e-6)
    x = torch.randn(4096, width)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return _backward_from(lambda: norm(x), gradient), theirs


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the order of transformers: which half is taken first decides which gradient is made first."""
    half = x.shape[-1] // 2
    straight = x * cos
    first, second = x[..., :half], x[..., half:]
    return straight + (torch.cat((-second, first), dim=-1) * sin)


@step_of
def rope(width: int, tokens: int) -> tuple[Step, Any]:
    each = width // 32
    q, k = (torch.randn(1, tokens, n, each, dtype=BF16, requires_grad=True).transpose(1, 2) for n in (32, 8))
    gradients = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(tokens).unsqueeze(0)
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, each, 2).float() / each))
    with torch.no_grad():
        angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(BF16).unsqueeze(1), angles.sin().to(BF16).unsqueeze(1)

    def step() -> None:
        outputs = _rotated(q, cos, sin), _rotated(k, cos, sin)
        torch.autograd.grad(outputs, (q, k), gradients, allow_unused=True, retain_graph=True)

    return step, (positions, frequencies)


@step_of
def embedding(rows: int, width: int, batch: int, tokens: int) -> tuple[Step, Any]:
    table, theirs = nn.Embedding(rows, width), nn.Embedding(rows, width)
    indices = torch.randint(rows, (batch, tokens))
    return _backward_from(lambda: table(indices)), theirs


@step_of
def kl_divergence(vocabulary: int) -> tuple[Step, Any]:
    x = torch.randn(16384, vocabulary, requires_grad=True).log_softmax(dim=-1)
    target = torch.randn(16384, vocabulary).softmax(dim=-1)
    return _backward(lambda: F.kl_div(x, target, reduction="batchmean"), retain=True), None


def _jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    """Both log-probabilities, in any dtype; made float32 here."""
    teacher, student = teacher.float(), student.float()
    mean = torch.lerp(student.exp(), teacher.exp(), 0.5)
    pointwise = functools.partial(F.kl_div, reduction="none", log_target=True)
    loss = 0.5 * pointwise(mean.log(), teacher).sum(dim=-1) + 0.5 * pointwise(mean.log(), student).sum(dim=-1)
    return (loss / student.shape[0]).sum()


@step_of
def jensen_shannon(vocabulary: int) -> tuple[Step, Any]:
    student = torch.randn(8192, vocabulary, requires_grad=True).log_softmax(dim=-1)
    teacher = torch.randn(8192, vocabulary).log_softmax(dim=-1)
    return _backward(lambda: _jensen_shannon(student, teacher), retain=True), None


@step_of
def head_cross_entropy(tokens: int) -> tuple[Step, Any]:
    x = torch.randn(tokens, HIDDEN, dtype=BF16, requires_grad=True)
    target = torch.randint(VOCABULARY, (tokens, 1)).squeeze(1)
    head, theirs = _head(), _head()

    def loss() -> Tensor:
        logits = head(x)
        return F.cross_entropy(logits, target)

    return _backward(loss), theirs


@step_of
def heads_jensen_shannon(tokens: int) -> tuple[Step, Any]:
    student, teacher = _head(), _head()
    x = torch.rand(tokens, HIDDEN, dtype=BF16, requires_grad=True)
    y = torch.rand(tokens, HIDDEN, dtype=BF16)

    def loss() -> Tensor:
        logits = student(x), teacher(y)
        ours, theirs = ((each / 1.0).log_softmax(dim=-1) for each in logits)
        return _jensen_shannon(ours, theirs).to(BF16)

    return _backward(loss), None


def _odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return (0.1 * F.logsigmoid(odds)).mean()


def _average(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The average log-probability of the targets of each sequence, the ignored ones left out."""
    counted = target != ignored
    target = torch.where(target == ignored, 0, target)
    found = torch.gather(logits.log_softmax(-1), dim=2, index=target.unsqueeze(2)).squeeze(2)
    return (found * counted).sum(-1) / counted.sum(-1)


def _preferences(batch: int, tokens: int) -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    head, theirs = _head(), _head()
    x = torch.randn(batch, tokens, HIDDEN, dtype=BF16, requires_grad=True)
    return head, theirs, x, torch.randint(VOCABULARY, (batch, tokens))


@step_of
def orpo_of_means(batch: int, tokens: int) -> tuple[Step, Any]:
    """The odds ratio of mean log-probabilities, all in bfloat16."""
    head, theirs, x, target = _preferences(batch, tokens)
    half = batch // 2

    def loss() -> Tensor:
        logits = head(x)
        likelihood = F.cross_entropy(logits[:half].view(-1, VOCABULARY), target[:half].view(-1))
        means = F.log_softmax(logits, dim=-1).mean(dim=-1)
        return likelihood - _odds_ratio(means[:half], means[half:])

    return _backward(loss), theirs


@step_of
def orpo(batch: int, tokens: int) -> tuple[Step, Any]:
    """As in trl: logits in float32, the targets' log-probabilities gathered."""
    head, theirs, x, target = _preferences(batch, tokens)
    half = batch // 2

    def loss() -> Tensor:
        reduced = x @ head.weight.t()
        logits = reduced.float()
        likelihood = F.cross_entropy(logits[:half].view(-1, VOCABULARY), target[:half].view(-1))
        averages = _average(logits, target, -100)
        return likelihood - _odds_ratio(averages[:half], averages[half:])

    return _backward(loss), theirs


@step_of
def kto(batch: int, tokens: int) -> tuple[Step, Any]:
    """As in trl, with a reference head; which sequences are chosen is fixed, so that no shape depends on it."""
    head, reference = _head(1024, bias=True), _head(1024, bias=True)
    theirs = _head(1024, bias=True), _head(1024, bias=True)
    x, y = (torch.randn(batch, tokens, 1024, dtype=BF16) for _ in range(2))
    target = torch.randint(VOCABULARY, (batch, tokens))
    divergence = torch.randn(1, dtype=BF16)
    chosen, rejected = torch.arange(batch // 2), torch.arange(batch // 2, batch)

    def policy() -> tuple[Tensor, ...]:
        reduced = x @ head.weight.t()
        reduced = reduced + head.bias
        logits = reduced.float()
        averages = _average(logits, target, 42)
        return averages[chosen], averages[rejected], logits[chosen], logits[rejected]

    def of_reference() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = y @ reference.weight.t()
            logits = logits + reference.bias
            averages = _average(logits, target, 42)
        return averages[chosen], averages[rejected]

    def loss() -> Tensor:
        better, worse, *logits = policy()
        known_better, known_worse = of_reference()
        of_chosen = 1 - F.sigmoid(0.1 * ((better - known_better) - divergence))
        of_rejected = 1 - F.sigmoid(0.1 * (divergence - (worse - known_worse)))
        for each in logits:  # only logged there, but alive until here
            each.detach().sum()
        return torch.cat((of_chosen, of_rejected), 0).mean()

    return _backward(loss), theirs


class _BandedAttention(nn.Module):
    """Attention within a band of neighbours: a mask made in every forward pass, scores and weights in full."""

    def __init__(self, width: int, heads: int, band: int) -> None:
        super().__init__()
        self.heads, self.reach = heads, band // 2
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        each = width // self.heads
        projected = self.query(x), self.key(x), self.value(x)
        query, key, value = (y.view(batch, tokens, self.heads, each).transpose(1, 2) for y in projected)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(each)
        near = torch.zeros(tokens, tokens, dtype=torch.bool)
        for offset in range(-self.reach, self.reach + 1):
            near.diagonal(offset).fill_(True)
        scores = scores.masked_fill(~near, float("-inf"))
        mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))


@step_of
def banded_attention(batch: int, width: int, heads: int, band: int, tokens: int) -> tuple[Step, Any]:
    theirs, model = _BandedAttention(width, heads, band), _BandedAttention(width, heads, band)
    x = torch.randn(batch, tokens, width, requires_grad=True)
    return _backward_from(lambda: model(x), torch.randn_like(x)), theirs


def _sparsemax(x: Tensor) -> Tensor:
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype).view(1, -1)
    inside = 1 + ranks * ordered > sums
    count = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = ((ordered * inside).sum(dim=-1, keepdim=True) - 1) / count
    return torch.clamp(x - threshold, min=0)


@step_of
def sparsemax(width: int) -> tuple[Step, Any]:
    x = torch.randn(2048, width, requires_grad=True)
    return _backward_from(lambda: _sparsemax(x), torch.randn_like(x)), None


@step_of
def capped_head(backward: bool) -> tuple[Step, Any]:
    """Gemma 2's (2B) head on 8192 tokens: a soft cap on the logits, the loss in float32, no gradient held."""
    x = torch.randn(8192, 2304, dtype=BF16, requires_grad=True)
    weight = torch.randn(256000, 2304, dtype=BF16, requires_grad=True)
    target = torch.randint(256000, (8192,))

    def loss() -> Tensor:
        logits = x @ weight.T
        logits = torch.tanh(logits / 30.0) * 30.0
        return F.cross_entropy(logits.float(), target)

    def step() -> None:
        value = loss()
        if backward:
            value.backward()
        x.grad = weight.grad = None

    return step, None


@step_of
def one_linear(width: int) -> tuple[Step, Any]:
    """Everything is made, and let go of, in the step."""

    def step() -> None:
        model = nn.Linear(width, width)
        model(torch.randn(width, width))

    return step, None
