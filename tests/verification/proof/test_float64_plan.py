"""Planned steps in float64, with segments in pieces, beside the same steps without a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.inductor.partition import Fused
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.tiles import norms, tiled
from memplan.planning.tiles.tiled import Axis, Tile
from memplan.rewriting.engine import Engine
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.float64_convolutions import float64_convolutions
from memplan.verification.proof.float64_plan import has_numbers_of_float32, in_float64
from memplan.verification.proof.near_kinks import NearKinks
from memplan.verification.proof.proof import Proof
from memplan.verification.proof.rounding import NEAR_KINKS
from memplan.verification.proof.verify import Baselines, InFloat64, compare


class Network(nn.Module):
    """Convolutions with ReLU, and a product; ``norm`` makes a norm of each convolution's channels."""

    def __init__(self, layers: int, norm: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for layer in range(layers):
            convolution = nn.Conv2d(8 if layer else 3, 8, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            self.layers.append(nn.Sequential(convolution, norm(8) if norm else nn.Identity(), nn.ReLU()))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        return self.head(self.layers(x).mean((2, 3))).square().sum()


@dataclass
class Planned:
    """A captured step and its schedule."""

    captured: Captured
    schedule: Schedule
    fused: Fused | None = None


def planned_in_pieces(model: nn.Module, x: Tensor, pieces: int = 4) -> Planned:
    """Return a plan in which all but the mean and the product runs in pieces: of rows, or of samples if there are
    enough."""
    plain = capture(model, call_of((x,), {}))
    calls = [op.call for op in plain.graph.forward_ops if op.target == "aten.relu.default" and op.call is not None]
    axis = Axis(0, samples=x.shape[0]) if x.shape[0] >= pieces else Axis(2)
    captured = capture(model, call_of((x,), {}), tiles=[Tile(0, max(calls), axis, pieces)])
    assert captured.tiled
    return Planned(captured, schedule(captured.graph, Choices()))


def proof_of(model: nn.Module, x: Tensor, planned: Planned) -> Proof:
    """Compare a planned step with the step as it is."""
    work, engine = Work((x,)), Engine(planned.captured, planned.schedule)
    function, narrow = in_float64(model, planned), set[torch.dtype]()
    assert function is not None

    def trial(name: str, call: Callable[..., Any] = model, **options: Any) -> Trial:
        return Trial(name, call, model, work, **options)

    baselines = Baselines(
        trial("reference"),
        trial("float64", float64=True, kernels=lambda: float64_convolutions(narrow)),
        trial("near kinks", kernels=NearKinks),
    )
    wide = InFloat64(
        trial("planned, in float64", function, float64=True, kernels=float64_convolutions),
        narrow,
        has_numbers_of_float32(planned),
    )
    candidate = trial("candidate", lambda *args: engine.run(model, call_of(args, {})))
    return compare(baselines, candidate, 2, NEAR_KINKS, in_float64=wide)


def farthest(proof: Proof) -> float:
    """Return the largest error of a gradient in float64, as a share of the largest of all gradients."""
    errors = [error for error in proof.in_float64 if error.kind == "gradients"]
    return max(error.error for error in errors) / max(error.norm for error in errors)


def halo_off_by(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass of the third piece, the first row or sample of each value is off by a share."""
    run = tiled._Run.__init__

    def begin(self: Any, whole: Any, *args: Any, **options: Any) -> None:
        run(self, whole, *args, **options)
        if self.piece == 2 and options.get("differentiates"):
            for value in set(whole.placements).intersection(self.values):
                self.values[value] = self.values[value].clone()
                self.values[value].narrow(whole.placements[value].dim, 0, 1).mul_(1 - share)

    monkeypatch.setattr(tiled._Run, "__init__", begin)


def statistics_off_by(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variance of a norm over the axis is off by a share."""
    result = norms.Statistics.result

    def wrong(self: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        mean, variance = result(self, dtype)
        return mean, variance * (1 + share)

    monkeypatch.setattr(norms.Statistics, "result", wrong)


def weights_off_by(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that the third piece computes are off by a share."""
    derivative = tiled.Tiled._derivative

    def wrong(self: Any, run: Any, piece: int, *args: Any) -> Any:
        computed = derivative(self, run, piece, *args)
        return [g if g is None or piece != 2 else g * (1 - share) for g in computed]

    monkeypatch.setattr(tiled.Tiled, "_derivative", wrong)


def model_and_images(layers: int, norm: Callable[[int], nn.Module] | None, samples: int) -> tuple[nn.Module, Tensor]:
    """Return a network and a batch. A single image is large: its pieces lose less at their borders."""
    torch.manual_seed(0)
    return Network(layers, norm), torch.randn(samples, 3, 96 if samples == 1 else 48, 96 if samples == 1 else 48)


CASES = [
    pytest.param(16, None, 1, id="plain"),
    pytest.param(4, nn.BatchNorm2d, 4, id="batch norm"),
    pytest.param(20, None, 1, id="plain, 20 layers", marks=pytest.mark.slow),
    pytest.param(4, nn.InstanceNorm2d, 1, id="instance norm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layers", "norm", "samples"), CASES)
def test_both_differ_by_the_rounding_of_float64(layers: int, norm: Any, samples: int) -> None:
    """Also in the second step, which is compared in float32 alone."""
    model, images = model_and_images(layers, norm, samples)
    proof = proof_of(model, images, planned_in_pieces(model, images))
    assert proof.failures == ()
    assert 0 < farthest(proof) < 1e-12
    assert {error.step for error in proof.rounded} == {0}
    assert "with both in float64" in str(proof)


@pytest.mark.parametrize(("layers", "norm", "samples"), CASES)
@pytest.mark.parametrize(("fault", "share"), [(halo_off_by, 0.1), (weights_off_by, 1e-3)])
def test_a_piece_that_is_off_is_refused(
    layers: int, norm: Any, samples: int, fault: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a border in the backward pass of a plain network of 16 layers is 2e-4 of a gradient: where rounding in
    float32 flips decisions near kinks, that is 4e-3."""
    model, images = model_and_images(layers, norm, samples)
    planned = planned_in_pieces(model, images)
    fault(share, monkeypatch)
    proof = proof_of(model, images, planned)
    assert any("in float64 is" in failure for failure in proof.failures)
    assert farthest(proof) > 1e-9


def test_wrong_statistics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = model_and_images(4, nn.BatchNorm2d, 4)
    planned = planned_in_pieces(model, images)
    statistics_off_by(1e-4, monkeypatch)
    assert any("in float64 is" in failure for failure in proof_of(model, images, planned).failures)


class Tail(nn.Module):
    """A network, and what a function makes of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.function = Network(2), function
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        return self.network(x) + (self.function(x.mean((1, 2))[:, :6]) * self.scale).square().sum()


@pytest.mark.parametrize(
    "function",
    [
        nn.RMSNorm(6),
        nn.Dropout(0.5),
        lambda x: x / (x.abs() + torch.finfo(x.dtype).eps),
        lambda x: x * torch.linspace(0, 1, 6),
        lambda x: x.to(torch.float32) * x.new_ones(6),
    ],
    ids=["eps of the dtype", "dropout", "eps", "float32 table", "named dtype"],
)
def test_numbers_of_float32_are_no_errors(function: Callable[[Tensor], Tensor]) -> None:
    """In the graph, an eps is a number, and the step in float64 makes a table in float32."""
    torch.manual_seed(0)
    model, images = Tail(function), torch.randn(1, 3, 48, 48)
    proof = proof_of(model, images, planned_in_pieces(model, images))
    assert proof.failures == ()
    assert proof.in_float64


def test_a_number_that_the_model_writes_by_itself_is_compared_in_float32() -> None:
    """The graph cannot tell it from one of the dtype, which is another in float64."""
    eps = torch.finfo(torch.float32).eps
    model, images = model_and_images(4, lambda channels: nn.GroupNorm(2, channels, eps=eps), 4)
    proof = proof_of(model, images, planned_in_pieces(model, images))
    assert proof.failures == ()
    assert proof.in_float64 == ()
    assert {error.step for error in proof.rounded} == {0, 1}


class Half(nn.Module):
    """A product in bfloat16 behind a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head = Network(2), nn.Linear(48, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        return self.network(x) + self.head(x[0, 0].bfloat16()).float().sum()


def test_a_step_in_lower_precision_is_left_to_the_other_comparison() -> None:
    model, images = Half(), torch.randn(1, 3, 48, 48)
    assert in_float64(model, planned_in_pieces(model, images)) is None


def test_a_step_that_does_not_run_in_float64_is_compared_as_it_is() -> None:
    model, images = model_and_images(2, None, 1)
    planned = planned_in_pieces(model, images)

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("not implemented for 'Double'")

    work, engine = Work((images,)), Engine(planned.captured, planned.schedule)
    proof = compare(
        Baselines(
            Trial("reference", model, model, work), Trial("float64", model, model, work, float64=True),
            Trial("near kinks", model, model, work, kernels=NearKinks),
        ),
        Trial("candidate", lambda x: engine.run(model, call_of((x,), {})), model, work), 2, NEAR_KINKS,
        in_float64=InFloat64(Trial("planned, in float64", fails, model, work, float64=True)),
    )  # fmt: skip
    assert proof.failures == ()
    assert proof.in_float64 == ()
    assert {error.step for error in proof.rounded} == {0, 1}
