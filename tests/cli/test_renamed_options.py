"""Former spellings of options do what the present ones do, with a line that names these."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from memplan.cli import main
from memplan.cli.renamed_options import current_spelling

FORMER = [
    ("explain", "m.py:net --precision bf16 --infer", "m.py:net --autocast bf16 --no-train"),
    ("explain", "m.py:net --precision=fp16-true", "m.py:net --dtype fp16"),
    ("fit", "m.py:net --precision fp32 --budget 1GiB", "m.py:net --budget 1GiB"),
    ("export", "m.py:net --out device --on cortex-m4", "m.py:net --folder device --device cortex-m4"),
    ("measure", "--dry h100 --torch ~/env m.py:net", "--dry --device h100 --environment ~/env m.py:net"),
    ("compare", "a b --b-precision bf16 --a-infer", "a b --b autocast=bf16 --b dtype=none --a no-train"),
    ("compare", "a --b-arg width=8 --b-batch=4", "a --b arg=width=8 --b batch=4"),
    ("compare", "a --precision bf16 --b-precision fp32", "a --autocast bf16 --b autocast=none --b dtype=none"),
]  # fmt: skip
PRESENT = [
    ("run", "train.py --precision bf16 --infer --dry h100"),  # the script's own
    ("explain", "m.py:net -- --precision bf16 --infer"),  # the target's own
    ("sweep", "m.py:net --precision fp32,bf16"),  # an axis
    ("measure", "--dry m.py:net --device h100"),
    ("measure", "--dry package.module:net --device h100"),
    ("explain", "m.py:net --precision bf17"),  # refused as an unknown option
    ("explain", "m.py:net --precision"),
]


@pytest.mark.parametrize(("command", "former", "present"), FORMER)
def test_a_former_spelling_is_replaced_and_named(command: str, former: str, present: str) -> None:
    words, notes = current_spelling(command, former.split())
    assert words == present.split()
    assert notes
    assert current_spelling(command, words) == (words, [])


@pytest.mark.parametrize(("command", "typed"), PRESENT)
def test_what_is_no_former_spelling_is_left_alone(command: str, typed: str) -> None:
    assert current_spelling(command, typed.split()) == (typed.split(), [])


@pytest.mark.parametrize(("command", "former", "present"), FORMER)
def test_the_present_spellings_are_options(command: str, former: str, present: str) -> None:
    parsed = main.get_command(Context(main), command)
    assert parsed is not None
    known = {name for parameter in parsed.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in present.split() if word.startswith("--")} <= known


def test_a_former_spelling_gives_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(8, 8)\n")
    typed = ("explain", "nets.py:net", "--input", "4x8", "--device", "cpu")
    former = CliRunner().invoke(main, [*typed, "--precision", "bf16", "--infer", "--json", "-"])
    present = CliRunner().invoke(main, [*typed, "--autocast", "bf16", "--no-train", "--json", "-"])
    assert former.exit_code == present.exit_code == 0
    assert former.stdout == present.stdout
    assert former.stderr.splitlines() == [
        "memplan: --precision bf16 is now --autocast bf16.", "memplan: --infer is now --no-train."
    ]  # fmt: skip
