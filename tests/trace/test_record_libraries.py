"""Models as libraries write them, held to the accuracy that the README promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from truth.cpu_allocator import measured_peak

import memplan

Step = Callable[[], Any]


def _train(model: Any, optimizer: Any, forward: Callable[[], torch.Tensor]) -> Step:
    updater = optimizer([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        updater.zero_grad()
        forward().backward()
        updater.step()

    return step


def _language(name: str, **config: Any) -> Step:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    tokens = torch.randint(0, 1000, (4, 128))
    return _train(model, torch.optim.AdamW, lambda: model(input_ids=tokens, labels=tokens).loss)


_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def llama() -> Step:
    return _language("Llama", **_SIZES, num_key_value_heads=4)


def mixtral() -> Step:
    return _language("Mixtral", **_SIZES, num_key_value_heads=4, num_local_experts=4)


def bert() -> Step:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES))
    tokens, labels = torch.randint(0, 1000, (4, 128)), torch.randint(0, 2, (4,))
    return _train(model, torch.optim.SGD, lambda: model(input_ids=tokens, labels=labels).loss)


def vit() -> Step:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**{k: v for k, v in _SIZES.items() if k != "vocab_size"}, image_size=64)
    model, x = transformers.ViTModel(config), torch.randn(4, 3, 64, 64)
    return _train(model, torch.optim.SGD, lambda: model(x).pooler_output.pow(2).mean())


def lora() -> Step:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_key_value_heads=4))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    tokens = torch.randint(0, 1000, (4, 128))
    return _train(model, torch.optim.AdamW, lambda: model(input_ids=tokens, labels=tokens).loss)


def unet_3d() -> Step:
    nets, losses = pytest.importorskip("monai.networks.nets"), pytest.importorskip("monai.losses")
    model = nets.UNet(3, 1, 3, (8, 16, 32), (2, 2), num_res_units=1)
    loss = losses.DiceCELoss(to_onehot_y=True, softmax=True)
    x, y = torch.randn(1, 1, 32, 32, 32), torch.randint(0, 3, (1, 1, 32, 32, 32))
    return _train(model, torch.optim.Adam, lambda: loss(model(x), y))


def seg_res_net() -> Step:
    nets = pytest.importorskip("monai.networks.nets")
    model, x = nets.SegResNet(3, 8, 1, 2), torch.randn(1, 1, 32, 32, 32)
    return _train(model, torch.optim.SGD, lambda: model(x).pow(2).mean())


@pytest.mark.parametrize("build", [llama, mixtral, bert, vit, lora, unet_3d, seg_res_net])
def test_peak_is_within_a_percent_and_not_below_by_half_of_one(build: Callable[[], Step]) -> None:
    torch.manual_seed(0)
    predicted, measured = memplan.simulate(memplan.record(build)).peak_allocated, measured_peak(build)
    assert -0.005 * measured <= predicted - measured <= 0.01 * measured


@pytest.mark.parametrize("build", [llama, lora, unet_3d])
def test_sums_hold(build: Callable[[], Step]) -> None:
    explanation = memplan.explain(build)
    assert sum(explanation.by_cause.values()) == explanation.timeline.peak_allocated
    assert sum(row.saved_bytes for row in explanation.layers) == explanation.saved_bytes > 0
