"""`--host`: a budget of the host's memory that is exceeded ends as one of a card does; one line for every mistake."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from memplan.cli import main

MODEL = """
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4096, 16384)  # 256 MiB of weights

    def forward(self, x):
        return self.layer(x)
"""


@pytest.mark.parametrize(
    ("rows", "options", "code"),
    [
        (1, ["--host", "64MiB"], 1),
        (1, ["--host", "64GiB"], 0),
        (2_000_000, ["--device", "t4"], 1),
        (1, ["--device", "t4"], 0),
        (1, ["--device", "t4", "--host", "64MiB"], 1),
    ],
)
def test_an_exceeded_host_has_the_exit_code_of_an_exceeded_card(
    tmp_path: Path, rows: int, options: list[str], code: int
) -> None:
    (tmp_path / "wide.py").write_text(MODEL)
    target = f"{tmp_path / 'wide.py'}:Wide"
    result = CliRunner().invoke(main, ["explain", target, "--input", f"{rows}x4096", *options])
    assert result.exit_code == code, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0"], "host '0' is no memory at all."),
        (["--host", "32"], "host '32' has no unit."),
        (["--host", "much"], "'much' is not a number of bytes."),
        (["--host", "8GiB", "--measure"], "host with a measured step."),
        (["--host", "8GiB", "--lengths", "8:1"], "--host with --lengths, --weights or --activations."),
    ],
)
def test_a_mistake_in_one_line(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "wide.py").write_text(MODEL)
    result = CliRunner().invoke(main, ["explain", f"{tmp_path / 'wide.py'}:Wide", "--input", "1x4096", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"memplan: {words}")
    assert result.stderr.count("\n") == 1
