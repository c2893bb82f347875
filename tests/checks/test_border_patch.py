"""The patch of --fix, applied, keeps the border; where the source is not the user's, the wrapper does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import memplan
from memplan.checks.border_patch import Fix, fix_of
from memplan.checks.check import check_trace, record_again
from memplan.checks.mending import Remaker
from memplan.cli.targets import resolve
from memplan.trace.session import choose_target
from memplan.trace.step import StepOptions

SOURCE = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 4, kernel_size=5, padding=0, dilation=2),
            nn.Conv2d(
                4,
                4,
                4,
            ),
        )
        self.rest = nn.ModuleList([nn.Conv2d(4, 4, (3, 1)) for _ in range(2)])

    def forward(self, x):
        x = self.body(x)
        for layer in self.rest:
            x = layer(x)
        return x


def positional():
    return nn.Sequential(nn.Conv2d(1, 1, 3, 1, 0))
"""


def fix(name: str) -> Fix:
    options = StepOptions(("1x1x48x40",)).checked()
    remaker = Remaker(resolve(name).what, options, choose_target("cpu"))
    trace = record_again(remaker)
    finding = next(f for f in check_trace(trace, remaker=remaker) if f.id == "border-erosion")
    return fix_of(finding, trace)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patched_net.py").write_text(SOURCE)
    return tmp_path


def test_the_patch_applied_loses_nothing(here: Path) -> None:
    found = fix("patched_net.py:Net")
    assert found.kind == "patch", found.why
    assert "48 x 40: the input's resolution" in found.proof
    subprocess.run(["patch", "-p1"], input=found.text, text=True, check=True, capture_output=True, cwd=here)
    (here / "after.py").write_text((here / "patched_net.py").read_text())
    after = resolve("after.py:Net").what()
    assert after(torch.zeros(1, 1, 48, 40)).shape[2:] == (48, 40)
    before = resolve("patched_net.py:Net").what()
    assert {k: v.shape for k, v in after.state_dict().items()} == {k: v.shape for k, v in before.state_dict().items()}
    assert [f for f in memplan.check(after, "1x1x48x40", device="cpu") if f.severity == "warning"] == []


def test_a_padding_by_position_is_left_alone(here: Path) -> None:
    found = fix("patched_net.py:positional")
    assert found.kind == "wrapper"
    assert "no padding argument" in found.why


def test_the_wrapper_keeps_resolution_and_interior() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 5), torch.nn.Conv2d(2, 1, 3))
    options = StepOptions(("1x1x20x24",)).checked()
    remaker = Remaker(model, options, choose_target("cpu"))  # it is there already: no line tells how it was made
    trace = record_again(remaker)
    finding = next(f for f in check_trace(trace, remaker=remaker) if f.id == "border-erosion")
    found = fix_of(finding, trace)
    assert found.kind == "wrapper"
    names: dict[str, type[torch.nn.Module]] = {"torch": torch}  # pyright: ignore[reportAssignmentType]  # a namespace
    exec(found.text, names)
    x = torch.randn(1, 1, 20, 24)
    whole = names["Mirrored"](model)(x)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole[:, :, 3:-3, 3:-3], model(x))
    assert "20 x 24: the input's resolution" in found.proof
