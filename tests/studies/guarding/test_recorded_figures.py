"""What is taken from a recording, beside sizes worked out by hand and the simulator's own peak."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan.studies.guarding.outcome import compare_with
from memplan.studies.guarding.recorded_figures import RecordedFigures, figures_of_trace

HEADS, LENGTH, WIDTH, BATCH = 8, 128, 64, 2


class Attention(nn.Module):
    """Attention over (N, L, 64), with a bias that gets a gradient, or without."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mask = None if self.bias is None else self.bias.expand(len(x), -1, -1, -1)
        return x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(x.shape)


class Net(nn.Module):
    """Four blocks; from the second on the attention has a bias, where it is asked for."""

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention(biased and at > 0)}) for at in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = block["attn"](x)
        return x


def step(make: Callable[[], nn.Module], *shape: int, device: str = "h100", bf16: bool = False) -> RecordedFigures:
    def build() -> Callable[[], None]:
        model, data = make().to(torch.bfloat16 if bf16 else torch.float32), torch.randn(*shape)
        data = data.to(torch.bfloat16) if bf16 else data
        return lambda: model(data).sum().backward()

    return figures_of_trace(memplan.record(build, device=device, cudnn=False), target="net.py:build")


def attention(biased: bool) -> RecordedFigures:
    return step(lambda: Net(biased), BATCH, LENGTH, WIDTH, bf16=True)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_layers_and_causes_add_up_to_the_peak_of_the_simulator(device: str) -> None:
    def build() -> Callable[[], None]:
        model, data = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(32, 64)
        return lambda: model(data).sum().backward()

    trace = memplan.record(build, device=device)
    timeline = memplan.simulate(trace, workspace="low")
    found = figures_of_trace(trace, target="x").figures
    assert (found.peak, found.reserved) == (timeline.peak_allocated, timeline.peak_reserved)
    assert sum(part.bytes for part in found.held) == found.peak
    weights = {part.layer: part.bytes for part in found.held if part.cause == "weight"}
    assert weights == {"0": (64 * 256 + 256) * 4, "2": (256 * 8 + 8) * 4}
    assert found.torch == torch.__version__.split("+")[0]


def test_a_wider_layer_is_found_with_its_bytes() -> None:
    def make(width: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(OrderedDict(one=nn.Linear(64, width), two=nn.Linear(width, 64)))

    before, now = (step(make(width), 16, 64, device="cpu") for width in (32, 96))
    causes = {
        (row.cause, change.name): row for change in compare_with(before.figures, now).changes for row in change.causes
    }
    for layer, more in (("one", 64 * 64 * 4 + 64 * 4), ("two", 64 * 64 * 4)):
        assert causes["weight", layer].difference == more
        assert causes["weight", layer].a == {"one": (64 * 32 + 32) * 4, "two": (64 * 32 + 64) * 4}[layer]


def test_a_mask_with_a_gradient_takes_the_kernel_away_and_that_is_said() -> None:
    before, now = attention(False), attention(True)
    outcome = compare_with(before.figures, now)
    change = outcome.changes[0]
    assert change.name == "attn of blocks 1 to 3"
    assert change.why.startswith("cuDNN's attention became memory-efficient attention (the mask needs a gradient")
    (weights,) = (row for row in change.causes if row.cause == "weight")
    assert (weights.a, weights.b) == (0, 3 * HEADS * LENGTH * LENGTH * 2)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = int(str(change.where).rpartition(":")[2])
    assert "scaled_dot_product_attention(q, k, v, mask)" in lines[line - 1]


def test_without_a_fused_kernel_it_is_said() -> None:
    def math() -> nn.Module:
        return Net()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        now = step(math, BATCH, LENGTH, WIDTH, bf16=True)
    change = compare_with(attention(False).figures, now).changes[0]
    assert change.name.startswith("attn of blocks 0 to ")
    assert change.why.startswith("attention is no longer fused: cuDNN's attention became ")


def test_a_doubled_batch_doubles_what_is_saved_and_the_inputs() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    before, now = (step(make, batch, 64, device="cpu") for batch in (128, 256))
    outcome = compare_with(before.figures, now)
    assert "the inputs take 64.0 KiB, 2 times the 32.0 KiB of the baseline" in outcome.notes[0]
    assert before.figures.by_cause["input"] == 128 * 64 * 4
    assert now.figures.by_cause["saved"] == 2 * before.figures.by_cause["saved"]


def test_the_same_step_takes_the_same() -> None:
    one, other = attention(True), attention(True)
    assert one.figures == other.figures
    assert compare_with(one.figures, other).changes == ()
