"""`memplan explain` as a user runs it: what it prints, what it writes, and its one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import memplan
from memplan.cli import main

MODELS = """
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x, deep=False):
        hidden = self.first(x).relu()
        return self.last(hidden.exp() if deep else hidden)


class Positive(nn.Module):
    def forward(self, x):
        return x.repeat_interleave(x[:, 0].abs().long(), 0)  # a shape that depends on values


def make(width: int = 8):
    return Net(width)


def make_loudly():
    print("made")
    return Net()


def number():
    return 3


def raising():
    raise KeyError("weights.pt")


def leaving():
    sys.exit(3)


def _build(branches, batch):
    net, x = Net(), torch.randn(batch, 4)

    def step():
        loss = net(x).sum()
        loss.backward()
        if branches and loss.item() > 3:
            net.zero_grad()

    return step


def build(batch: int = 2):
    return _build(False, batch)


def build_with_branch(batch: int = 2):
    return _build(True, batch)


def build_with_rounds():
    x = torch.randn(3, 64)

    def step():
        for one in x[:, 0]:
            y = x.repeat(20, 1) * 2 if one > 0 else x * 2

    return step


value = 3
"""


def line_of(text: str) -> str:
    """``nets.py:LINE`` of a line of `MODELS`."""
    return f"nets.py:{MODELS.split(text)[0].count(chr(10)) + 1}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def explain(*args: str) -> Result:
    return CliRunner().invoke(main, ["explain", *args])


def explained(*args: str) -> dict:
    """What --json - gives."""
    result = explain(*args, "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def twin(width: int = 8) -> nn.Module:
    """nets.py's Net, made of other classes: the bytes are the same."""
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def test_it_prints_the_headline_the_causes_and_the_layers() -> None:
    result = explain("nets.py:make", "--input", "2x4", "--optimizer", "adamw")
    assert result.exit_code == 0, result.stderr
    assert "268 B of weights ->" in result.stdout  # 4 * (4 * 8 + 8 + 8 * 3 + 3)
    for word in ("By cause", "optimizer state", "By layer", "first", "last", "per sample"):
        assert word in result.stdout
    assert result.stderr == ""


def test_json_is_what_the_library_says(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    assert explain("nets.py:make", "--input", "2x4", "--json", "out.json").exit_code == 0
    import nets  # pyright: ignore[reportMissingImports]  # written above

    told = json.loads((tmp_path / "out.json").read_text())
    expected = json.loads(json.dumps(memplan.explain(nets.make, "2x4").to_dict()))
    assert told.pop("title") == "nets.py:make"
    expected.pop("title")
    assert told == expected


def test_loss_optimizer_and_targets_are_those_of_torch() -> None:
    told = explained(
        "nets.py:make", "--input", "2x4", "--target", "2:int64<3", "--loss", "cross_entropy",
        "--optimizer", "sgd:lr=0.1,momentum=0.9",
    )  # fmt: skip
    expected = memplan.explain(
        twin,
        "2x4",
        targets=("2:int64<3",),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    assert told["by_cause"] == expected.by_cause
    assert told["by_cause"]["optimizer_state"] == 268


@pytest.mark.parametrize("name", ["adamw", "AdamW", "adamw:lr=1e-4,betas=(0.9,0.95)", "torch.optim:AdamW:lr=0.1"])
def test_an_optimizer_has_several_spellings(name: str) -> None:
    told = explained("nets.py:make", "--input", "2x4", "--optimizer", name)
    assert told["by_cause"]["optimizer_state"] == 2 * 268 + 4 * 4  # two moments, and a step count for each parameter


@pytest.mark.parametrize("loss", ["mse_loss", "MSELoss", "torch.nn.functional:mse_loss"])
def test_a_loss_has_several_spellings(loss: str) -> None:
    told = explained("nets.py:make", "--input", "2x4", "--loss", loss, "--target", "2x3")
    assert told["timeline"]["peak_allocated"] > 268


def test_arguments_reach_the_target() -> None:
    told = explained("nets.py:make", "--arg", "width=16", "--input", "2x4")
    assert told["by_cause"]["weight"] == 4 * (4 * 16 + 16 + 16 * 3 + 3)


def test_batch_replaces_the_leading_dimension_of_inputs_and_targets() -> None:
    loss = ("--loss", "cross_entropy")
    by_option = explained("nets.py:make", "--input", "2x4", "--target", "2:int64<3", *loss, "--batch", "32")
    assert by_option == explained("nets.py:make", "--input", "32x4", "--target", "32:int64<3", *loss)


def test_batch_is_the_argument_of_a_build() -> None:
    assert explained("nets.py:build", "--batch", "32") == explained("nets.py:build", "--arg", "batch=32")


def test_a_build_with_a_batch_is_scaled_to_twice_of_it() -> None:
    scaling = explained("nets.py:build", "--batch", "64")["scaling"]
    assert scaling["batches"] == [64, 128]
    peak = explained("nets.py:build", "--batch", "128")["timeline"]["peak_allocated"]
    assert scaling["peaks"][1] == peak
    assert scaling["fixed"] + 128 * scaling["per_sample"] == pytest.approx(peak)


def test_inference_saves_nothing() -> None:
    result = explain("nets.py:make", "--input", "2x4", "--no-train", "--optimizer", "adamw", "--json", "out.json")
    assert "left out" in result.stderr
    told = json.loads(Path("out.json").read_text())
    assert told["saved_bytes"] == told["by_cause"]["optimizer_state"] == 0
    assert "saves" not in result.stdout


def test_true_precision_halves_the_weights() -> None:
    told = explained("nets.py:make", "--input", "512x4", "--dtype", "bf16")
    assert told["by_cause"]["weight"] == 268 // 2
    assert told["by_cause"]["input"] == 512 * 4 * 2


def test_autocast_keeps_the_weights() -> None:
    told = explained("nets.py:make", "--input", "2x4", "--autocast", "bf16")
    assert told["by_cause"]["weight"] == 268


def test_an_input_may_go_by_name_and_a_keyword_may_be_a_switch() -> None:
    assert explained("nets.py:make", "--kwarg", "x=2x4") == explained("nets.py:make", "--input", "2x4")
    inner = explained("nets.py:make", "--input", "2x4", "--kwarg", "deep=false")["timeline"]
    assert inner == explained("nets.py:make", "--input", "2x4")["timeline"]
    assert explained("nets.py:make", "--input", "2x4", "--kwarg", "deep=True")["timeline"] != inner


def test_what_the_target_prints_is_held_back_and_told() -> None:
    result = explain("nets.py:make_loudly", "--input", "2x4", "--json", "-")
    assert any("1 line that it printed is not shown" in note for note in json.loads(result.stdout)["notes"])
    assert "made" not in result.stderr


def test_what_the_target_prints_does_not_get_into_the_json_where_it_is_shown() -> None:
    result = explain("nets.py:make_loudly", "--input", "2x4", "--json", "-", "--show-output")
    assert json.loads(result.stdout)
    assert "made" in result.stderr


@pytest.mark.parametrize("options", [(), ("--json", "-")])
def test_what_imports_print_is_one_line_on_stderr(options: tuple[str, ...], tmp_path: Path) -> None:
    """As with libraries that complain of what they do not find."""
    loud = "import sys\nprint('no extension')\nprint('deprecated', file=sys.stderr)\n"
    (tmp_path / "loud_imports.py").write_text(loud + "from nets import make\n", encoding="utf-8")
    result = explain("loud_imports.py:make", "--input", "2x4", *options)
    assert result.stdout.startswith("{" if options else "loud_imports.py:make: training step on cpu")
    assert result.stderr == "memplan: 2 lines that importing loud_imports.py printed are not shown (--show-output)\n"


def test_a_target_has_arguments_of_its_own_behind_dashes() -> None:
    Path("parses.py").write_text(PARSES)
    alone = explained("parses.py:build", "--top", "1")
    given = json.loads(explain("parses.py:build", "--json", "-", "--", "--batch", "400").stdout)
    assert given["timeline"]["peak_allocated"] > 10 * alone["timeline"]["peak_allocated"]
    wrong = explain("parses.py:build", "--", "--bacth", "4")
    assert wrong.exit_code == 2
    assert "as it read the arguments '--bacth 4' (at parses.py:" in wrong.stderr
    assert "behind --" in wrong.stderr
    assert "Arguments of its own come last, behind --" in explain("parses.py:build", "400").stderr


PARSES = """
import argparse
import torch

def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    model, x = torch.nn.Linear(8, 8), torch.randn(parser.parse_args().batch, 8)
    return lambda: model(x).sum().backward()
"""


def test_top_sums_up_the_layers_that_it_leaves_out() -> None:
    short = explain("nets.py:make", "--input", "2x4", "--top", "1").stdout
    full = explain("nets.py:make", "--input", "2x4", "--top", "0").stdout
    assert "more" in short
    assert "more" not in full


def test_a_trace_is_explained_again_to_the_same_numbers() -> None:
    first = explained("nets.py:build", "--trace", "step.json")
    again = explained("step.json")
    for key in ("by_cause", "layers", "saved", "timeline", "peak", "train"):
        assert again[key] == first[key]


def test_measure_really_runs_what_cannot_be_recorded() -> None:
    assert explain("nets.py:Positive", "--input", "4x4").exit_code == 2
    told = explained("nets.py:Positive", "--input", "4x4", "--no-train", "--measure")
    assert told["by_cause"]["input"] == 4 * 4 * 4


def test_a_branch_on_a_value_is_shown_and_named() -> None:
    result = explain("nets.py:build_with_branch")
    assert result.exit_code == 0
    said = " ".join(result.stdout.partition("By cause")[0].split())
    assert "a value decides a branch: one way the step takes" in said
    assert line_of("if branches") in said


def test_a_branch_that_is_not_bounded_is_2() -> None:
    result = explain("nets.py:build_with_rounds")
    assert result.exit_code == 2
    for word in ("a branch is decided by a value", line_of("if one > 0"), "--measure"):
        assert word in result.stderr
    assert "which are all taken to go the same way" in " ".join(result.stdout.split())
    assert "By cause" in result.stdout


FITTING = ["nets.py:make", "--input", "2x4"]
MISTAKES = {
    "no such callable": (["nets.py:mkae"], ["nets.py has no 'mkae'", "Did you mean make?"]),
    "no such file": (["net.py:make"], ["there is no file net.py", "Did you mean nets.py?"]),
    "no such folder": (["models/net.py:make"], ["there is no folder models"]),
    "no such module": (["nest:make"], ["there is no module nest", "Did you mean nets?"]),
    "no callable named": (["nets.py"], ["names no callable", "nets.py:Net"]),
    "not a callable": (["nets.py:value"], ["nets.py:value is of type int", "a callable"]),
    "neither module nor step": (
        ["nets.py:number"],
        ["returned a value of type int", line_of("def number"), "or a step"],
    ),
    "a build that raises": (
        ["nets.py:raising"],
        ["raised KeyError: 'weights.pt'", line_of("raise KeyError")],
    ),
    "a build that exits": (["nets.py:leaving"], ["called sys.exit(3)", line_of("sys.exit")]),
    "no input": (["nets.py:make"], ["Net.forward(x, deep", "was given no input", "--input"]),
    "an input that is none": (
        ["nets.py:make", "--input", "2by4"],
        ["'2by4' does not describe", "8x3x224x224"],
    ),
    "a misshapen input": (
        ["nets.py:make", "--input", "2x5"],
        ["layer first", line_of("self.first(x)"), "--input 2x5"],
    ),
    "a loss without a target": (
        [*FITTING, "--loss", "cross_entropy"],
        ["cross_entropy() missing 1 required positional argument: 'target'", "0 target(s)"],
    ),
    "a loss that does not fit": (
        [*FITTING, "--loss", "cross_entropy", "--target", "5:int64<3"],
        ["the loss", "(2, 3)", "batch_size (5)"],
    ),
    "a loss of many numbers": ([*FITTING, "--loss", "relu"], ["(2, 3)", "a scalar tensor"]),
    "no such loss": ([*FITTING, "--loss", "cros_entropy"], ["'cros_entropy'", "cross_entropy"]),
    "a target without a loss": ([*FITTING, "--target", "2x3"], ["--target without --loss"]),
    "a shape that depends on values": (
        ["nets.py:Positive", "--input", "4x4"],
        ["shape depends on values", "layer Positive", line_of("x.repeat_interleave"), "--measure"],
    ),
    "no such device": ([*FITTING, "--device", "h200x"], ["'h200x'", "Did you mean h200"]),
    "no such optimizer": ([*FITTING, "--optimizer", "adamx"], ["'adamx'", "Did you mean"]),
    "no such option of an optimizer": (
        [*FITTING, "--optimizer", "sgd:momentun=0.9"],
        ["no argument 'momentun'", "Did you mean momentum?"],
    ),
    "options that are none": ([*FITTING, "--optimizer", "sgd:0.9"], ["'0.9'", "name=value"]),
    "no such argument": (
        ["nets.py:make", "--arg", "widht=4"],
        ["no argument 'widht'", "Did you mean width?"],
    ),
    "an argument twice": (
        ["nets.py:make", "--arg", "width=4", "--arg", "width=5"],
        ["width was given twice"],
    ),
    "no such dtype for autocast": ([*FITTING, "--autocast", "bf17"], ["'bf17'", "bf16"]),
    "no batch to change": (["nets.py:make", "--batch", "4"], ["--batch 4", "--input", "batch or batch_size"]),
    "two batches": (["nets.py:build", "--batch", "4", "--arg", "batch=3"], ["--batch 4 and --arg batch=3"]),
    "an input for a step": (["nets.py:build", "--input", "2x4"], ["returned a step", "Leave them out"]),
    "inference of a step": (["nets.py:build", "--no-train"], ["returned a step", "--no-train"]),
    "a trace and an input": (["old.json", "--input", "2x4"], ["old.json is a trace", "--input"]),
    "a trace of another version": (["old.json"], ["schema version 99", "this memplan reads 2"]),
    "a trace that is none": (["empty.json"], ["is no trace"]),
    "a trace that is not there": (["none.json"], ["none.json cannot be read"]),
    "no such option": (["nets.py:make", "--inptu", "2x4"], ["--inptu", "--input"]),
    "no folder to write to": ([*FITTING, "--json", "no/o.json"], ["there is no folder"]),
    "a folder to write to": ([*FITTING, "--trace", "."], ["--trace . is a folder"]),
    "two texts on stdout": (["nets.py:make", "--json", "-", "--trace", "-"], ["stdout for one of them"]),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gets_one_line(args: list[str], words: list[str]) -> None:
    Path("old.json").write_text('{"format": "memplan.trace", "schema": 99}')
    Path("empty.json").write_text("{}")
    result = explain(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("memplan: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert [word for word in words if word not in result.stderr] == []


@pytest.mark.parametrize("args", [["nets.py:raising"], ["nets.py:Positive", "--input", "4x4"], ["nets.py:none"]])
def test_a_failed_run_leaves_files_as_they_were(args: list[str], folder: Path) -> None:
    for name in ("out.json", "step.json"):
        (folder / name).write_text("precious")
    before = sorted(os.listdir(folder))
    assert explain(*args, "--json", "out.json", "--trace", "step.json").exit_code == 2
    assert (folder / "out.json").read_text() == (folder / "step.json").read_text() == "precious"
    assert [name for name in os.listdir(folder) if name not in (*before, "__pycache__")] == []


def test_a_pipe_to_write_to_stays_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE)
    assert explain("nets.py:make", "--input", "2x4", "--json", "pipe").exit_code == 0
    assert json.loads(reader.communicate()[0])["title"] == "nets.py:make"


def test_debug_shows_the_traceback() -> None:
    result = explain("nets.py:raising", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "KeyError" in result.stderr


@pytest.mark.slow
def test_it_runs_as_a_program_in_a_pipe(folder: Path) -> None:
    command = [sys.executable, "-m", "memplan.cli", "explain", str(folder / "nets.py:make"), "--input", "2x4"]
    # as if installed: a path of its own may be relative
    path = str(Path(memplan.__file__).parents[1])
    done = subprocess.run(
        command, cwd="/", env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


def test_a_step_without_a_backward_pass_is_no_training_step(folder: Path) -> None:
    (folder / "forward.py").write_text(
        "import torch\n\n\ndef build():\n    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
        "    return lambda: layer(x)\n"
    )
    result = explain("forward.py:build", "--device", "cpu")
    assert result.exit_code == 0
    assert "forward.py:build: inference on cpu" in result.output
    assert "training" not in result.output
