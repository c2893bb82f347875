"""The training steps of the frontier benchmark: each a model with its data and loss, the same every time it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .networks import DenseLayer, DenseNet, Gpt, ResNet50, VisionTransformer

Stage = Callable[[Any], Any]
VOCABULARY, BATCH, LENGTH = 8192, 4, 256  # 4 x 256 x 8192 logits are 33.6 MB in float32


@dataclass
class Subject:
    """A step: `loss(model(*inputs), *targets)`, and how people cut such a model for checkpointing."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    blocks: dict[str, list[nn.Module]]
    """Name of a peer -> the modules that it checkpoints each by itself; ``per_block`` is always there."""
    sequence: Sequence[Stage] = field(default_factory=list)
    """Stages that make the model's output one after the other, for checkpoint_sequential; none where that is no way to
    write the model."""


MODELS: dict[str, Callable[[], Subject]] = {}
TITLES: dict[str, str] = {}


def subject(title: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Enter a factory under its own name, its random numbers from the same seed every time."""

    def enter(make: Callable[[], Subject]) -> Callable[[], Subject]:
        @functools.wraps(make)
        def seeded() -> Subject:
            torch.manual_seed(0)
            return make()

        MODELS[make.__name__] = seeded
        TITLES[make.__name__] = title
        return seeded

    return enter


def chain(model: nn.Sequential, data: dict[str, Any]) -> Subject:
    """A model of one part after the other; all but the last, which is its head, are its blocks."""
    parts = list(model.children())
    return Subject(model, blocks={"per_block": parts[:-1]}, sequence=parts, **data)


def images(batch: int, size: int, classes: int = 1000) -> dict[str, Any]:
    """Pictures, their labels and the loss."""
    pictures, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return {"inputs": (pictures,), "targets": (labels,), "loss": F.cross_entropy}


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy: logits (N, L, vocabulary), labels (N, L)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(loss: Callable[..., Tensor] = token_loss) -> dict[str, Any]:
    """Token ids, those that come next, and the loss."""
    ids, labels = (torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(2))
    return {"inputs": (ids,), "targets": (labels,), "loss": loss}


@subject("ResNet-18, batch 16, 224²")
def resnet18() -> Subject:
    from examples.resnet18 import ResNet18

    net = ResNet18()
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return chain(nn.Sequential(stem, *net.layer1, *net.layer2, *net.layer3, *net.layer4, head), images(16, 224))


@subject("ResNet-50, batch 8, 224²")
def resnet50() -> Subject:
    return chain(ResNet50(), images(8, 224))


@subject("DenseNet 4/8/12/8, growth 16, batch 8, 128²")
def densenet() -> Subject:
    model = DenseNet((4, 8, 12, 8), growth=16, channels=32, classes=10)
    layers = [module for module in model.modules() if isinstance(module, DenseLayer)]
    dense = [part for part in model.children() if next(part.children()) in layers]
    sequence = [stage for part in model.children() for stage in (part.children() if part in dense else (part,))]
    blocks = {"per_block": dense, "per_layer": [*layers]}
    return Subject(model, blocks=blocks, sequence=sequence, **images(8, 128, 10))


def volumes(size: int, classes: int = 2) -> dict[str, Any]:
    """One volume, the class of each voxel, and Dice with cross-entropy."""
    from monai.losses.dice import DiceCELoss

    shape = (1, 1, size, size, size)
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return {"inputs": (torch.randn(shape),), "targets": (torch.randint(classes, shape),), "loss": loss}


@subject("MONAI BasicUNet 3D, 64³")
def basic_unet() -> Subject:
    from monai.networks.nets.basic_unet import BasicUNet

    model = BasicUNet(3, 1, 2, features=(16, 16, 32, 64, 128, 16))
    first, *down = (model.conv_0, model.down_1, model.down_2, model.down_3, model.down_4)
    up = (model.upcat_4, model.upcat_3, model.upcat_2, model.upcat_1)

    # A U-Net as a sequence: every stage hands on what the decoder still needs.
    def descend(stage: nn.Module, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*kept, stage(kept[-1]))

    def climb(stage: nn.Module, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*kept[:-2], stage(kept[-1], kept[-2]))

    sequence: list[Stage] = [
        lambda x: (first(x),),
        *(functools.partial(descend, stage) for stage in down),
        *(functools.partial(climb, stage) for stage in up),
        lambda kept: model.final_conv(kept[0]),
    ]
    return Subject(model, blocks={"per_block": [first, *down, *up]}, sequence=sequence, **volumes(64))


@subject("MONAI UNETR, 64³")
def unetr() -> Subject:
    from monai.networks.nets.unetr import UNETR

    model = UNETR(1, 2, img_size=64, feature_size=16, hidden_size=384, mlp_dim=1536, num_heads=6)
    encoders = [model.encoder1, model.encoder2, model.encoder3, model.encoder4]
    decoders = [model.decoder5, model.decoder4, model.decoder3, model.decoder2]
    return Subject(model, blocks={"per_block": [*model.vit.blocks, *encoders, *decoders]}, **volumes(64))


@subject("ViT-S/16, batch 8, 224²")
def vit_s() -> Subject:
    return chain(VisionTransformer(), images(8, 224))


def decoder(dropout: float) -> Subject:
    """8 layers of 512, 8 heads, and an output layer of its own."""
    return chain(Gpt(layers=8, width=512, vocabulary=VOCABULARY, length=LENGTH, dropout=dropout), tokens())


@subject("GPT 8 x 512, 4 x 256 tokens")
def gpt() -> Subject:
    return decoder(0.0)


@subject("GPT 8 x 512, 4 x 256 tokens, dropout 0.1")
def gpt_dropout() -> Subject:
    return decoder(0.1)


def logits_loss(output: Any, labels: Tensor) -> Tensor:
    """Of a transformers model's output."""
    return token_loss(output.logits, labels)


@subject("LoRA of a Llama 8 x 512, 4 x 256 tokens")
def llama_lora() -> Subject:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(base, lora)  # pyright: ignore[reportArgumentType]  # it takes any transformers model
    return Subject(model.train(), blocks={"per_block": [*base.model.layers]}, **tokens(logits_loss))
