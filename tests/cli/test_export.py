"""`memplan export` as a user runs it: what is written and printed, exit codes, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from environment import thinned

from memplan.cli import main
from memplan.exporting.trials.proving import c_compiler

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    layers = [nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48, 4))


def broken():
    model = net()
    model[5].bias.data[1] = float("nan")
    return model


class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x.mean(1)).sort(1).values


def batches():
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(1, 3, 8, generator=drawn), torch.tensor([k])) for k in range(4)]


def frozen():
    model = net().eval()
    model[:2].requires_grad_(False)
    return model


nothing = None
"""
STEP = ("--input", "1x3x8", "--target", "1:int64<4", "--loss", "cross_entropy", "--optimizer", "sgd:lr=0.05")
NET = ("models.py:net", *STEP, "--budget", "16KiB", "--folder", "device")
UNPROVEN = (*NET, "--no-verify")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", *arguments])


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler")
def test_a_small_part_is_trained_and_the_rest_is_in_a_file_in_eight_bits(models: Path) -> None:
    options = (
        "--frozen-weights",
        "int8",
        "--weights-file",
        "--flash",
        "600",
        "--json",
        "found.json",
        "--name",
        "2 Nets",
    )
    done = run(*NET, "--search-update", "models.py:batches", *options, "--budget", "560")
    assert done.exit_code == 0, done.output
    found = json.loads((models / "found.json").read_text())
    assert (found["format"], found["proven"], found["name"]) == ("memplan.export", True, "net_2_nets")
    assert found["ram"] == found["arena"] + found["state"] + found["inputs"] <= 560
    trained = [one["path"] for one in found["choice"]["candidates"] if one["trained"]]
    assert 0 < len(trained) < 6
    assert found["rounding"]["weights"] == sum(
        size for path, size in (("0.weight", 6 * 3 * 3), ("5.weight", 48 * 4)) if path not in trained
    )
    assert found["flash"] == (models / "device" / "net_2_nets.bin").stat().st_size + 4
    assert all(f"\n{path} " in done.output for path in trained)
    wide = " ".join(done.output.split())
    assert "name net_2_nets, for 2 Nets" in wide
    assert f"the outputs move by {found['rounding']['forward_error']:.2%} of their norm" in wide
    assert f"{len(trained)} of 6 parameters are trained: {found['choice']['share']:.0%} of the squared" in wide
    assert done.output.rstrip().endswith("no sanitizer report")


@pytest.mark.slow
def test_weights_are_trained_in_eight_bits(models: Path) -> None:
    done = run(*UNPROVEN, "--trained-weights", "int8", "--json", "found.json")
    assert done.exit_code == 0, done.output
    whole = json.loads((models / "found.json").read_text())
    found = whole["int8_trained"]
    assert [(row["name"], row["elements"]) for row in found["weights"]] == [("0.weight", 54), ("5.weight", 192)]
    assert found["elements"] == 54 + 192
    assert whole["state"] == 4 * (6 + 2 * 6 + 4 + 2 * 6 + 3) + 248, "biases, the norm, its statistics, counters"
    wide = " ".join(done.output.split())
    assert f"246 weights trained in eight bits, rounded by at most {found['worst']:.2%}" in wide
    assert "Trained in eight bits bytes rounded by update, in steps at its bound" in wide
    refused = run(*UNPROVEN, "--trained-weights", "int8", "--optimizer", "adam")
    assert refused.exit_code == 2
    assert "Adam keeps moments in float32" in " ".join(refused.output.split())


@pytest.mark.slow
def test_frozen_layers_compute_in_eight_bits(models: Path) -> None:
    options = ("--frozen-layers", "int8", "--calibrate", "models.py:batches", "--json", "found.json")
    done = run("models.py:frozen", *UNPROVEN[1:], *options)
    assert done.exit_code == 0, done.output
    found = json.loads((models / "found.json").read_text())["int8"]
    assert [row["layer"] for row in found["layers"]] == ["2"]
    assert found["layers"][0]["ops"] == ["convolution", "native_batch_norm_legit_no_training", "relu"]
    assert 0 < found["worst"] < 0.05
    assert found["weights"] == 6 * 3 * 3
    wide = " ".join(done.output.split())
    assert f"1 frozen layer in eight bits; what they hand on is off by {found['worst']:.2%}" in wide
    assert found["stays"] == []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_exports_are_the_same_byte_for_byte(models: Path) -> None:
    for folder in ("device", "again"):
        assert run(*UNPROVEN, "--frozen-weights", "int8", "--folder", folder).exit_code == 0
    assert files(models / "again") == files(models / "device")
    assert set(files(models / "device")) == {
        "sequential.c", "sequential.h", "sequential.json", "sequential_weights.h", "test_sequential.c", "Makefile",
        "sequential.md"
    }  # fmt: skip


@pytest.mark.slow
def test_other_processes_write_the_same(models: Path) -> None:
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "memplan.cli", "export", *UNPROVEN, "--folder", seed]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed})
    assert files(models / "1") == files(models / "2")


def test_what_does_not_fit_ends_with_1() -> None:
    done = run(*UNPROVEN, "--budget", "300")
    assert done.exit_code == 1, done.output
    assert "It does not fit. The smallest budget that it fits is " in done.output
    done = run(*UNPROVEN, "--flash", "100")
    assert done.exit_code == 1, done.output
    assert "It does not fit. The smallest flash that it fits is " in done.output
    assert "weights_file=True" in done.output
    done = run(*UNPROVEN, "--budget", "50", "--search-update", "models.py:batches")
    assert done.exit_code == 1, done.output
    assert "training one parameter takes" in " ".join(done.output.split())


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler")
def test_code_that_computes_something_else_ends_with_1(monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    from memplan.exporting.kernels import call_writer

    right = call_writer.template
    wrong = lambda name: right(name).replace("one = -share", "one = -2 * share")  # noqa: E731
    monkeypatch.setattr(call_writer, "template", wrong)
    done = run(*NET)
    assert done.exit_code == 1, done.output
    assert "differs from PyTorch" in done.output
    assert (models / "device" / "sequential.c").is_file(), "left for a look"


@pytest.mark.parametrize(
    ("arguments", "said"),
    thinned(
        [
            (NET[:-2], "Missing option '--folder'"),
            (("models.py:nothing", *NET[1:]), "models.py:nothing"),
            (("models.py:broken", *NET[1:]), "5.bias has elements that are not finite"),
            (("models.py:Sorted", *NET[1:]), "sort (at models.py:24)"),
            ((*NET, "--kwarg", "x=1"), "--kwarg"),
            ((*NET, "--on", "cortex-a72"), "'cortex-a72' is not one of 'cortex-m4', 'cortex-m7'"),
            ((*NET, "--flash", "much"), "'much'"),
            ((*NET, "--budget", "80%"), "budget='80%'"),
            ((*NET, "--frozen-weights", "int4"), "'int4' is not one of 'float32', 'int8'"),
            ((*NET, "--frozen-layers", "int8"), "frozen_layers='int8' without calibrate"),
            ((*NET, "--calibrate", "models.py:batches"), "calibrate without frozen_layers='int8'"),
            ((*NET, "--frozen-layers", "int8", "--calibrate", "models.py:net"), "calibrate=a Sequential"),
            ((*NET, "--search-update", "models.py:net"), "search_update=a Sequential"),
            ((*NET, "--search-update", "models.py:none"), "models.py has no 'none'"),
            ((*NET, "--optimizer", "adagrad"), "Adagrad"),
        ],
        3,
    ),
)
def test_wrong_arguments_end_with_2(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


def test_files_of_others_are_left_alone(models: Path) -> None:
    (models / "device").mkdir()
    (models / "device" / "notes.txt").write_text("mine")
    done = run(*UNPROVEN)
    assert done.exit_code == 2
    assert "holds other files (notes.txt)" in " ".join(done.output.split())
    assert os.listdir(models / "device") == ["notes.txt"]
    assert run(*UNPROVEN, "--force").exit_code == 0
    assert (models / "device" / "notes.txt").read_text() == "mine"


def test_without_a_compiler_it_is_written_but_not_verified(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    done = run(*NET)
    assert done.exit_code == 0, done.output
    assert done.output.rstrip().endswith("Proof: not verified: no C compiler was found")
    assert "not verified: no C compiler was found" in (models / "device" / "sequential.md").read_text()
    assert run(*NET, "--verify").exit_code == 2


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler")
def test_gradients_are_added_up_and_clipped_and_bytes_normalized(models: Path) -> None:
    options = ("--accumulate", "2", "--clip-norm", "0.5", "--normalize", "1,2,3/4,5,6", "--name", "net")
    done = run(*NET, "--input", "1x3x8:uint8<9", *options, "--json", "found.json")
    assert done.exit_code == 2, "two inputs"
    step = [argument if argument != "1x3x8" else "1x3x8:uint8<9" for argument in NET]
    done = run(*step, *options, "--json", "found.json")
    assert done.exit_code == 0, done.output
    found = json.loads((models / "found.json").read_text())
    assert found["proven"]
    assert found["byte_inputs"] == [{"name": "x", "buffer": False}]
    assert "after every 2 calls" in (models / "device" / "net.h").read_text()
    assert "normalized as it is read" in run(*step, *options, "--force", "--no-verify").output
    for wrong in ("1", "1/2/3", "a/b", "1,/2"):
        refused = run(*step, "--normalize", wrong)
        assert refused.exit_code == 2
        assert f"--normalize {wrong}" in refused.output
    assert "clip_norm=-1.0" in run(*step, "--clip-norm", "-1").output
