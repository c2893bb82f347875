"""Sums over the axis of a segment, such as losses: values and gradients are those of the whole in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from tests.planning.tiles.recorded_segments import differentiated, recorded
from torch import Tensor

from memplan.planning.capture.allocation_probe import Allocations
from memplan.planning.ops.tile import TracedTile, register
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Axis, Tiled

VOCABULARY, WIDTH, TOKENS = 11, 6, 13
generator = torch.Generator().manual_seed(0)
HEAD = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
BIAS = torch.randn(VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_()
CLASS_WEIGHTS = torch.rand(VOCABULARY, dtype=torch.float64, generator=generator)


def logits_of(hidden: Tensor) -> Tensor:
    """The head."""
    return F.linear(hidden, HEAD, BIAS)


def shifted(hidden: Tensor, ids: Tensor, **options: Any) -> Tensor:
    """The loss of a causal language model, as its labels are the next tokens."""
    logits = logits_of(hidden)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCABULARY), ids[..., 1:].reshape(-1), **options)


def padded(hidden: Tensor, ids: Tensor) -> Tensor:
    """The same, as transformers has it: labels are padded instead of logits cut."""
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits_of(hidden).float().view(-1, VOCABULARY), labels, reduction="sum") / 7


def log_probs(hidden: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens, of which a policy's gradient is made."""
    return logits_of(hidden)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)


def masked_mean(hidden: Tensor, ids: Tensor) -> Tensor:
    """A mean of log-probabilities over the tokens that count, by logsumexp."""
    logits, mask = logits_of(hidden)[:, :-1] / 0.7, ids[:, 1:] >= 0
    chosen = logits.gather(-1, ids[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((chosen - logits.logsumexp(-1)) * mask).sum() / mask.sum()


def with_z_loss(hidden: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy and the squared logsumexp of the same logits, of all tokens."""
    logits = logits_of(hidden)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted": shifted,
    "sum": lambda hidden, ids: shifted(hidden, ids, reduction="sum"),
    "not reduced": lambda hidden, ids: shifted(hidden, ids, reduction="none"),
    "smoothed": lambda hidden, ids: shifted(hidden, ids, label_smoothing=0.1),
    "classes weighted": lambda hidden, ids: shifted(hidden, ids, weight=CLASS_WEIGHTS),
    "both": lambda hidden, ids: shifted(hidden, ids, weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "padded": padded,
    "log-probabilities": log_probs,
    "masked mean": masked_mean,
    "z-loss": with_z_loss,
    "classes second": lambda hidden, ids: F.cross_entropy(logits_of(hidden).transpose(1, 2), ids),
    "squared": lambda hidden, ids: F.mse_loss(logits_of(hidden), (ids[..., None] * HEAD.detach()[:, 0]).cos()),
    "mean of two sums": lambda hidden, ids: (logits_of(hidden).sin().sum((1, 2)) - hidden.sum((1, 2))).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("pieces", [2, *slow(1, 5)])
def test_losses_are_those_of_the_whole(name: str, samples: int, pieces: int) -> None:
    """Value and gradients of hidden states, head and bias, in numbers of pieces that do not divide the tokens."""
    hidden, ids = batch(samples)
    leaves, function = [hidden, HEAD, BIAS], LOSSES[name]
    whole = function(hidden, ids)
    program, tensors = recorded(function, [hidden, ids], [HEAD, BIAS, CLASS_WEIGHTS])
    tiled, key = register(program, Axis(1, samples, TOKENS), pieces)
    result, *_ = TracedTile.apply(key, *tensors)
    torch.testing.assert_close(result, whole)
    torch.testing.assert_close(differentiated([result], leaves), differentiated([whole], leaves))
    assert tiled.yields_gradients == (whole.dim() == 0)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    """Return hidden states and tokens, of which some do not count."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(samples, TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.randint(VOCABULARY, (samples, TOKENS), generator=generator)
    ids[:, 3:6] = -100
    return hidden, ids


def test_nothing_counts() -> None:
    """Where all targets are ignored, the mean is no number and gradients are zero, as without pieces."""
    hidden, ids = batch(2)
    ids[:] = -100
    whole = shifted(hidden, ids)
    program, tensors = recorded(shifted, [hidden, ids], [HEAD, BIAS])
    tiled, key = register(program, Axis(1, 2, TOKENS), 3)
    result, *_ = TracedTile.apply(key, *tensors)
    assert whole.isnan()
    assert result.isnan()
    leaves = [hidden, HEAD, BIAS]
    torch.testing.assert_close(differentiated([result], leaves), differentiated([whole], leaves))
    assert tiled.yields_gradients


def centred(hidden: Tensor, ids: Tensor) -> Tensor:
    """Hidden states that read those of all tokens."""
    return shifted(hidden - hidden.mean(1, keepdim=True), ids)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (centred, "sub reads a sum over the axis"),
        (lambda hidden, ids: shifted(hidden, ids).exp(), "exp reads a sum over the axis"),
        (lambda hidden, ids: logits_of(hidden).amax(1), "amax mixes elements of the axis"),
        (lambda hidden, ids: logits_of(hidden).log_softmax(1), "_log_softmax mixes elements of the axis"),
        (lambda hidden, ids: logits_of(hidden)[:, ::2], "slice takes a part of the axis"),
        (lambda hidden, ids: hidden.sum(1) / logits_of(hidden).sum((1, 2))[:, None], "div reads a sum over the axis"),
        (lambda hidden, ids: logits_of(hidden).gather(1, ids.clamp(min=0)[..., None]), "gather mixes elements"),
    ],
)
def test_what_reads_other_tokens_is_refused(function: Callable[[Tensor, Tensor], Tensor], why: str) -> None:
    """Sums that are not complete, and ops along tokens."""
    program, _ = recorded(function, batch(2), [HEAD, BIAS])
    with pytest.raises(NotTileable, match=why):
        Tiled(program, Axis(1, 2, TOKENS), 2)


def test_more_pieces_than_tokens_are_refused() -> None:
    """The loss of two tokens is that of a single one."""
    hidden, ids = batch(1)
    program, _ = recorded(shifted, [hidden[:, :2], ids[:, :2]], [HEAD, BIAS])
    with pytest.raises(NotTileable, match="1 elements for 2 pieces"):
        Tiled(program, Axis(1, 1, 2), 2)


def test_gradients_of_half_precision_wait_for_the_scale_of_the_loss() -> None:
    """In float16 small gradients vanish unless the loss is scaled, which only the backward pass knows."""
    for dtype, yields in ((torch.float16, False), (torch.bfloat16, True)):
        head = HEAD.detach().to(dtype).requires_grad_()
        program, _ = recorded(lambda x, head=head: F.linear(x, head).sum(), [batch(1)[0].detach().to(dtype)], [head])
        assert Tiled(program, Axis(1, 1, TOKENS), 2).yields_gradients == yields


def test_more_tokens_than_float16_counts_are_a_mean() -> None:
    """Their number is no number of float16; each piece's sum is one."""
    tokens = 70_000
    scores = torch.full((tokens, 3), -0.5, dtype=torch.float16).requires_grad_()
    ids = torch.zeros(tokens, dtype=torch.int64)
    program, tensors = recorded(lambda x, y: F.nll_loss(x * 1, y), [scores, ids])
    _, key = register(program, Axis(0, tokens), 16)
    result, *_ = TracedTile.apply(key, *tensors)
    assert float(result.detach()) == pytest.approx(0.5, rel=0.01)


def test_the_gradient_of_a_weight_exists_once() -> None:
    """Bytes by torch's profiler: results, and for a piece a few tensors of its logits, but no second gradient."""
    vocabulary, width, tokens, pieces = 2000, 64, 256, 32
    head = torch.randn(vocabulary, width).requires_grad_()
    hidden, ids = torch.randn(1, tokens, width).requires_grad_(), torch.randint(vocabulary, (1, tokens))

    def loss(hidden: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, head).view(-1, vocabulary), ids.view(-1))

    program, tensors = recorded(loss, [hidden, ids], [head])
    tiled = Tiled(program, Axis(1, 1, tokens), pieces)
    tensors, needed = [tensor.detach() for tensor in tensors], [tensor.requires_grad for tensor in tensors]
    statistics = tiled.statistics(tensors)
    with Allocations(real=True) as allocations, allocations.span("tile"):
        results = tiled.forward_with_gradients(tensors, statistics, needed)
    weight, logits = 4 * vocabulary * width, 4 * vocabulary * tokens // pieces
    assert len(results) == 3
    assert weight < allocations.peak_bytes("tile") < weight + 4 * tokens * width + 4 * logits
    assert 4 * logits < weight
