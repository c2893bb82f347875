"""What a model returns: in a training step, in evaluation mode, and its loss there, beside PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from truth.c_program import array, floats_of, printed_by

import memplan
from memplan.errors import InputError

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class States(NamedTuple):
    before: torch.Tensor
    after: torch.Tensor


class Several(nn.Module):
    """It returns scores, states that are no contiguous tensors, its input, and flags."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Linear(15, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        before = self.body(x)
        after = F.relu(self.norm(before))
        states = States(before.transpose(1, 2), after)
        return {"scores": self.head(after.flatten(1)), "states": states, "given": x, "active": after > 0}


class Auxiliary(nn.Module):
    """Two heads in training mode, one in evaluation mode, as torchvision's Inception has."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x: torch.Tensor) -> Any:
        outputs = tuple(head(x) for head in self.heads)
        return outputs if self.training else outputs[0]


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def scores_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["scores"], target)


def flat(output: Any) -> np.ndarray:
    tensors = [output["scores"], *output["states"], output["given"], output["active"].float()]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).detach().numpy()


@needs_compiler
def test_outputs_and_losses_are_those_of_both_modes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Several(), torch.randn(2, 2, 5), torch.tensor([1, 3])
    done = memplan.export(
        model, "2x2x5", targets="2:int64<4", loss=scores_loss, optimizer="sgd:lr=0.5", folder=tmp_path, name="net"
    )
    assert done.verdict.proven
    header = (tmp_path / "net.h").read_text()
    assert "#define NET_OUTPUTS 118 " in header, "2 * 4 + 3 * 2 * 3 * 5 + 2 * 2 * 5"
    assert "#define NET_OUTPUT_2_STATES_AFTER 38 " in header
    printed = printed_by(
        tmp_path,
        f"""
#include "net.h"
#include <stdio.h>
#include <string.h>
#include <stddef.h>
{array("x", x)}
{array("y", y)}
static net_state s, before;
static float output[NET_OUTPUTS];
static void show(float loss)
{{
    printf("%.9g\\n", (double)loss);
    for (int k = 0; k < NET_OUTPUTS; k++)
        printf("%.9g\\n", (double)output[k]);
}}
int main(void)
{{
    net_init(&s);
    show(net_step_to(&s, x, y, output));
    before = s;
    show(net_evaluate(&s, x, y, output));
    printf("%.9g\\n", (double)net_evaluate(&s, x, y, 0));
    show((float)net_infer(&s, x, output));
    printf("%d\\n", memcmp(&s, &before, offsetof(net_state, arena)));
    return 0;
}}
""",
    )
    size = 119
    found = floats_of(printed)
    trained = model(x)
    loss = scores_loss(trained, y)
    np.testing.assert_allclose(found[:size], [loss.item(), *flat(trained)], rtol=2e-5, atol=2e-6)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    evaluated = model.eval()(x)
    loss = scores_loss(evaluated, y).item()
    np.testing.assert_allclose(found[size : 2 * size], [loss, *flat(evaluated)], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found[2 * size], loss, rtol=2e-5)
    np.testing.assert_allclose(found[2 * size + 1 : -1], [0, *flat(evaluated)], rtol=2e-5, atol=2e-6)
    assert found[-1] == 0, "neither changes weights, statistics or counters"


@needs_compiler
def test_a_loss_that_evaluation_cannot_have_is_left_out(tmp_path: Path) -> None:
    pair = lambda output, target: F.cross_entropy(output[0] + output[1], target)  # noqa: E731
    step: dict[str, Any] = {"targets": "2:int64<2", "optimizer": "sgd", "name": "net"}
    assert memplan.export(Auxiliary(), "2x3", loss=pair, folder=tmp_path / "a", **step).verdict.proven
    header = (tmp_path / "a" / "net.h").read_text()
    assert "net_evaluate" not in header
    assert "#define NET_OUTPUTS 4 " in header
    assert "#define NET_STEP_OUTPUTS 8 " in header


@needs_compiler
def test_a_model_that_returns_its_loss_is_inferred_alone(tmp_path: Path) -> None:
    done = memplan.export(OwnLoss(), "2x3", optimizer="sgd", folder=tmp_path, name="net")
    assert done.verdict.proven
    assert "net_evaluate" not in (tmp_path / "net.h").read_text()


class Nothing(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return object()


def test_a_model_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="returns a object"):
        memplan.export(
            Nothing(3, 2), "2x3", targets="2:int64<2", loss=F.cross_entropy, optimizer="sgd", folder=tmp_path
        )
