"""Decisions near kinks, taken the other way, beside derivatives that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.near_kinks import NearKinks
from memplan.verification.proof.proof import Proof
from memplan.verification.proof.rounding import NEAR_KINKS
from memplan.verification.proof.verify import Baselines, compare

BESIDE = 1e-7
"""Within rounding of a kink, where the input's root mean square is about 1."""


def slopes(function: Callable[[Tensor], Tensor], values: list[float], *, flipped: bool) -> list[float]:
    """Return the derivative of an elementwise function at some values."""
    x = torch.tensor(values, requires_grad=True)
    if flipped:
        with NearKinks():
            y = function(x * 1)
    else:
        y = function(x * 1)
    y.sum().backward()
    assert x.grad is not None
    return [round(slope, 3) for slope in x.grad.tolist()]


@pytest.mark.parametrize(
    ("function", "kink", "below", "above"),
    [
        (F.relu, 0.0, 0.0, 1.0),
        (torch.relu, 0.0, 0.0, 1.0),
        (Tensor.relu_, 0.0, 0.0, 1.0),
        (nn.ReLU(inplace=True), 0.0, 0.0, 1.0),
        (lambda x: F.relu(input=x), 0.0, 0.0, 1.0),
        (nn.LeakyReLU(0.25), 0.0, 0.25, 1.0),
        (nn.PReLU(init=0.25), 0.0, 0.25, 1.0),
        (torch.abs, 0.0, -1.0, 1.0),
        (nn.ReLU6(), 0.0, 0.0, 1.0),
        (nn.ReLU6(inplace=True), 6.0, 1.0, 0.0),
        (nn.Hardtanh(), -1.0, 0.0, 1.0),
        (lambda x: x.clamp(-2, 3), 3.0, 1.0, 0.0),
        (lambda x: x.clamp(min=2), 2.0, 0.0, 1.0),
        (nn.Hardswish(), 3.0, 1.5, 1.0),
    ],
)
def test_a_value_beside_a_kink_has_the_other_side_s_slope(
    function: Callable[[Tensor], Tensor], kink: float, below: float, above: float
) -> None:
    """And only such a value: others of the same input keep their own."""
    near = BESIDE * max(1.0, 4 * abs(kink))  # the distance between floats near 3 is larger
    values = [kink - 0.5, kink - near, kink + near, kink + 0.5]
    plain = slopes(function, values, flipped=False)
    assert plain[1:3] == [below, above]
    assert slopes(function, values, flipped=True) == [plain[0], above, below, plain[3]]


def test_results_stay() -> None:
    """To within the distance to the kink."""
    x = torch.randn(1000)
    with NearKinks():
        flipped = F.relu(x)
    assert float((flipped - x.clamp(min=0)).abs().max()) < 1e-4


@pytest.mark.parametrize(("pool", "shape"), [(nn.MaxPool1d(4), (1, 1, 4)), (nn.MaxPool2d(2), (1, 2, 2))])
def test_a_window_with_two_elements_near_its_largest_takes_the_second(pool: nn.Module, shape: tuple[int, ...]) -> None:
    """With and without a batch; where the second is farther off than rounding, the largest stays."""
    for second, place in ((1 - BESIDE, 2), (0.9, 1)):
        x = torch.tensor([0.5, 1.0, second, 0.25]).reshape(shape).requires_grad_()
        with NearKinks():
            y = pool(x)
        y.sum().backward()
        assert x.grad is not None
        assert int(x.grad.flatten().argmax()) == place
        assert float(x.grad.sum()) == 1.0
        assert float(y.detach().sum()) == pytest.approx(1.0, abs=1e-6)


class Wrong(torch.autograd.Function):
    """The gradient of the last row is a tenth too small, as of a halo that a piece adds up wrongly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        gradient[:, :, -1] *= 0.9
        return gradient


class Layers(nn.Module):
    """Convolutions with batch norm and ReLU. ``reordered``: samples in another order, so that sums round differently;
    ``wrong_at``: the layer whose input gets a wrong gradient."""

    def __init__(self, count: int, *, reordered: bool = False, wrong_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if at == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for at in range(count)
        )
        self.head, self.reordered, self.wrong_at = nn.Linear(16, 5), reordered, wrong_at

    def forward(self, x: Tensor) -> Tensor:
        x = x.flip(0).roll(3, 0) if self.reordered else x
        for at, layer in enumerate(self.layers):
            x = layer(Wrong.apply(x) if at == self.wrong_at else x)
        return self.head(x.mean((2, 3))).square().sum()


@pytest.mark.parametrize("seed", range(3))
def test_a_halo_that_is_a_tenth_off_is_refused_in_a_few_layers_and_another_order_is_not(seed: int) -> None:
    torch.manual_seed(seed)
    model, images = Layers(4), torch.randn(8, 3, 24, 24)

    def proof(candidate: nn.Module) -> Proof:
        candidate.load_state_dict(model.state_dict())
        work = Work((images,))
        baselines = Baselines(
            Trial("reference", model, model, work),
            Trial("float64", model, model, work, float64=True),
            Trial("near kinks", model, model, work, kernels=NearKinks),
        )
        return compare(baselines, Trial("candidate", candidate, candidate, work), 2, NEAR_KINKS)

    assert proof(Layers(4, reordered=True)).same
    assert not proof(Layers(4, wrong_at=2)).same


def test_lower_precision_and_numbers_are_left_alone() -> None:
    """In bfloat16 a share of all values is within rounding of zero."""
    x = torch.tensor([1e-3, -1e-3, 1.0], dtype=torch.bfloat16)
    with NearKinks():
        assert F.relu(x).equal(x.clamp(min=0))
        assert torch.tensor([2, -3]).abs().tolist() == [2, 3]


class Sum(nn.Module):
    """ReLU of a sum of three products, in one of two orders."""

    def __init__(self, *order: int, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.order, self.factor = nn.Parameter(torch.ones(3)), order, factor

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each row. ``factor``: of the gradient of the first product."""
        first, second, third = ((x * self.weight)[:, at] for at in self.order)
        first = first * self.factor + (first * (1 - self.factor)).detach()
        return F.relu((first + second) + third)


def proof_of(candidate: Sum, rows: Tensor, *, yardstick: bool = True) -> Proof:
    """Compare with the sum in the order in which float32 loses nothing."""
    model, work = Sum(0, 2, 1), Work((rows,), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    baselines = Baselines(
        Trial("reference", model, model, work),
        Trial("float64", model, model, work, float64=True),
        Trial("near kinks", model, model, work, kernels=NearKinks) if yardstick else None,
    )
    return compare(baselines, Trial("candidate", candidate, candidate, work), 2, NEAR_KINKS)


def test_a_decision_that_rounding_flips_is_allowed_and_a_wrong_gradient_is_not() -> None:
    """1 + 2^-25 - 1 is 2^-25, and passes the ReLU; added from the left float32 loses it, and the row with it."""
    torch.manual_seed(0)
    far = torch.rand(200, 3) - torch.tensor([0.0, 0.0, 2.0]) * (torch.arange(200) % 2)[:, None]
    near = torch.cat([far, torch.tensor([[1.0, 2**-25, -1.0]])])
    flipped = Sum(0, 1, 2)
    assert not proof_of(flipped, near, yardstick=False).same
    assert proof_of(flipped, near).same
    assert proof_of(flipped, far).same
    assert not proof_of(Sum(0, 1, 2, factor=1 + 1e-4), far).same
    assert not proof_of(Sum(0, 1, 2, factor=0.0), near).same


def test_no_step_runs_twice_and_the_yardstick_runs_only_where_it_is_needed() -> None:
    """Near a kink the candidate needs the yardstick, far from it it does not; a wrong gradient needs it in one step."""
    far = torch.tensor([[1.0, 0.5, -1.0]]).repeat(200, 1)
    near = torch.cat([far, torch.tensor([[1.0, 2**-25, -1.0]])])

    def runs(candidate: Sum, rows: Tensor) -> Counter[str]:
        """Return how often each trial runs the model in the proof of two steps."""
        counts, model = Counter[str](), Sum(0, 2, 1)
        work = Work((rows,), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))

        def trial(name: str, module: Sum, **options: Any) -> Trial:
            def counted(x: Tensor) -> Tensor:
                counts[name] += 1
                return module(x)

            return Trial(name, counted, module, work, **options)

        baselines = Baselines(
            trial("reference", model),
            trial("float64", model, float64=True),
            trial("yardstick", model, kernels=NearKinks),
        )
        compare(baselines, trial("candidate", candidate), 2, NEAR_KINKS)
        return counts

    each = Counter(reference=2, float64=2, candidate=2)
    assert runs(Sum(0, 1, 2), far) == each
    assert runs(Sum(0, 1, 2), near) == each + Counter(yardstick=2)
    assert runs(Sum(0, 1, 2, factor=0.0), near) == each + Counter(yardstick=1)


class SecondStep(Sum):
    """A sum whose last row is near the kink from the second call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x if self.calls > 1 else x[:-1])


def test_a_yardstick_that_did_not_run_in_the_first_step_counts_it() -> None:
    far = torch.tensor([[1.0, 0.5, -1.0]]).repeat(200, 1)
    near = torch.cat([far, torch.tensor([[1.0, 2**-25, -1.0]])])
    model, flipped = SecondStep(0, 2, 1), SecondStep(0, 1, 2)
    work = Work((near,), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    baselines = Baselines(
        Trial("reference", model, model, work),
        Trial("float64", model, model, work, float64=True),
        Trial("near kinks", model, model, work, kernels=NearKinks),
    )
    assert compare(baselines, Trial("candidate", flipped, flipped, work), 2, NEAR_KINKS).same
