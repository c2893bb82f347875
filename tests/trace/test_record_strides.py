"""Shapes and strides of what every module takes and returns: a recording beside a step that really runs."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import thinned
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from truth.cpu_allocator import measured_peak

import memplan

Build = Callable[[], Callable[[], Any]]
Seen = list[tuple[str, list[Any]]]
ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("transformers", "monai", "peft")
FEW = frozenset({"resnet18_channels_last"})
"""Steps of the zoo that are compared in every run of the tests."""


MASKED = frozenset({"bert"})
"""Steps that hand a mask to their layers if it has zeros, which a recording cannot know: only results are compared."""


@contextmanager
def watched(*, results_alone: bool = False) -> Iterator[Seen]:
    """Note the layouts of all inputs and outputs of modules in here, in the order of the calls."""
    seen: Seen = []

    def note(module: nn.Module, args: Any, result: Any) -> None:
        tensors = [one for one in tree_leaves(result if results_alone else (args, result)) if isinstance(one, Tensor)]
        strided = [one for one in tensors if one.layout is torch.strided]
        seen.append((type(module).__name__, [(tuple(one.shape), one.stride()) for one in strided]))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def hold(build: Build, *, results_alone: bool = False) -> None:
    """Record and run one step: the same modules, with tensors of the same shapes and strides. A recording calls modules
    again where it follows another branch."""
    with watched(results_alone=results_alone) as recorded:
        memplan.record(build, device="cpu", steps=1)
    with watched(results_alone=results_alone) as real:
        build()()
    recorded = recorded[: len(real)]
    assert [name for name, _ in recorded] == [name for name, _ in real]
    differing = [(name, one, other) for (name, one), (_, other) in zip(recorded, real, strict=True) if one != other]
    assert not differing, f"{len(differing)} of {len(real)} calls, first recorded, then real: {differing[0]}"


def steps_of_the_zoo() -> list[Any]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return [pytest.param(None, marks=pytest.mark.skip(f"the zoo needs {', '.join(missing)}"), id="zoo")]
    names = [line.partition("(")[0][4:] for line in _sources() if line.startswith("def ")]
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in names]


def _sources() -> Iterator[str]:
    """Lines after a decorator `@zoo`: to import the zoo takes seconds, which collecting tests should not."""
    for path in sorted((ROOT / "benchmarks" / "zoo").glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        yield from (after for line, after in itertools.pairwise(lines) if line == "@zoo")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", steps_of_the_zoo())
def test_modules_of_the_zoo_see_the_layouts_of_a_real_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    hold(importlib.import_module("benchmarks.zoo").ZOO[name], results_alone=name in MASKED)


class Pyramid(nn.Module):
    """The head of a segmentation network: a norm of (N, C, 1, 1)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.out = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(F.adaptive_avg_pool2d(x, 1))))
        return self.out(torch.cat([F.interpolate(y, size=x.shape[2:], mode="bilinear"), x], 1))


class Pixels(nn.Module):
    """Pixels as tokens and back, as the attention of a diffusion model has them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.linear = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, width)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        b, c, h, w = x.shape
        y = self.linear(x.view(b, c, h * w).transpose(1, 2)).transpose(-1, -2).reshape(b, c, h, w)
        x = (x + y) / 1.0
        return x + self.last(F.silu(self.norm(x)))


class Windows(nn.Module):
    """Dropout of tokens that are permuted to windows: its gradient comes permuted back."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop, self.conv = nn.Dropout(0.1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, d, h, w = x.shape
        t = x.reshape(b, d, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        t = self.drop(self.narrow(F.gelu(self.wide(t))))
        return self.conv(t.permute(0, 5, 1, 3, 2, 4).reshape(b, d, h, w)).mean((2, 3))


def pyramid_input() -> Tensor:
    return torch.randn(2, 256, 64).permute(0, 2, 1).reshape(2, 64, 16, 16)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "pyramid": (Pyramid, pyramid_input),
    "one image": (Pixels, lambda: torch.randn(1, 3, 16, 16)),
    "two images": (Pixels, lambda: torch.randn(2, 3, 16, 16)),
    "windows": (Windows, lambda: torch.randn(2, 32, 8, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_recording_has_the_layouts_and_the_peak_of_a_real_step(case: str) -> None:
    make, inputs = CASES[case]

    def build() -> Callable[[], Any]:
        model, x = make(), inputs()
        return lambda: model(x).pow(2).mean().backward()

    hold(build)
    predicted, measured = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated, measured_peak(build)
    assert abs(predicted - measured) <= 512


@pytest.mark.parametrize("case", thinned(CASES, 4))
def test_a_fitted_step_runs_with_the_layouts_of_its_plan(case: str) -> None:
    make, inputs = CASES[case]
    model, x = make(), inputs()

    def loss(output: Tensor) -> Tensor:
        return output.pow(2).mean()

    with pytest.raises(memplan.BudgetError) as refused:
        memplan.plan(model, x, loss=loss, budget=1)
    fitted = memplan.fit(model, x, loss=loss, budget=int(refused.value.smallest_budget * 1.02))
    assert fitted.proof.same
    fitted.undo()
