"""A small training on a device: a network that knows bars by their direction learns on after its sensor has drifted."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from truth.c_program import array


def normed(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after)]


def bars(count: int, seed: int, *, drifted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images of a bar in one of six directions; a sensor that has drifted turns and dims them."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(6, (count,), generator=generator)
    angle = classes * math.pi / 6 + (0.4 if drifted else 0.0) + 0.12 * torch.randn(count, generator=generator)
    grid = torch.linspace(-1, 1, 16)
    across = grid[:, None] * torch.cos(angle)[:, None, None] - grid[None, :] * torch.sin(angle)[:, None, None]
    noise = 0.25 * torch.randn(count, 16, 16, generator=generator)
    images = (0.6 if drifted else 1.0) * torch.exp(-12 * across.square()) + noise
    return (images[:, None] * 90 + 80).clamp(0, 255).to(torch.uint8), classes


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        *normed(1, 8, 3), nn.ReLU6(), *normed(8, 8, 3, 2, groups=8), nn.ReLU6(), *normed(8, 16, 1), nn.ReLU6(),
        *normed(16, 16, 3, 2), nn.ReLU6(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 6),
    )  # fmt: skip


def accuracy(
    folder: Path, learned: tuple[torch.Tensor, torch.Tensor], test: tuple[torch.Tensor, torch.Tensor], seed: int = 1
) -> float:
    """Train on the device on each sample twice; return the share of the test that it then recognises. ``seed``: of the
    device's random numbers."""
    images = ", ".join(map(str, torch.cat([learned[0], test[0]]).reshape(-1).tolist()))
    text = f"""
#include "net.h"
#include <stdio.h>
static net_state s;
static const uint8_t x[][256] = {{{images}}};
{array("y", torch.cat([learned[1], test[1]]).int())}
int main(void)
{{
    int right = 0;
    net_init(&s);
    net_seed(&s, {seed});
    for (int k = 0; k < {2 * len(learned[0])}; k++)
        net_step(&s, x[k % {len(learned[0])}], y + k % {len(learned[0])});
    for (int k = {len(learned[0])}; k < {len(learned[0]) + len(test[0])}; k++) {{
        float out[6];
        int most = 0;
        net_infer(&s, x[k], out);
        for (int c = 1; c < 6; c++)
            most = out[c] > out[most] ? c : most;
        right += most == y[k];
    }}
    printf("%d", right);
    return 0;
}}
"""
    (folder / "main.c").write_text(text)
    build = ["cc", "-std=c99", "-O2", "-Wno-missing-braces", str(folder / "main.c"), str(folder / "net.c"), "-lm"]
    subprocess.run([*build, "-o", str(folder / "main")], check=True)
    done = subprocess.run([str(folder / "main")], check=True, capture_output=True, text=True)
    return int(done.stdout) / len(test[0])


def settled_cnn(seed: int = 0) -> nn.Sequential:
    """The network in evaluation mode, trained before the sensor drifts. ``seed``: of its weights and its images."""
    torch.manual_seed(seed)
    model, images = small_cnn(), bars(600, 10 * seed + 1, drifted=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(120):
        at = torch.arange(32) + 32 * (step % 18)
        optimizer.zero_grad()
        F.cross_entropy(model((images[0][at].float() - 100) / 50), images[1][at]).backward()
        optimizer.step()
    return model.eval()
