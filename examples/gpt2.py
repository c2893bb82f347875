"""GPT-2 from its configuration, without its weights, and one step of its training.

    memplan explain examples/gpt2.py:build --arg batch=4 --arg sequence=512
    memplan explain examples/gpt2.py:build --arg layers=48 --arg width=1600     # GPT-2 XL
    python examples/gpt2.py

`build` makes model, data and optimizer and returns the step; its arguments are what `--arg` sets.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def make(layers: int = 12, width: int = 768) -> nn.Module:
    """Every GPT-2 has heads of 64 features: 12 layers of 768 are the small one, 48 of 1600 the XL."""
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64))


def build(batch: int = 8, sequence: int = 1024, layers: int = 12, width: int = 768) -> Callable[[], None]:
    model = make(layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(50257, (batch, sequence))
    inputs = {"input_ids": tokens, "labels": tokens}

    def step() -> None:
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    import memplan

    print(memplan.explain(build))
