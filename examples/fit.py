"""A ResNet-18 fitted to a budget, with its proof.

python examples/fit.py
"""

from __future__ import annotations

import torch
from resnet18 import make
from torch.nn import functional as F

import memplan


def main() -> None:
    torch.manual_seed(0)
    model = make()
    images, labels = torch.randn(16, 3, 112, 112), torch.randint(1000, (16,))
    step = {"targets": labels, "loss": F.cross_entropy, "budget": "136 MiB"}
    # estimated seconds are the same each time; without costs, each op is timed on this machine
    plan = memplan.plan(model, images, costs="roofline", **step)
    fitted = memplan.fit(model, images, plan=plan, pairs=0, **step)
    fitted.loss(images, labels).backward()  # as planned; fitted.model is the model as you know it

    print(plan.summary)
    print()
    print(fitted.proof)


if __name__ == "__main__":
    main()
