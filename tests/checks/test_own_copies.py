"""Activations that keep a tensor of their own, against models that do not: bytes as their recordings have
them, values as torch computes them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks.recorded_peak import recorded_peak
from environment import slow, thinned
from torch import Tensor, nn

import memplan

ROOT = Path(__file__).resolve().parents[2]
ID = "kept-for-nothing"
KINDS = ("in place", "relu before cat", "relu", "relu before dropout")
IMAGES, ROWS, SEQUENCE = "4x3x32x32", "16384x64", "16x1024x64"


def findings(make: Any, shape: str, device: str = "cpu") -> list[memplan.Finding]:
    found = memplan.check(make, shape, device=device)
    return [finding for finding in found if finding.id == ID and finding.details["kind"] in KINDS]


def peak(make: Any, shape: str, device: str) -> int:
    return recorded_peak(make, shape, device=device)


def measured(make: Callable[[], nn.Module], shape: str) -> int:
    """Of a real run."""

    def build() -> Any:
        model, x = make(), torch.randn([int(size) for size in shape.split("x")])

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return step

    return memplan.simulate(memplan.measure(build)).peak_allocated


def stack(activation: Callable[[bool], nn.Module], mended: bool) -> nn.Module:
    """Convolution, norm and activation, six times."""
    layers: list[nn.Module] = []
    for number in range(6):
        layers += [nn.Conv2d(8 if number else 3, 8, 3, padding=1), nn.BatchNorm2d(8), activation(mended)]
    return nn.Sequential(*layers, nn.Conv2d(8, 1, 1))


def normed(mended: bool) -> nn.Module:
    """An instance norm's result is a view, of which autograd copies more where it is changed in place."""
    layers: list[nn.Module] = []
    for number in range(6):
        layers += [nn.Conv2d(8 if number else 3, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.LeakyReLU(inplace=mended)]
    return nn.Sequential(*layers, nn.Conv2d(8, 1, 1))


def sequence(mended: bool, bias: bool) -> nn.Module:
    """So is a linear layer's on (batch, length, width)."""
    pairs = [(nn.Linear(64, 64, bias), nn.LeakyReLU(inplace=mended)) for _ in range(6)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair], nn.Linear(64, 1))


class SignRelu(torch.autograd.Function):
    """ReLU that keeps a byte for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.relu()
        ctx.save_for_backward(result > 0)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.saved_tensors[0]


class Blocks(nn.Module):
    """Convolutions whose results meet in a sum, or side by side, after or before a ReLU."""

    def __init__(self, way: str, mended: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.right = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(4)])
        self.join = nn.ModuleList([nn.Conv2d(16, 8, 1) for _ in range(4)])
        self.way, self.mended = way, mended

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for left, right, join in zip(self.left, self.right, self.join, strict=True):
            if self.way == "sum":
                x = x + (SignRelu.apply(left(x)) if self.mended else left(x).relu())  # pyright: ignore[reportOperatorIssue]
            elif self.mended:
                x = join(torch.cat([left(x), right(x)], 1).relu_())
            else:
                x = join(torch.cat([left(x).relu(), right(x).relu()], 1))
        return x


class Functional(nn.Module):
    """ReLU and dropout as functions."""

    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = F.dropout(x, 0.1).relu() if self.mended else F.dropout(x.relu(), 0.1)
        return x.sum(1)


CASES: dict[str, tuple[str, Callable[[bool], nn.Module], str, tuple[str, ...]]] = {
    "leaky relu": ("in place", lambda mended: stack(lambda m: nn.LeakyReLU(0.1, inplace=m), mended), IMAGES,
                   ("cpu", "h100")),
    "elu": ("in place", lambda mended: stack(lambda m: nn.ELU(inplace=m), mended), IMAGES, ("cpu", "h100")),
    "instance norm": ("in place", lambda mended: normed(mended), IMAGES, ("cpu", "h100")),
    "of one image": ("in place", lambda mended: normed(mended), "1x3x64x64", ("cpu", "h100")),
    "sequence": ("in place", lambda mended: sequence(mended, True), SEQUENCE, ("cpu", "h100")),
    "sequence, no bias": ("in place", lambda mended: sequence(mended, False), SEQUENCE, ("cpu", "h100")),
    "selu": ("in place", lambda mended: stack(lambda m: nn.SELU(inplace=m), mended), IMAGES, ("cpu",)),
    "celu": ("in place", lambda mended: stack(lambda m: nn.CELU(0.5, inplace=m), mended), IMAGES, ("cpu",)),
    "cat": ("relu before cat", lambda mended: Blocks("cat", mended), IMAGES, ("cpu", "h100")),
    "sum": ("relu", lambda mended: Blocks("sum", mended), IMAGES, ("cpu", "h100")),
    "functions": ("relu before dropout", Functional, ROWS, ("cpu", "h100")),
}  # fmt: skip


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *[("leaky relu", "cpu"), ("instance norm", "h100"), ("cat", "cpu"), ("functions", "cpu")],
        *slow(*((name, device) for name, case in CASES.items() for device in case[3])),
    ],
)
def test_the_bytes_are_those_of_the_mended_model(name: str, device: str) -> None:
    kind, make, shape, _ = CASES[name]
    (finding,) = [f for f in findings(lambda: make(False), shape, device) if f.details["kind"] == kind]
    spared = peak(lambda: make(False), shape, device) - peak(lambda: make(True), shape, device)
    assert spared > 0
    assert finding.bytes == pytest.approx(spared, rel=0.01)
    assert [f for f in findings(lambda: make(True), shape, device) if f.details["kind"] == kind] == []


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "name",
    [
        "leaky relu",
        *slow("instance norm", "cat", "elu", "sequence", "sequence, no bias", "sum"),
    ],
)
def test_a_real_run_spares_them_too(name: str) -> None:
    """What autograd keeps is torch's to say, and can change with its version."""
    kind, make, shape, _ = CASES[name]
    (finding,) = [f for f in findings(lambda: make(False), shape) if f.details["kind"] == kind]
    spared = measured(lambda: make(False), shape) - measured(lambda: make(True), shape)
    assert finding.bytes == pytest.approx(spared, rel=0.02)


@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_the_advice_changes_no_value(name: str) -> None:
    _, make, shape, _ = CASES[name]
    x = torch.randn([int(size) for size in shape.split("x")], dtype=torch.float64)
    model, mended = make(False).double(), make(True).double()
    mended.load_state_dict(model.state_dict())
    results: list[tuple[Tensor, list[Tensor]]] = []
    for one in (model, mended):
        torch.manual_seed(1)
        y = one(x)
        y.square().sum().backward()
        results.append((y.detach(), [p.grad for p in one.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.LeakyReLU(0.1), nn.Conv2d(8, 1, 1)),  # kept by both
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(-0.1), nn.Conv2d(8, 1, 1)),  # torch refuses it in place
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1)),  # nobody keeps its result
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 1, 1)),  # reads its input in place, too
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 1)),  # the next layer keeps the same
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 1, 1)),
    ],
)
def test_what_cannot_be_had_back_is_no_finding(make: Callable[[], nn.Module]) -> None:
    assert findings(make, IMAGES) == []


def test_an_input_that_is_read_later_stays() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(F.leaky_relu(x, 0.1)) + x

    assert findings(Later, IMAGES) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device"), [("conv_vae", "cpu"), ("instancenorm_net", "cpu"), ("instancenorm_net", "h100")]
)
def test_networks_of_the_zoo_with_their_activations_in_place(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("monai")
    pytest.importorskip("transformers")
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("zoo")  # of benchmarks/: fills the registry
    build = importlib.import_module("zoo.registry").ZOO[name]
    (finding,) = [f for f in memplan.check(build, device=device) if f.details.get("kind") == "in place"]
    before = memplan.simulate(memplan.record(build, device=device), workspace="low").peak_allocated
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: F.leaky_relu(x, self.negative_slope, True))
    monkeypatch.setattr(nn.ELU, "forward", lambda self, x: F.elu(x, self.alpha, True))
    after = memplan.simulate(memplan.record(build, device=device), workspace="low").peak_allocated
    assert finding.bytes == pytest.approx(before - after, rel=0.01)
