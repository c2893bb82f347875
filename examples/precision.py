"""How far results in fewer bits are from those in float32, measured on this CPU.

python examples/precision.py
"""

from __future__ import annotations

import torch
from gates import make

import memplan


def main() -> None:
    torch.manual_seed(0)
    model, data = make(), torch.randn(64, 1024)
    mixed = memplan.compare(model, model, data, b_options={"autocast": "bf16"}, measure=True)
    outputs, gradients = mixed.apart
    print(f"bfloat16 autocast: outputs are {outputs.relative:.1%} apart, gradients {gradients.relative:.1%}")
    error = memplan.quantize(model, data, weights="int8").error
    if error is not None:
        print(f"weights in int8: outputs are {error.relative:.1%} apart")


if __name__ == "__main__":
    main()
