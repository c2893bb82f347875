"""A change that costs memory, and what the guard says of it: attention gets a bias, and its kernel is another one.

    python examples/guard.py

Writes a network into a folder of its own, a baseline beside it, and then changes the network.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import memplan

NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width=512, heads=8, length=1024):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(512), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


def make():
    return nn.Sequential(*[Block() for _ in range(12)])
"""
CHANGES = {
    "heads\n": "heads\n        self.bias = nn.Parameter(torch.zeros(heads, length, length))\n",
    "(q, k, v)": "(q, k, v, self.bias.expand(batch, -1, -1, -1))",
}
STEP = ["network.py:make", "--input", "4x1024x512", "--autocast", "bf16", "--optimizer", "adamw", "--device", "h100"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        network, text = Path(folder) / "network.py", NETWORK
        network.write_text(text)
        guard(folder, "--update")
        for old, new in CHANGES.items():
            text = text.replace(old, new)
        network.write_text(text)
        guard(folder)
    try:
        memplan.assert_peak(make, "4x512", at_most="6 MiB", device="cpu")
    except AssertionError as error:
        print(error)


def guard(folder: str, *options: str) -> None:
    command = [sys.executable, "-m", "memplan.cli", "guard", *STEP, "--baseline", "memory.json", *options]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False)
    print(done.stdout)


def make() -> object:
    from torch import nn

    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)])


if __name__ == "__main__":
    main()
