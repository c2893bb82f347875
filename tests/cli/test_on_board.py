"""`memplan fit --device-memory` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 800), nn.ReLU(), nn.Linear(800, 4))


def zeros():
    model = wide()
    nn.init.zeros_(model[3].weight)
    return model


def camera():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))


def photos():
    return [(torch.randn(1, 3, 32, 32), torch.tensor([1]))]


def pixels():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
"""
STEP = ("--target", "1:int64<4", "--loss", "cross_entropy", "--optimizer", "sgd:lr=0.05")
NET = ("models.py:net", "--input", "1x3x8", *STEP)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["fit", *arguments])


def test_a_board_says_what_can_be_trained(tmp_path: Path) -> None:
    result = run(*NET, "--device-memory", "STM32H743", "--reserve", "32KiB", "--json", str(tmp_path / "fit.json"))
    assert result.exit_code == 0, result.output
    assert "Sequential on stm32h743: all 2 layers can be trained" in result.stdout
    assert "AXI SRAM 512.0 KiB" in result.stdout
    assert "https://www.st.com/" in result.stdout
    plain = json.loads((tmp_path / "fit.json").read_text())
    assert [part["what"] for part in plain["parts"]] == ["all 2 layers", "biases and head", "head alone"]
    assert plain["reserve"] == 32 << 10
    assert [part["weights"] for part in plain["parts"]] == [60 + 196, 6 + 196, 196]


def test_bytes_as_inputs_are_counted_as_bytes() -> None:
    step = ("models.py:pixels", "--input", "1x1x8x8:uint8<256", *STEP, "--normalize", "127.5/58")
    result = run(*step, "--device-memory", "pico", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parts"][0]["inputs"] == 64 + 4


def test_the_option_of_eight_bits_is_in_the_advice() -> None:
    step = ("models.py:wide", "--input", "1x3x8", *STEP, "--device-memory", "nrf52840", "--reserve", "180KiB")
    floats, narrow = run(*step), run(*step, "--trained-weights", "int8")
    assert "2 layers can be trained" not in floats.stdout
    assert "all 2 layers can be trained" in narrow.stdout, narrow.output
    assert "+ int8 weights" in narrow.stdout
    assert "--trained-weights int8" in " ".join(narrow.stdout.split())


def test_weights_of_zeros_cost_their_row_alone() -> None:
    step = ("models.py:zeros", "--input", "1x3x8", *STEP, "--device-memory", "nrf52840", "--reserve", "180KiB")
    result = run(*step, "--trained-weights", "int8", "--json", "-")
    whole, narrow, *others = json.loads(result.stdout)["parts"]
    assert (whole["lacks"], narrow["ram"]) == ("SRAM", 0)
    assert narrow["lacks"] == "3.weight has zeros alone"
    assert others[-1]["lacks"] == "", "the head alone is planned in float32"
    assert "3.weight has zeros" in " ".join(run(*step, "--trained-weights", "int8").stdout.split())


def test_exit_code_1_where_nothing_fits() -> None:
    result = run(*NET, "--device-memory", "nrf52840", "--reserve", "256KiB")
    assert result.exit_code == 1, result.output
    assert "nothing of it can be trained" in result.stdout
    assert "give batches of your data (--calibrate" in " ".join(result.stdout.split())
    assert "--calibrate" not in run(*NET, "--device-memory", "nrf52840").stdout


def test_data_lets_frozen_layers_be_in_eight_bits() -> None:
    """The head of a camera of 16 KiB of floats (tests/exporting/test_board_fit.py) in the 16 KiB that the reserve
    leaves."""
    step = ("models.py:camera", "--input", "1x3x32x32", *STEP, "--device-memory", "nrf52840", "--reserve", "240KiB")
    text = " ".join(run(*step, "--calibrate", "models.py:photos").stdout.split())
    assert "head alone can be trained, in 15.5 KiB of RAM, input in the arena, frozen layers in eight bits" in text
    assert "+ arena, int8" in text
    assert "--input-in-arena --frozen-layers int8 --calibrate TARGET" in text
    assert "the loss moves from" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device-memory", "stm32h7"), "nearest are stm32h743"),
        (("--device-memory", "pico", "--budget", "1MiB"), "--budget with --device-memory"),
        (("--device-memory", "pico", "--predict", "--plan", "a.json"), "--predict, --plan with --device-memory"),
        (("--device-memory", "pico", "--html", "a.html"), "--html with --device-memory"),
        (("--device-memory", "pico", "--autocast", "bf16"), "positional inputs in float32"),
        (("--device-memory", "pico", "--reserve", "much"), "much"),
        (("--device-memory", "pico", "--calibrate", "models.py:net"), "calibrate=a Sequential"),
        (("--budget", "1MiB", "--reserve", "1KiB"), "--reserve without --device-memory"),
        (("--budget", "1MiB", "--normalize", "1/2"), "--normalize without --device-memory"),
        (("--budget", "1MiB", "--calibrate", "models.py:photos"), "--calibrate without --device-memory"),
        (("--budget", "1MiB", "--trained-weights", "int8"), "--trained-weights without --device-memory"),
    ],
)
def test_what_does_not_go_together_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*NET, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_step_without_an_optimizer_is_refused() -> None:
    result = run("models.py:net", "--input", "1x3x8", "--device-memory", "pico")
    assert result.exit_code == 2
    assert "--optimizer" in result.stderr
