"""Accumulated and clipped gradients, and optimizers with groups, beside a loop of PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional as F
from truth.c_program import array, floats_of, printed_by

import memplan
from memplan.errors import InputError, UsageError
from memplan.exporting.exported import Exported

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

STEPS = 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": rest, "lr": 0.05}], momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.5, 0.6), maximize=True),
    "groups": groups,
}


def exported(folder: Path, optimizer: str = "sgd", **options: Any) -> Exported:
    step: dict[str, Any] = {"targets": "1:int64<3", "loss": F.cross_entropy, "optimizer": OPTIMIZERS[optimizer]}
    return memplan.export(network(), "1x2x6x6", folder=folder, name="net", **step | options)


def in_torch(optimizer: str, accumulate: int, clip: Callable[[Any], Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return the weights after steps in PyTorch, the gradients that are left over applied at the end."""
    model = network().double()
    update = OPTIMIZERS[optimizer](model.parameters())
    for k in range(STEPS):
        F.cross_entropy(model(x[k : k + 1].double()), y[k : k + 1]).backward()
        if (k + 1) % accumulate == 0 or k == STEPS - 1:
            clip(model.parameters())
            update.step()
            update.zero_grad()
    return np.concatenate([weight.detach().numpy().reshape(-1) for weight in model.parameters()])


@needs_compiler
@pytest.mark.parametrize(
    ("optimizer", "options", "clip"),
    [
        ("sgd", {"accumulate": 3}, lambda p: None),
        ("groups", {"accumulate": 2, "clip_norm": 0.5}, lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
        ("amsgrad", {"clip_value": 0.01}, lambda p: nn.utils.clip_grad_value_(p, 0.01)),
        *slow(
            ("amsgrad", {"clip_norm": 0.5}, lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
            ("groups", {"accumulate": 4, "clip_value": 0.05}, lambda p: nn.utils.clip_grad_value_(p, 0.05)),
        ),
    ],
)
def test_weights_are_those_of_a_loop_in_torch(
    optimizer: str, options: dict[str, Any], clip: Callable[[Any], Any], tmp_path: Path
) -> None:
    done = exported(tmp_path, optimizer, **options)
    assert done.verdict.proven
    accumulate = options.get("accumulate", 1)
    x, y = torch.randn(STEPS, 2, 6, 6), torch.randint(3, (STEPS,))
    update = "net_update(&s); net_update(&s);" if "net_update" in (tmp_path / "net.h").read_text() else ""
    printed = printed_by(
        tmp_path,
        f"""
#include "net.h"
#include <stdio.h>
{array("x", x)}
{array("y", y)}
static net_state s;
int main(void)
{{
    net_init(&s);
    for (int k = 0; k < {STEPS}; k++)
        net_step(&s, x + 72 * k, y + k);
    {update}
    for (int k = 0; k < NET_WEIGHTS; k++)
        printf("%.9g\\n", (double)s.weights[k]);
    return 0;
}}
""",
    )
    weights, start = floats_of(printed), np.concatenate([w.detach().reshape(-1) for w in network().parameters()])
    expected, unclipped = in_torch(optimizer, accumulate, clip, x, y), in_torch(optimizer, 1, lambda p: None, x, y)
    scale = np.abs(expected - start).max()
    assert np.abs(weights - expected).max() < 2e-4 * scale
    assert np.abs(weights - unclipped).max() > 2e-2 * scale, "the option changes something"


def test_gradients_that_are_added_up_take_a_float_for_each_weight(tmp_path: Path) -> None:
    plain, added = exported(tmp_path / "a", verify=False), exported(tmp_path / "b", verify=False, accumulate=8)
    assert added.state == plain.state + 4 * (plain.trained + 1), "gradients, and the number of calls"
    assert added.ram == added.state + added.arena + added.inputs
    assert added.smallest_budget <= added.ram
    exported(tmp_path / "c", budget=added.smallest_budget, accumulate=8, verify=False)
    assert exported(tmp_path / "d", clip_value=1.0, verify=False).state == plain.state


@pytest.mark.slow
@needs_compiler
def test_groups_may_be_of_the_model_itself(tmp_path: Path) -> None:
    model, step = network(), {"targets": "1:int64<3", "loss": F.cross_entropy, "name": "net"}
    convolution, head = model[0].parameters(), list(model[3].parameters())
    optimizer = lambda _: torch.optim.AdamW([{"params": convolution, "lr": 0.02}, {"params": head}])  # noqa: E731
    done = memplan.export(model, "1x2x6x6", optimizer=optimizer, folder=tmp_path / "a", **step)
    assert done.verdict.proven
    assert "float rates[2];" in (tmp_path / "a" / "net.h").read_text()
    of_head = lambda _: torch.optim.SGD(head, lr=0.1)  # noqa: E731
    done = memplan.export(model, "1x2x6x6", optimizer=of_head, folder=tmp_path / "b", **step)
    assert done.verdict.proven
    assert done.trained == 3 * 144 + 3, "the head alone: other weights are frozen"
    foreign = lambda _: torch.optim.SGD(network().parameters(), lr=0.1)  # noqa: E731
    with pytest.raises(InputError, match="none of the model's parameters"):
        memplan.export(model, "1x2x6x6", optimizer=foreign, folder=tmp_path / "c", **step)


@needs_compiler
def test_a_rate_of_a_group_changes_that_group_alone(tmp_path: Path) -> None:
    exported(tmp_path, "groups", verify=False)
    printed = printed_by(
        tmp_path,
        """
#include "net.h"
#include <stdio.h>
static net_state s, t;
int main(void)
{
    const float x[72] = {1, 2, 3};
    const int32_t y = 1;
    net_init(&s);
    t = s;
    s.rates[0] = 0;
    net_step(&s, x, &y);
    int first = 0, rest = 0;
    for (int k = 0; k < NET_WEIGHTS; k++) {
        first += k < 72 && s.weights[k] != t.weights[k];
        rest += k >= 72 && s.weights[k] != t.weights[k];
    }
    printf("%d %d", first, rest > 0);
    return 0;
}
""",
    )
    assert printed == "0 1"


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 0}, {"accumulate": True}, {"accumulate": 2.0}, {"clip_norm": -1.0}, {"clip_norm": float("nan")},
        {"clip_value": 0}, {"clip_value": "1"}, {"clip_norm": 1.0, "clip_value": 1.0},
    ],
)  # fmt: skip
def test_what_no_gradient_can_be_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"accumulate|clip"):
        exported(tmp_path, **options)
    assert not list(tmp_path.iterdir())
