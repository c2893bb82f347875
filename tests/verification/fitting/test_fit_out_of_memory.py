"""Running out of memory at any point of `fit` leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from environment import slow
from torch import nn
from truth.module_state import everything
from verification.fitting.quick import fit, plan

from memplan.rewriting import engine
from memplan.verification.fitting import fit as fitting
from memplan.verification.fitting import prover
from memplan.verification.measurement import state_copies, trial

X = torch.linspace(-1, 1, 256 * 16).reshape(256, 16)
POINTS: tuple[tuple[Any, str], ...] = (
    (state_copies._Copier, "_copy_tensor"),  # of the weights
    (trial, "copy_tensors"),  # of the batch
    (trial.Trial, "_forward_backward"),
    (trial.Trial, "update_step"),
    (engine.Engine, "run"),  # the planned step itself
    (prover, "compare"),
    (fitting, "install"),
)


def network() -> tuple[nn.Module, int]:
    """A model in training, which has gradients, changes buffers and draws random numbers; and a budget for a plan."""
    torch.manual_seed(0)
    parts = (nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU())
    model = nn.Sequential(*parts, nn.Linear(64, 8))
    model(X).sum().backward()
    made = plan(model, X, budget="1 GiB")
    return model, int(made.floor + 0.3 * (made.eager_peak - made.floor))


class Memory:
    """Counts calls of the points, and runs out at one of them."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0

    def taking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return function(*args, **kwargs)

        return run

    @contextmanager
    def short(self, at: int, points: tuple[tuple[Any, str], ...]) -> Iterator[None]:
        """Within this context the call of number ``at`` runs out of memory; 0: none."""
        self.calls, self.at = 0, at
        with ExitStack() as patches:
            for home, name in points:
                patches.enter_context(patch.object(home, name, self.taking(getattr(home, name))))
            yield


@pytest.mark.parametrize(
    "point",
    [POINTS[6], *slow(*((one,) for one in POINTS if one[1] != "install"))],
    ids=lambda point: point[1],
)
def test_the_model_is_as_it_was(point: tuple[Any, str]) -> None:
    model, budget = network()
    before, memory = everything(model, X), Memory()
    with memory.short(0, (point,)):
        fit(model, X, budget=budget, pairs=1).undo()
    calls = memory.calls
    assert calls
    assert everything(model, X) == before
    for at in sorted({1, -(-calls // 2), calls}):
        with memory.short(at, (point,)), pytest.raises(torch.OutOfMemoryError):
            fit(model, X, budget=budget, pairs=1)
        assert everything(model, X) == before
    fitted = fit(model, X, budget=budget, pairs=0)
    assert fitted.proof.ok
