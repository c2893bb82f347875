"""The patch of --fix, applied, keeps the border; where the source is not the user's, the wrapper does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan.checks.border_patch import Fix, fix_of
from memplan.checks.check import check_trace, record_again
from memplan.checks.mended.changed_step import StepRecorder
from memplan.trace.naming.targets import resolve
from memplan.trace.recording.session import choose_target
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
    recorder = StepRecorder(resolve(name).what, options, choose_target("cpu"))
    trace = record_again(recorder)
    finding = next(f for f in check_trace(trace, recorder=recorder) if f.id == "border-erosion")
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
    recorder = StepRecorder(model, options, choose_target("cpu"))  # it is there already: no line tells how it was made
    trace = record_again(recorder)
    finding = next(f for f in check_trace(trace, recorder=recorder) if f.id == "border-erosion")
    found = fix_of(finding, trace)
    assert found.kind == "wrapper"
    names: dict[str, type[torch.nn.Module]] = {"torch": torch}  # pyright: ignore[reportAssignmentType]  # a namespace
    exec(found.text, names)
    x = torch.randn(1, 1, 20, 24)
    whole = names["Mirrored"](model)(x)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole[:, :, 3:-3, 3:-3], model(x))
    assert "20 x 24: the input's resolution" in found.proof


class Several(torch.nn.Module):
    """Two images and a factor in; an output of half the resolution, one of the whole, and a number out."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Conv2d(1, 2, 5), torch.nn.Conv2d(1, 2, 5)
        self.coarse = torch.nn.Conv2d(4, 1, 2, 2)
        self.whole = torch.nn.Conv2d(4, 1, 3)
        self.gives = gives

    def forward(self, left: torch.Tensor, factor: torch.Tensor, right: torch.Tensor) -> Any:
        both = torch.cat([self.one(left), self.two(right)], 1) * factor
        half, whole = self.coarse(both), self.whole(both)
        mean = whole.mean()
        given = {"tuple": (half, None, whole, mean), "list": [half, whole, mean],
                 "dict": {"half": half, "whole": whole, "mean": mean}, "nested": (half, [whole], mean)}  # fmt: skip
        return given[self.gives]


def several(gives: str, kwargs: dict[str, Any]) -> Fix:
    inputs = ("1x1x20x24", "1", "1x1x20x24")
    options = StepOptions(inputs[: 3 - len(kwargs)], kwargs=kwargs, train=False).checked()
    recorder = StepRecorder(Several(gives), options, choose_target("cpu"))
    trace = record_again(recorder)
    return fix_of(next(f for f in check_trace(trace, recorder=recorder) if f.id == "border-erosion"), trace)


@pytest.mark.parametrize("gives", ["tuple", "list", "dict"])
@pytest.mark.parametrize("named", [False, True])
def test_the_wrapper_pads_every_image_and_crops_every_output(gives: str, named: bool) -> None:
    torch.manual_seed(0)
    found = several(gives, {"right": "1x1x20x24"} if named else {})
    assert found.kind == "wrapper", found.why
    names: dict[str, type[torch.nn.Module]] = {"torch": torch}  # pyright: ignore[reportAssignmentType]  # a namespace
    exec(found.text, names)
    model, x, y, factor = Several(gives), torch.randn(1, 1, 20, 24), torch.randn(1, 1, 20, 24), torch.tensor([2.0])
    wrapper = names["Mirrored"](model)
    whole, inner = (made(x, factor, right=y) if named else made(x, factor, y) for made in (wrapper, model))
    assert type(whole) is type(inner)
    assert len(whole) == len(inner)
    keys = ["half", "whole"] if gives == "dict" else [0, 2] if gives == "tuple" else [0, 1]
    assert whole[keys[0]].shape[2:] == (10, 12)
    assert whole[keys[1]].shape[2:] == (20, 24)
    torch.testing.assert_close(whole[keys[0]][:, :, 1:-1, 1:-1], inner[keys[0]])
    torch.testing.assert_close(whole[keys[1]][:, :, 3:-3, 3:-3], inner[keys[1]])


def test_what_a_wrapper_cannot_crop_is_said_in_a_sentence() -> None:
    found = several("nested", {})
    assert (found.kind, found.text) == ("none", "")
    assert "something else than tensors in a tuple, a list or a dictionary" in found.why


def test_a_model_that_does_not_run_with_padding_says_why_there_is_no_patch() -> None:
    class Cropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(3, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.cat([self.one(x), x[:, :, 1:-1, 1:-1]], 1))

    recorder = StepRecorder(Cropping(), StepOptions(("1x1x20x24",), train=False).checked(), choose_target("cpu"))
    trace = record_again(recorder)
    found = fix_of(next(f for f in check_trace(trace, recorder=recorder) if f.id == "border-erosion"), trace)
    assert found.kind == "wrapper"
    assert found.why.startswith("padded, the model cannot be recorded (step 1 raised RuntimeError: Sizes of tensors")
