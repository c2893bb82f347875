"""`memplan devices` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import memplan
from memplan.cli import main
from memplan.devices import catalogue
from memplan.devices.cards import CARDS


def devices(*args: str) -> Result:
    return CliRunner().invoke(main, ["devices", *args])


def test_it_lists_every_card_once_the_smallest_first() -> None:
    result = devices()
    assert (result.exit_code, result.stderr) == (0, "")
    table = result.stdout.partition("\n\n")[0].splitlines()[3:]
    assert [line.split()[0] for line in table] == [card.name for card in catalogue()]


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        # 85017755648 bytes; 3.35 TB/s; the whitepaper's dense TFLOPS
        ("h100", "H100 SXM5 80 GB 79.2 78.3-78.8 3350 989 989 66.9 9.0"),
        ("t4", "T4 14.6 14.0-14.5 320 - 65 8.1 7.5"),  # no bfloat16
    ],
)
def test_a_row_has_the_figures(name: str, cells: str) -> None:
    rows = [line.split() for line in devices().stdout.splitlines()]
    assert [name, *cells.split()] in rows


def test_a_name_shows_its_figures_and_every_source() -> None:
    result = devices("RTX 4090")
    assert (result.exit_code, result.stderr) == (0, "")
    words = " ".join(result.stdout.split())
    for text in ("rtx4090: NVIDIA GeForce RTX 4090", "capacity 23.5 GiB (25250758656 bytes)", "float32 82.6 TFLOP/s"):
        assert text in words
    card = next(card for card in CARDS if card.name == "rtx4090")
    assert [source for source in card.sources if source not in words] == []


@pytest.mark.parametrize("args", [[], ["b200"]])
def test_json_holds_the_same(args: list[str], tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    result = devices(*args, "--json", str(path))
    assert (result.exit_code, result.stdout) == (0, devices(*args).stdout)
    told = json.loads(path.read_text())["devices"]
    assert told == [card.to_dict() for card in catalogue() if not args or card.name in args]
    assert devices(*args, "--json", "-").stdout == path.read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["h10"], ["There is no card 'h10'", "Did you mean", "h100"]),
        (["cuda:0"], ["'cuda:0' names no card", "such as h100"]),
        (["h100", "--json", "no/o.json"], ["there is no folder"]),
        (["h100", "a100"], ["a100"]),
    ],
)
def test_a_mistake_gets_one_line(args: list[str], words: list[str]) -> None:
    result = devices(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("memplan: ")
    assert result.stderr.count("\n") == 1
    assert [word for word in words if word not in result.stderr] == []


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_runs_in_a_pipe_without_torch(encoding: str) -> None:
    code = """
import sys
from memplan.cli import main
for args in ([], ["rtx4060"], ["--json", "-"], ["h10"]):
    try: main(["devices", *args])
    except SystemExit as end: print(end.code, "torch" in sys.modules, file=sys.stderr)
    print("\\nnext")
"""
    env = {**os.environ, "PYTHONPATH": str(Path(memplan.__file__).parents[1]), "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    ends = [line for line in done.stderr.splitlines() if not line.startswith("memplan: ")]
    assert ends == ["0 False", "0 False", "0 False", "2 False"], done.stderr
    assert "\x1b" not in done.stdout
    everything, one, _, _ = done.stdout.split("\nnext\n", 3)
    for text in (everything, one):
        assert 0 < max(map(len, text.splitlines())) <= 80
        assert "…" not in text  # nothing had to be cut
