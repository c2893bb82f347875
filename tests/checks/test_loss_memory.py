"""Logits of vocabulary size: bytes as the recording of the chunked loss has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checks.recorded_peak import recorded_peak
from torch import Tensor, nn

import memplan
from memplan.checks.loss_memory import chunked_peak

ID = "loss-memory"
pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no chunked loss")


class Model(nn.Module):
    def __init__(self, chunked: bool = False, classes: int = 20000) -> None:
        super().__init__()
        self.body, self.head, self.chunked = nn.Linear(64, 64), nn.Linear(64, classes, bias=False), chunked

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.chunked:
            return F.linear_cross_entropy(hidden, self.head.weight, target, options=nn.LinearCrossEntropyOptions())
        return F.cross_entropy(self.head(hidden), target)


def found(make: object, *inputs: str, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(make, *inputs, device=device) if finding.id == ID]


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_the_bytes_are_those_of_the_chunked_loss(device: str) -> None:
    inputs = ("512x64", "512:int64<20000")
    (finding,) = found(Model, *inputs, device=device)
    plain, chunked = (recorded_peak(lambda c=c: Model(c), *inputs, device=device) for c in (False, True))
    assert finding.bytes == pytest.approx(plain - chunked, rel=0.01)
    assert finding.details["each"] == 512 * 20000 * 4
    assert finding.details["copies"] >= 2
    assert not finding.details["estimate"]
    assert found(lambda: Model(True), *inputs, device=device) == []


class Shifted(nn.Module):
    """As language models have it: a token is told from those before it, in float32."""

    def __init__(self, chunked: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(20000, 64), nn.Linear(64, 64)
        self.head, self.chunked = nn.Linear(64, 20000, bias=bias), chunked

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, target = self.body(self.embed(tokens)), tokens[:, 1:].reshape(-1)
        if self.chunked:
            rows, options = hidden[:, :-1].reshape(-1, 64), nn.LinearCrossEntropyOptions()
            bias = self.head.bias
            return F.linear_cross_entropy(rows, self.head.weight, target, linear_bias=bias, options=options)
        logits = self.head(hidden).float()[:, :-1].contiguous()
        return F.cross_entropy(logits.view(-1, 20000), target)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("bias", [False, True])
def test_of_a_language_model_too(bias: bool, device: str) -> None:
    tokens = "4x128:int64<20000"
    (finding,) = found(lambda: Shifted(bias=bias), tokens, device=device)
    plain, chunked = (recorded_peak(lambda c=c: Shifted(c, bias), tokens, device=device) for c in (False, True))
    assert finding.bytes == pytest.approx(plain - chunked, rel=0.01)
    assert not finding.details["estimate"]


def test_in_mixed_precision_it_is_an_estimate_and_says_so() -> None:
    found = memplan.check(Shifted, "4x128:int64<20000", device="cpu", autocast="bfloat16")
    (finding,) = [one for one in found if one.id == ID]
    assert finding.details["estimate"]
    assert "an estimate" in finding.message


def test_a_few_classes_are_no_vocabulary() -> None:
    assert found(lambda: Model(classes=1000), "512x64", "512:int64<1000") == []


def test_the_chunks_are_recorded_with_the_sizes_at_hand() -> None:
    """Against a real run: what the allocator holds beyond weight, hidden states and their gradients."""

    def build() -> object:
        weight, hidden = nn.Parameter(torch.zeros(8000, 32)), torch.zeros(256, 32, requires_grad=True)
        target = torch.zeros(256, dtype=torch.long)

        def step() -> None:
            F.linear_cross_entropy(hidden, weight, target, options=nn.LinearCrossEntropyOptions()).backward()

        return step

    peak = memplan.simulate(memplan.measure(build, steps=1)).peak_allocated  # pyright: ignore[reportArgumentType]  # a build
    held = 2 * 4 * 32 * (8000 + 256) + 8 * 256
    assert chunked_peak(256, 8000, 32, "float32") == pytest.approx(peak - held, rel=0.01)
