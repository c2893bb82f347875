"""Models that read flags only to raise are fitted, and raise as they would without a plan."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F
from verification.fitting import quick

from memplan.errors import DataDependentError

fit = partial(quick.fit, pairs=0)


def _layers(last: int) -> nn.Sequential:
    torch.manual_seed(0)
    wide = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*wide, nn.Linear(64, last))


class Policy(nn.Module):
    """A policy whose distributions check their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(4)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        outputs = self.layers(states)
        which = torch.distributions.Categorical(logits=outputs[:, :2])
        how_far = torch.distributions.Normal(outputs[:, 2], F.softplus(outputs[:, 3]))
        return -(which.log_prob(actions) + how_far.log_prob(actions.float())).mean() - 0.01 * which.entropy().mean()


class Variances(nn.Module):
    """A loss of torch's own that raises for negative variances."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(2)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self.layers(inputs).chunk(2, -1)
        return F.gaussian_nll_loss(mean, targets, variance + 3)


class Exploded(Exception):
    """The model's own."""


class Checked(nn.Module):
    """A model with a check of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = _layers(2), nn.BatchNorm1d(2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs)
        assert not outputs.isnan().any()
        if (outputs.abs() > 1e6).any().item():
            raise Exploded("too far")
        return self.norm(outputs).square().mean()


CASES = {
    "distributions": (Policy, (torch.randn(512, 64), torch.randint(0, 2, (512,)))),
    "torch's loss": (Variances, (torch.randn(512, 64), torch.randn(512, 1))),
    "checks of its own": (Checked, (torch.randn(512, 64),)),
}


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        ("distributions", "graph"),
        *slow(*((case, "graph") for case in CASES if case != "distributions")),
        *slow(*((case, "inductor") for case in ("checks of its own", "distributions", "torch's loss"))),
    ],
)
def test_a_model_with_guards_is_fitted(case: str, engine: str) -> None:
    make, inputs = CASES[case]
    fitted = fit(make(), *inputs, budget="1.25 MiB", engine=engine)  # pyright: ignore[reportArgumentType]
    assert fitted.proof.measured
    assert fitted.plan.eager_peak > fitted.plan.budget >= fitted.proof.peak


def test_a_guard_raises_the_models_own_exception_and_training_goes_on() -> None:
    model, twin = Checked(), Checked()
    twin.load_state_dict(model.state_dict())
    inputs, far = CASES["checks of its own"][1][0], torch.full((512, 64), 1e12)
    fitted = fit(model, inputs, budget="1.3 MiB", engine="graph")
    for one in (model, twin):
        torch.manual_seed(1)
        one(inputs).backward()
        one(inputs).backward()  # gradients are held
    assert any("planned anew" in note for note in fitted.notes)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(Exploded, match="too far"):
        model(far)
    with pytest.raises(AssertionError):
        model(torch.full((512, 64), float("nan")))
    for one in (model, twin):
        torch.manual_seed(2)
        one(inputs).backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, before[name])
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(Exploded, match="too far"):
        model(far[:256])  # while it is planned
    model(inputs[:256]).backward()  # a call that runs unplanned warns, which is an error here


class Ends(Checked):
    """A model that ends the process where its output is no number."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs)
        if outputs.isnan().any():
            sys.exit("nan in the output")
        return outputs.square().mean()


def test_a_model_that_would_end_the_process_is_fitted_and_ends_it_when_it_should() -> None:
    model = Ends()
    fit(model, torch.randn(512, 64), budget="1.25 MiB", engine="graph")
    model(torch.randn(512, 64)).backward()
    with pytest.raises(SystemExit, match="nan in the output"):
        model(torch.full((512, 64), float("nan")))


class Lenient(Checked):
    """A model that raises by what stands outside of it."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs)
        if (outputs.abs() > 1e6).any().item() and not os.environ.get("LENIENT"):
            raise Exploded("too far")
        return outputs.square().mean()


def test_a_guard_that_does_not_raise_in_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, far = Lenient(), torch.full((512, 64), 1e12)
    fit(model, torch.randn(512, 64), budget="1.25 MiB", engine="graph")
    with pytest.raises(Exploded):
        model(far)
    monkeypatch.setenv("LENIENT", "1")
    with pytest.warns(UserWarning, match=r"a call runs unplanned: .*test_fit_guards\.py:\d+"):
        assert model(far).isfinite()


class Branches(nn.Module):
    """A branch that goes on both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs)
        return outputs.square().mean() if (outputs > 0).any() else outputs.abs().mean()


def test_a_branch_that_goes_on_both_ways_is_refused_at_its_line() -> None:
    with pytest.raises(DataDependentError, match=r"needs the values of a tensor.*test_fit_guards\.py"):
        fit(Branches(), torch.randn(512, 64), budget="1 MiB", engine="graph")


@pytest.mark.slow
def test_reads_in_other_threads_are_theirs_and_the_methods_are_put_back() -> None:
    done, answers = threading.Event(), list[bool]()

    def other() -> None:
        while not done.is_set():
            answers.append(bool(torch.ones(3).bool().all()))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        fit(Checked(), torch.randn(512, 64), budget="1.3 MiB", engine="graph")
    finally:
        done.set()
        thread.join()
    assert all(answers)
    assert not {"__bool__", "item"} & set(vars(torch.Tensor))


@pytest.mark.slow
def test_a_model_is_fitted_under_anomaly_detection() -> None:
    """Values of a capture are none; the mode is as before, and calls in it run unplanned."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(64, 16)
    with torch.autograd.set_detect_anomaly(True):
        fitted = fit(model, x, budget="90%")
        assert torch.is_anomaly_enabled()
    assert fitted.changed
    assert fitted.proof is not None
    assert fitted.proof.ok
