"""Activations that weights in float32 promote, against a measured model that is in half precision throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

ID = "promoted-stream"
WIDTH, TOKENS = 256, 1024
Build = Callable[[], Callable[[], Any]]


class Norm(nn.Module):
    """As RMSNorm in transformers: its weight alone decides on what it returns."""

    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.weight, self.back = nn.Parameter(torch.ones(WIDTH)), back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return (self.weight * normed).to(x.dtype) if self.back else self.weight * normed


class Block(nn.Module):
    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(back=back), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, back: bool) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(512, WIDTH), nn.Sequential(*[Block(back=back) for _ in range(4)])
        self.register_buffer("positions", torch.randn(TOKENS, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens) + self.positions)


def training(*in_float32: str, stored: torch.dtype = torch.bfloat16, back: bool = False, device: str = "cpu") -> Build:
    """A model stored in half precision but for the parameters and buffers with these words in their names."""

    def build() -> Callable[[], Any]:
        model, tokens = Net(back).to(stored), torch.randint(0, 512, (TOKENS,))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if any(word in name for word in in_float32):
                tensor.data = tensor.data.float()
        model, tokens = model.to(device), tokens.to(device)
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = model(tokens).float().square().mean()
            loss.backward()
            optimizer.step()

        return step

    return build


def found(build: Build, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


@pytest.mark.parametrize("kept", [("embedding",), ("positions",), ("embedding", "norm", "positions")])
def test_the_bytes_are_what_a_measured_step_takes_less(kept: tuple[str, ...]) -> None:
    (finding,) = found(training(*kept))
    assert finding.severity == "warning"
    assert finding.bytes == measured_peak(training(*kept)) - measured_peak(training())
    assert finding.bytes > TOKENS * WIDTH * 2 * 4  # the stream after each block
    assert all(any(word in name for word in kept) for name in finding.details["names"])
    assert finding.details["dtype"] == "bfloat16"


def test_on_a_card() -> None:
    def peak(*kept: str) -> int:
        recorded = memplan.record(training(*kept, device="cuda"), device="h100")
        return memplan.simulate(recorded, workspace="low").peak_allocated

    (finding,) = found(training("embedding", "norm", device="cuda"), "h100")
    assert finding.bytes == pytest.approx(peak("embedding", "norm") - peak(), rel=0.01)
    assert found(training(device="cuda"), "h100") == []


@pytest.mark.parametrize(
    "sound",
    [
        training(),
        training("norm", back=True),
        training(stored=torch.float32),
    ],
    ids=["half throughout", "cast back", "masters of mixed precision"],
)
def test_sound_models(sound: Build) -> None:
    assert found(sound) == []


def test_a_model_in_float32_without_autocast() -> None:
    def build() -> Callable[[], Any]:
        model, tokens = Net(back=False), torch.randint(0, 512, (TOKENS,))
        return lambda: model(tokens).square().mean().backward()

    assert found(build) == []


def llama(*, prepared: bool) -> Build:
    """A base model in bfloat16 with adapters, prepared for training as peft does it for quantized models."""

    def build() -> Callable[[], Any]:
        transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        config = transformers.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=512,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).bfloat16().requires_grad_(False)
        if prepared:  # prepare_model_for_kbit_training, which casts every parameter that is not quantized
            for name, parameter in model.named_parameters():
                if "proj" not in name:
                    parameter.data = parameter.data.to(torch.float32)
        model.enable_input_require_grads()
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        tokens = torch.randint(0, 512, (4, 256))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()

        return step

    return build


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and peft
def test_a_model_that_peft_prepared() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    (finding,) = found(llama(prepared=True))
    assert any("embed_tokens" in name for name in finding.details["names"])
    assert any("norm" in name for name in finding.details["names"])
    head = 512 * 256 * 4  # frozen and only read in half precision: of another check
    spared = measured_peak(llama(prepared=True)) - measured_peak(llama(prepared=False))
    assert finding.bytes == pytest.approx(spared, abs=head)
    assert found(llama(prepared=False)) == []


def quantized(*, prepared: bool) -> Build:
    """Layers of four bits, which cast what they read and cast their result back."""

    def build() -> Callable[[], Any]:
        layer = pytest.importorskip("bitsandbytes").nn.Linear4bit
        model: Any = Net(back=False).bfloat16().requires_grad_(False)
        for block in model.blocks:
            for name in ("up", "down"):
                packed = layer(WIDTH, WIDTH, compute_dtype=torch.bfloat16, quant_type="nf4")
                setattr(block, name, packed.bfloat16().requires_grad_(False).to("cpu"))
        if prepared:
            for name, parameter in model.named_parameters():
                if "norm" in name or "embedding" in name:
                    parameter.data = parameter.data.float()
        first, tokens = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16)), torch.randint(0, 512, (TOKENS,))
        model.embedding.register_forward_hook(lambda *call: call[-1] + first)

        def step() -> None:
            first.grad = None
            model(tokens).float().square().mean().backward()

        return step

    return build


def test_layers_of_four_bits() -> None:
    pytest.importorskip("bitsandbytes")
    (finding,) = found(quantized(prepared=True))
    spared = measured_peak(quantized(prepared=True)) - measured_peak(quantized(prepared=False))
    assert finding.bytes == pytest.approx(spared, rel=0.001)  # but for tables of codes
    assert found(quantized(prepared=False)) == []
