"""Each way of keeping for nothing: a model that has it, one that has not, and bytes as the mended model's recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks.recorded_peak import recorded_peak
from environment import slow
from torch import Tensor, nn

import memplan

ID = "kept-for-nothing"


def findings(make: Callable[[], nn.Module], shape: str, device: str = "cpu") -> list[memplan.Finding]:
    """Return the findings of a step whose convolutions take no workspace, which would hide what is kept."""
    return [finding for finding in memplan.check(make, shape, device=device, cudnn=False) if finding.id == ID]


def peak(make: Callable[[], nn.Module], shape: str, device: str) -> int:
    return recorded_peak(make, shape, device=device, cudnn=False)


class FrozenConvolution(torch.autograd.Function):
    """Saves the weight alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return F.conv_transpose2d(gradient, weight, padding=1), None


class ShapePool(torch.autograd.Function):
    """An average pool of 2 that keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return F.avg_pool2d(x, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient.is_cuda:  # avg_pool2d_backward copies an input of expanded strides there
            return F.interpolate(gradient, scale_factor=2, mode="nearest").div_(4)
        shape = gradient.new_empty(()).expand(ctx.shape)
        return torch.ops.aten.avg_pool2d_backward(gradient, shape, [2, 2], [], [0, 0], False, True, None)


class FrozenNorm(torch.autograd.Function):
    """A batch norm in evaluation that keeps its scale alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(weight, variance)
        return F.batch_norm(x, mean, variance, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, variance = ctx.saved_tensors
        return gradient * (weight * (variance + 1e-5).rsqrt()).view(1, -1, 1, 1), None, None, None, None


class Normed(nn.Module):
    """A trained layer, then frozen norms in evaluation."""

    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.first, self.mended = nn.Conv2d(1, 8, 3, padding=1), mended
        self.norms = nn.ModuleList([nn.BatchNorm2d(8).requires_grad_(False) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            parts = norm.weight, norm.bias, norm.running_mean, norm.running_var
            x = FrozenNorm.apply(x, *parts) if self.mended else F.batch_norm(x, *parts[2:], *parts[:2])  # pyright: ignore
        return x


class Frozen(nn.Module):
    """A trained layer, then frozen ones."""

    def __init__(self, mended: bool, frozen: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.rest = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(6)])
        self.rest.requires_grad_(not frozen)
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = FrozenConvolution.apply(x, layer.weight) if self.mended else layer(x)  # pyright: ignore[reportAssignmentType]
        return x


class Pooled(nn.Module):
    def __init__(self, mended: bool, kind: str = "average") -> None:
        super().__init__()
        self.first, self.last, self.mended, self.kind = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 1, 1),
            mended,
            kind,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "max":
            return self.last(F.max_pool2d(x, 2))
        return self.last(ShapePool.apply(x) if self.mended else F.avg_pool2d(x, 2))  # pyright: ignore[reportArgumentType]


def mlp(mended: bool) -> nn.Module:
    def block() -> list[nn.Module]:
        pair = [nn.ReLU(), nn.Dropout(0.1)]
        return [nn.Linear(64, 64), *(reversed(pair) if mended else pair)]

    return nn.Sequential(*[layer for _ in range(6) for layer in block()], nn.Linear(64, 1))


CASES = [
    ("frozen", Frozen, "4x1x64x64"),
    ("frozen", Normed, "4x1x64x64"),
    ("shape", Pooled, "4x3x64x64"),
    ("relu before dropout", mlp, "16384x64"),
]


@pytest.mark.parametrize(
    ("kind", "make", "shape", "device"),
    [
        *((*case, device) for case, device in zip(CASES, ("cpu", "h100", "h100", "cpu"), strict=True)),
        *slow(*((*case, device) for case, device in zip(CASES, ("h100", "cpu", "cpu", "h100"), strict=True))),
    ],
)
def test_the_bytes_are_those_of_the_mended_model(
    kind: str, make: Callable[[bool], nn.Module], shape: str, device: str
) -> None:
    (finding,) = findings(lambda: make(False), shape, device)
    assert finding.details["kind"] == kind
    saved = peak(lambda: make(False), shape, device) - peak(lambda: make(True), shape, device)
    assert saved > 0
    assert finding.bytes == pytest.approx(saved, rel=0.01)
    assert findings(lambda: make(True), shape, device) == []


def test_a_norm_in_evaluation_with_frozen_scale() -> None:
    """It reads its input for the scale's gradient alone."""

    def make() -> nn.Module:
        norms = [nn.BatchNorm2d(8).eval().requires_grad_(False) for _ in range(4)]
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *norms)

    (finding,) = findings(make, "4x1x64x64")
    assert finding.details["kind"] == "frozen"
    assert len(finding.details["layers"]) == 4


@pytest.mark.parametrize(
    ("make", "channels"), [(lambda: Frozen(False, frozen=False), 1), (lambda: Pooled(False, "max"), 3)]
)
def test_what_a_gradient_reads_is_no_finding(make: Callable[[], nn.Module], channels: int) -> None:
    assert findings(make, f"4x{channels}x64x64") == []


def test_shared_with_a_layer_that_needs_it_it_costs_nothing() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x)
            return F.avg_pool2d(x, 2), self.other(x)

    assert findings(Shared, "4x1x64x64") == []


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_outputs_that_accelerate_converts_and_nothing_reads(device: str) -> None:
    """The loss is computed inside of the model, from its own logits; bytes as the step that lets go of the copy."""
    from accelerate.utils import convert_outputs_to_fp32

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4000)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def build(*, converted: bool = True, kept: bool = True) -> Any:
        def made() -> Any:
            model, x, labels = Model().bfloat16(), torch.randn(512, 64).bfloat16(), torch.randint(0, 4000, (512,))
            forward: Any = convert_outputs_to_fp32(model.forward) if converted else model.forward

            def step() -> None:
                outputs = forward(x, labels)
                loss = outputs["loss"]
                if not kept:
                    del outputs
                loss.backward()

            return step

        return made

    def findings(build: Any) -> list[memplan.Finding]:
        return [f for f in memplan.check(build, device=device) if f.details.get("kind") == "unread casts"]

    def peak(build: Any) -> int:
        return memplan.explain(build, device=device).timeline.peak_allocated

    (finding,) = findings(build())
    assert finding.details["kept"] == 512 * 4000 * 4
    assert str(finding.where).startswith("accelerate/")
    assert finding.bytes == peak(build()) - peak(build(kept=False))
    assert findings(build(kept=False)) == findings(build(converted=False)) == []
