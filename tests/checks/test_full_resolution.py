"""Full resolution for too long: bytes as the recording of the network with a stride has them."""

from __future__ import annotations

import pytest
from checks.recorded_peak import recorded_peak
from torch import nn

import memplan

ID = "full-resolution"


def net(stride: int = 1, layers: int = 8) -> nn.Module:
    made = [nn.Conv2d(1 if k == 0 else 8, 8, 3, stride if k == 0 else 1, padding=1) for k in range(layers)]
    if stride == 2:
        return nn.Sequential(*made[:-1], nn.Upsample(scale_factor=2), made[-1])
    return nn.Sequential(*made)


def found(make: object, shape: str, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(make, shape, device=device) if finding.id == ID]


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_the_bytes_are_those_of_the_strided_network(device: str) -> None:
    (finding,) = found(net, "2x1x64x64", device)
    assert finding.severity == "info"
    full, half = (recorded_peak(lambda s=s: net(s), "2x1x64x64", device=device) for s in (1, 2))
    assert finding.bytes == pytest.approx(full - half, rel=0.01)
    assert {row["bytes"] for row in finding.details["layers"]} == {2 * 8 * 64 * 64 * 4}


def test_few_layers_or_an_early_stride_are_no_finding() -> None:
    assert found(lambda: net(1, 4), "2x1x64x64") == []
    assert found(lambda: net(2), "2x1x64x64") == []


def test_of_a_trace_no_figure_is_made_up() -> None:
    from memplan.trace.step import StepOptions, build_of

    trace = memplan.record(build_of(net, StepOptions(("2x1x64x64",)).checked()), device="cpu")
    (finding,) = [f for f in memplan.check(trace) if f.id == ID]
    assert (finding.bytes, finding.details["known"]) == (0, False)
    assert "how much is not known" in finding.advice[0]
