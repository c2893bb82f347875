"""Which activations clone before they overwrite: told by what torch's profiler sees of a real step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memplan

ID = "in-place-clone"
ACTIVATIONS = [nn.SiLU, nn.Hardswish, nn.Hardtanh, nn.ReLU6, nn.Mish, nn.ReLU, nn.ELU, nn.LeakyReLU]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_found_where_torch_clones(activation: type[nn.Module]) -> None:
    def build(in_place: bool) -> object:
        # leaky_relu in place wants a slope above 0, which its default has
        make = lambda: nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), activation(inplace=in_place))])  # noqa: E731

        def steps() -> object:
            model, x = make(), torch.randn(2048, 64)
            return lambda: model(x).sum().backward()

        return steps

    step = build(True)()  # pyright: ignore[reportCallIssue]  # a build
    with torch.profiler.profile(acc_events=True) as profile:
        step()
    clones = any(event.key == "aten::clone" for event in profile.key_averages())
    found = [finding for finding in memplan.check(build(True), device="cpu") if finding.id == ID]
    assert bool(found) is clones
    assert [f for f in memplan.check(build(False), device="cpu") if f.id == ID] == []
