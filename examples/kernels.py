"""A language model's head and loss, plain and by memplan.kernels: what a step takes at its peak, before it runs.

python examples/kernels.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memplan
from memplan import kernels

TOKENS, WIDTH, CLASSES = 8192, 2048, 128256


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head), targets)


def step_with(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        body = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.bfloat16)
        inputs, targets = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16), torch.randint(CLASSES, (TOKENS,))

        def step() -> None:
            loss(body(inputs), head.weight, targets).backward()

        return step

    return build


def main() -> None:
    for name, loss in [("plain torch", plain), ("memplan.kernels.cross_entropy", kernels.cross_entropy)]:
        trace = memplan.record(step_with(loss), device="h100", steps=1)
        peak = memplan.simulate(trace).peak_allocated
        print(f"{name:30} {peak / 2**30:5.2f} GiB")


if __name__ == "__main__":
    main()
