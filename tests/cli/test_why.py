"""`memplan why` as a user runs it: a text, a file, standard input; one line for every mistake; without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

TEXT = (
    "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 0 "
    "bytes free; 1.24 GiB reserved in total by PyTorch)"
)


def run(*args: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["why", *map(str, args)], input=text)


def test_a_text_a_file_and_standard_input_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(f"step 1\n{TEXT}\nstopped\n")
    alone = run(TEXT)
    assert (alone.exit_code, alone.stderr) == (0, "")
    assert "Need, not fragmentation" in alone.stdout
    for other in (run(tmp_path / "train.log"), run(text=TEXT), run("-", text=f"x\n{TEXT}")):
        assert (other.exit_code, other.stdout) == (0, alone.stdout)


def test_json_to_a_file_and_to_stdout(tmp_path: Path) -> None:
    run(TEXT, "--json", tmp_path / "why.json")
    alone = run(TEXT, "--json", "-").stdout
    assert alone == (tmp_path / "why.json").read_text()
    assert json.loads(alone)["message"]["total"] == 6 << 30


@pytest.mark.parametrize("text", ["", "no such thing", "a\x00b", "x" * 5000])
def test_a_text_without_a_message_is_one_line(text: str) -> None:
    result = run(text)
    assert result.exit_code == 2
    assert result.stderr.startswith("memplan: no message about memory in ")
    assert result.stderr.count("\n") == 1


def test_a_folder_and_the_tail_of_a_long_log(tmp_path: Path) -> None:
    assert "has no logs. Expected files of .log" in run(tmp_path).stderr
    assert run(text="step\n" * 2_000_000 + TEXT).exit_code == 0


def test_torch_is_not_loaded() -> None:
    code = "import sys\nfrom memplan.cli import main\ntry:\n    main(['why', sys.argv[1]])\n"
    code += "finally:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, TEXT], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
