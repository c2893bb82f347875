from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memplan.errors import InputError
from memplan.planning.updates import update_of
from memplan.verification.measured import measure_step, storage_bytes

SHAPES = [((64, 512), (512, 1), "float32"), ((512,), (1,), "float32")]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_update_are_what_the_allocator_says(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape, _, _ in SHAPES]
    optimizer = OPTIMIZERS[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    found = update_of(OPTIMIZERS[name], SHAPES)
    assert found.state == storage_bytes(held)
    assert abs(found.most - measure_step(optimizer.step).growth_peak) <= 64  # scalars that kernels wrap


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be recorded"):
        update_of(torch.optim.LBFGS, SHAPES)
