"""A step run again from its ops alone: unchanged it is the same, changed it is as the changed model's recording."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.checks.mended.changed_step import NotRecorded
from memplan.checks.rerun.aligned import replayed_with
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace, at_least

ROOT = Path(__file__).resolve().parents[3]
ZOO = [
    *[("autocast_conv", "h100"), ("zero_grad_after_step", "cpu")],
    *slow(
        ("dynunet", "h100"),
        ("mobilenet", "cpu"),
        ("resnet18_channels_last", "cpu"),
        ("unet3d", "cpu"),
        ("unet3d", "h100"),
        ("dynunet", "cpu"),
    ),
    *slow(("retained_graph", "cpu"), ("retained_graph", "h100"), ("vit", "h100"), ("t5", "cpu"), ("t5", "h100")),
]


@pytest.mark.parametrize(("name", "device"), ZOO)
@pytest.mark.filterwarnings("ignore")  # transformers and MONAI warn of what is none of ours
def test_unchanged_it_is_what_it_was(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monai")
    pytest.importorskip("transformers")
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("zoo")  # of benchmarks/: fills the registry
    trace = memplan.record(importlib.import_module("zoo.registry").ZOO[name], device=device)
    again = replayed_with(trace, {})
    assert isinstance(again, Trace), again.why
    assert again.storages == trace.storages


_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OTHER: dict[str, Callable[[int, int], nn.Module]] = {
    "batch": lambda d, _: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d](2),
    "instance": lambda d, _: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d](2),
    "relu": lambda d, k: nn.ReLU(inplace=k > 1),
    "silu": lambda d, k: nn.SiLU(inplace=k > 1),
    "dropout": lambda d, _: nn.Dropout(0.1),
    "max": lambda d, k: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[d](k),
    "average": lambda d, k: (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[d](k, 1),
    "up": lambda d, _: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d](2, 2, 2, 2),
    "nearest": lambda d, _: nn.Upsample(scale_factor=2),
    "linear": lambda d, k: nn.Upsample(
        scale_factor=2, mode=("linear", "bilinear", "trilinear")[d], align_corners=k > 1
    ),
}
Parts = list[tuple[str, int, int, int]]


def network(parts: Parts, dims: int, padded: bool) -> nn.Module:
    def one(kind: str, kernel: int, stride: int, dilation: int) -> nn.Module:
        if kind != "conv":
            return _OTHER[kind](dims - 1, kernel)
        return _CONV[dims - 1](2, 2, kernel, stride, int(padded) * dilation * (kernel // 2), dilation)

    return nn.Sequential(*[one(*part) for part in parts])


parts = st.lists(
    st.tuples(st.sampled_from(["conv", "conv", *_OTHER]), st.sampled_from([1, 3, 5]), st.just(1), st.integers(1, 2)),
    max_size=6,
)


@pytest.mark.parametrize(
    ("dims", "size", "examples", "least"),
    [*slow((1, 120, 60, 40), (2, 50, 40, 30)), (3, 30, 6, 4)],
)
def test_with_padding_it_is_as_the_padded_model(dims: int, size: int, examples: int, least: int) -> None:
    tried = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(parts, st.booleans(), st.sampled_from(["cpu", "h100"]))
    def holds(more: Parts, train: bool, device: str) -> None:
        nonlocal tried
        layers: Parts = [("conv", 3, 1, 1), *more]
        options = StepOptions(("x".join(map(str, (1, 2, *[size] * dims))),), train=train).checked()
        try:
            bare, padded = (
                memplan.record(build_of(lambda p=p: network(layers, dims, p), options), device=device)
                for p in (False, True)
            )
        except memplan.MemplanError:  # sizes that get too small, a result in place that its gradient needs
            return
        changes: dict[int, Any] = {}
        for form in bare.forms:
            weight = form.read("weight")
            if "convolution" in bare.ops[form.op].name and weight is not None and not form.option("transposed"):
                dilation = form.option("dilation")
                changes[form.op] = {
                    "padding": tuple(d * (k // 2) for k, d in zip(weight.shape[2:], dilation, strict=True))
                }
        again = replayed_with(bare, changes)
        assert isinstance(again, Trace), (layers, again.why)
        same = memplan.simulate(at_least(padded)).peak_allocated
        assert memplan.simulate(at_least(again)).peak_allocated == same, layers
        tried += 1

    holds()
    assert tried >= least


def test_where_other_ops_would_run_it_says_so() -> None:
    def build() -> Any:
        model, x = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Sigmoid()), torch.randn(1, 1, 8, 8)

        def step() -> None:
            y: Any = checkpoint(model, x, use_reentrant=False)
            y.sum().backward()

        return step

    again = replayed_with(memplan.record(build, device="cpu"), {})
    assert isinstance(again, NotRecorded)
    assert "other ops" in again.why
